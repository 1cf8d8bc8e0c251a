"""gRPC, loaded so that it keeps its log lines off the user's terminal. Import `grpc` from here, and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["grpc", "quiet_grpc"]


@contextmanager
def quiet_grpc() -> Iterator[None]:
    """gRPC writes log lines of its own to the user's terminal unless this variable tells it not to. It reads it when
    it is loaded (or, in older releases, with the first channel); nobody else shall find it in the environment."""
    if "GRPC_VERBOSITY" in os.environ:
        yield
        return
    os.environ["GRPC_VERBOSITY"] = "NONE"
    try:
        yield
    finally:
        os.environ.pop("GRPC_VERBOSITY", None)


with quiet_grpc():
    import grpc
