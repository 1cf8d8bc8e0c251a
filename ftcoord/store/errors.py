"""Translates ftcoord's errors into those that torch's stores raise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed
from torch.distributed import DistNetworkError, DistStoreError

from ftcoord import errors

QueueEmptyError: type[Exception] = getattr(torch.distributed, "QueueEmptyError", DistStoreError)
"""torch's error for an empty queue; torch 2.6 has none."""


class RoundOverError(errors.RoundOver, DistStoreError):
    """The fence of a store is gone: both an `ftcoord.errors.RoundOver` and a DistStoreError."""


@contextlib.contextmanager
def as_torch_errors() -> Iterator[None]:
    """Raises DistNetworkError when etcd did not answer, RoundOverError when the fence is gone, else DistStoreError."""
    try:
        yield
    except errors.RoundOver as error:
        raise RoundOverError(str(error)) from None
    except (errors.EtcdUnavailable, errors.OutcomeUnknown) as error:
        raise DistNetworkError(f"timeout: etcd did not answer in time: {error}") from None
    except (errors.ClientClosed, errors.EtcdAuthError, errors.EtcdNoSpace, errors.RequestRefused) as error:
        raise DistStoreError(str(error)) from None
