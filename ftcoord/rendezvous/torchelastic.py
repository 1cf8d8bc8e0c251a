"""torch's older interfaces, on ftcoord: the names of its etcd backends, and torchelastic's handler (0.2).

`install_legacy_names` lets job templates with `--rdzv-backend=etcd-v2` go unchanged. torchelastic's `next_rendezvous()`
returns a tuple, and its errors have other names
(https://github.com/pytorch/elastic/blob/v0.2.2/torchelastic/rendezvous/api.py).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Final

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import api

from ftcoord.logs import show_log_lines
from ftcoord.rendezvous.settings import is_known

log = logging.getLogger(__name__)
NAMES: Final = ("etcd", "etcd-v2")


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

    def __init__(self, handler: api.RendezvousHandler) -> None:
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
    except api.RendezvousClosedError as error:
        raise RendezvousClosedException(str(error)) from error
    except api.RendezvousTimeoutError as error:
        raise RendezvousTimeoutException(str(error)) from error
    except api.RendezvousError as error:
        raise RendezvousNonRetryableError(str(error)) from error


def install_legacy_names() -> None:
    """Make `--rdzv-backend=etcd` and `etcd-v2` run on ftcoord in this process. Idempotent.

    Call it before torchrun makes its rendezvous handler; FTCOORD_REPLACE_LEGACY=1 in torchrun's environment does the
    same. torch refuses to register a name twice, so this replaces the entries of its registry (tested with torch 2.6
    and 2.13). The old `rdzv_conf` keys keep their meaning, and those of `etcd-v3` work too. Other keys are ignored, as
    torch's backends do, with a warning that names them.

    Raises ImportError without torch.
    """
    for name in NAMES:
        api.rendezvous_handler_registry._registry[name] = _create


def _create(params: api.RendezvousParameters) -> api.RendezvousHandler:
    from ftcoord.rendezvous.handler import check_for_torch, create_handler, with_conf

    show_log_lines()
    check_for_torch(params)
    log.warning("--rdzv-backend=%s runs on ftcoord's etcd-v3, through etcd's v3 API", params.backend)
    foreign = [key for key in params.config if not is_known(key)]
    if foreign:  # without their values: they may be secrets
        ignored = ", ".join(foreign)
        log.warning("rdzv_conf has keys that --rdzv-backend=%s does not know; ignored: %s", params.backend, ignored)
    return create_handler(with_conf(params, {key: params.config[key] for key in params.config if is_known(key)}))
