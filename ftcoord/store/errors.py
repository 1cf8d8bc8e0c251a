"""What goes wrong with etcd, in the error types that torch's stores raise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed
from torch.distributed import DistNetworkError, DistStoreError

from ftcoord.errors import (
    ClientClosed,
    EtcdAuthError,
    EtcdNoSpace,
    EtcdUnavailable,
    OutcomeUnknown,
    RequestRefused,
    RoundOver,
)

QueueEmptyError: type[Exception] = getattr(torch.distributed, "QueueEmptyError", DistStoreError)
"""What torch raises for an empty queue; torch 2.6 has none."""


class RoundOverError(RoundOver, DistStoreError):
    """The fence of a store is gone: what `ftcoord.errors.RoundOver` is, for users of torch's error types too."""


@contextlib.contextmanager
def as_torch_errors() -> Iterator[None]:
    """Raises DistNetworkError where etcd did not answer, RoundOverError behind a fence, DistStoreError for the rest."""
    try:
        yield
    except RoundOver as error:
        raise RoundOverError(str(error)) from None
    except (EtcdUnavailable, OutcomeUnknown) as error:
        raise DistNetworkError(f"timeout: etcd did not answer in time: {error}") from None
    except (ClientClosed, EtcdAuthError, EtcdNoSpace, RequestRefused) as error:
        raise DistStoreError(str(error)) from None
