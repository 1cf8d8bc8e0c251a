"""`init_process_group(init_method="etcd://...")`: jobs that have no torchrun (Slurm, MPI, by hand) bootstrap from etcd.

Each process is a member of a run as torchrun's agents are, so all that is true of a round is true here: its store is
fresh, and once the next round of the run is decided nobody can write to it. A run that is started again under its old
id therefore meets none of its old keys, and waits for no old member longer than its lease lasts.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Final

from torch.distributed import Store, register_rendezvous_handler
from torch.distributed.elastic.rendezvous.api import RendezvousStateError

from ftcoord.config import EtcdConfig
from ftcoord.rendezvous.create import connect
from ftcoord.rendezvous.handler import EtcdRendezvousHandler
from ftcoord.rendezvous.url import INIT_METHODS, parse_url

DEFAULT_TIMEOUT: Final = timedelta(minutes=30)
_registered: set[str] = set()
_here: dict[tuple[EtcdConfig, str], _Handler] = {}
"""Who has a seat in which run, of this process: one that takes part again gives up the one that it had."""


def register_init_methods() -> None:
    """Teach `init_process_group` the schemes `etcd://` and `etcds://` (TLS) in this process; idempotent.

        ftcoord.register_init_methods()
        init_process_group("gloo", init_method="etcd://h1:2379,h2:2379/run7", rank=rank, world_size=4)

    `rank` and `world_size` may stand in the URL instead. Without a rank, members are ranked in the order in which they
    came; without either, the world is all that came within the last call (`last_call_timeout`, 30 s) from the first.
    Settings of `rdzv_conf` may follow in the query; TLS and login also come from the environment.
    (https://docs.pytorch.org/docs/stable/distributed.html#initialization)
    """
    for scheme in INIT_METHODS.keys() - _registered:
        register_rendezvous_handler(scheme, _rendezvous)  # type: ignore[no-untyped-call]
        _registered.add(scheme)


def _rendezvous(url: str, timeout: timedelta = DEFAULT_TIMEOUT, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """One world. Raises ConfigError before any socket is opened, and what `next_rendezvous` raises."""
    asked = parse_url(url, timeout.total_seconds())
    assert asked.settings.etcd is not None
    run = (asked.settings.etcd, asked.settings.prefix)
    if before := _here.pop(run, None):
        before.leave()
    handler = _Handler(asked.settings, connect(asked.settings.etcd))
    with ExitStack() as undo:
        undo.callback(handler.leave)  # else it would keep its seat, and whoever tries again find the world full
        info = handler.next_rendezvous()
        info.store.set_timeout(timeout)
        rank = info.rank if asked.rank is None else asked.rank
        if asked.rank is not None:
            _claim(info.store, asked.rank, handler.host)
        undo.pop_all()
    _here[run] = handler
    yield info.store, rank, info.world_size
    raise RendezvousStateError("this world is decided for good: start the process again to take part in another one")


class _Handler(EtcdRendezvousHandler):
    """Ends with its process; nobody asks it for a TCPStore."""

    use_agent_store = False

    def leave(self) -> None:
        """Give the seat up, and leave the run to the others."""
        self._leave()


def _claim(store: Store, rank: int, host: str) -> None:
    """Make sure that nobody else of this round has the same rank."""
    owner = f"{host}, {uuid.uuid4().hex}"
    holder = store.compare_set(f"ftcoord/ranks/{rank}", "", owner).decode()
    if holder != owner:
        raise RendezvousStateError(
            f"rank {rank} was given to {holder} and to {owner}: give each process a rank of its own"
        )
