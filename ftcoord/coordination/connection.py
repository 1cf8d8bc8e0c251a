"""A client of a job's etcd, and its failures in torchft's words."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

from ftcoord.coordination import checks
from ftcoord.coordination.address import Job, parse_address
from ftcoord.errors import ConfigError, EtcdError, StateError
from ftcoord.etcd.shared import SharedClient
from ftcoord.etcd.threads import apart

ATTEMPT: float = 5.0
"""Seconds that one request to etcd may take."""


def connect(address: str, connect_timeout: float) -> tuple[Job, SharedClient]:
    """The job of an address, and a client whose etcd has answered. Raises RuntimeError after `connect_timeout` seconds.

    Also for a malformed address, as torchft does; but at once.
    """
    try:
        job = parse_address(address)
        client = SharedClient(replace(job.config(), request_timeout=ATTEMPT))
    except ConfigError as error:
        raise _unreachable(address, connect_timeout, error) from error
    with contextlib.ExitStack() as undo:
        undo.callback(client.close)
        try:
            client.status(timeout=max(connect_timeout, 0.05))
        except EtcdError as error:
            raise _unreachable(address, connect_timeout, error) from error
        undo.pop_all()
    return job, client


def when_forgotten(owner: object, close: Callable[..., None], *arguments: object) -> None:
    """Has `close(*arguments)` called when nobody holds `owner` any more; not at the end of the process.

    On a thread of its own, as `apart` says.
    """
    weakref.finalize(owner, apart, close, *arguments).atexit = False


def _unreachable(address: str, connect_timeout: float, error: Exception) -> RuntimeError:
    return RuntimeError(
        f"failed to connect to {address.partition('?')[0]} within timeout of {connect_timeout:g}s; verify the"
        f" address and that etcd is up: {error}"
    )


@contextlib.contextmanager
def torchft_errors() -> Iterator[None]:
    """Raises TimeoutError and RuntimeError with torchft's texts."""
    try:
        yield
    except TimeoutError as error:
        raise checks.timed_out() from error
    except StateError as error:
        raise checks.failed("Internal", str(error)) from error
    except EtcdError as error:
        raise checks.failed("Unavailable", str(error)) from error
