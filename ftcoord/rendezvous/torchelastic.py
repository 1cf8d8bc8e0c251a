"""The rendezvous interface of the torchelastic package (0.2), for launchers that still use it.

There `next_rendezvous()` returns a tuple, and the errors have other names
(https://github.com/pytorch/elastic/blob/v0.2.2/torchelastic/rendezvous/api.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.distributed import Store
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousTimeoutError,
)


class RendezvousClosedException(Exception):
    """The run is over."""


class RendezvousTimeoutException(Exception):
    """No round was decided in time."""


class RendezvousNonRetryableError(Exception):
    """Any other failure; trying again in this process does not help."""


class TorchelasticHandler:
    """A `torch.distributed.elastic` rendezvous handler with torchelastic's interface.

    handler = TorchelasticHandler(create_handler(RendezvousParameters("etcd-v3", endpoint, run_id, 1, 4)))
    store, rank, world_size = handler.next_rendezvous()
    """

    def __init__(self, handler: RendezvousHandler) -> None:
        self._handler = handler

    def next_rendezvous(self) -> tuple[Store, int, int]:
        """Take part in the next round; returns its store, this node's rank and the number of nodes.

        Raises RendezvousClosedException, RendezvousTimeoutException, RendezvousNonRetryableError.
        """
        with _old_names():
            info = self._handler.next_rendezvous()
        return info.store, info.rank, info.world_size

    def is_closed(self) -> bool:
        """Whether the run is over."""
        with _old_names():
            return self._handler.is_closed()

    def set_closed(self) -> None:
        """End the run for all nodes."""
        with _old_names():
            self._handler.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        """More than 0 if the agent should call `next_rendezvous` again."""
        return self._handler.num_nodes_waiting()

    def get_run_id(self) -> str:
        """The run id, as the user gave it."""
        return self._handler.get_run_id()

    def shutdown(self) -> bool:
        """Leave, and close the run; returns whether that reached etcd."""
        return self._handler.shutdown()


@contextlib.contextmanager
def _old_names() -> Iterator[None]:
    try:
        yield
    except RendezvousClosedError as error:
        raise RendezvousClosedException(str(error)) from error
    except RendezvousTimeoutError as error:
        raise RendezvousTimeoutException(str(error)) from error
    except RendezvousError as error:
        raise RendezvousNonRetryableError(str(error)) from error
