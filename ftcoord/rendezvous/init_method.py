"""`init_process_group(init_method="etcd://...")`: jobs without torchrun (Slurm, MPI, by hand) bootstrap from etcd.

Each process is a member of a run, as torchrun's agents are. So a round has the same properties here: its store is
fresh, and nobody can write to it once the next round of the run is decided. A run that is restarted under its old id
therefore sees none of its old keys, and does not wait for an old member longer than its lease lasts.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Final

from torch.distributed import Store, register_rendezvous_handler
from torch.distributed.elastic.rendezvous.api import RendezvousStateError

from ftcoord.config import EtcdConfig, whole
from ftcoord.errors import ConfigError
from ftcoord.job_url import SCHEMES, endpoints_of, parse_job_url
from ftcoord.rendezvous.bootstrap import check_local_addr
from ftcoord.rendezvous.handler import EtcdRendezvousHandler, connect
from ftcoord.rendezvous.settings import RendezvousSettings

DEFAULT_TIMEOUT: Final = timedelta(minutes=30)
NO_LIMIT: Final = 2**31 - 1
_FORM: Final = "write it as etcd://host:port,host:port/run?world_size=4"
_OWN: Final = ("rank", "world_size", "local_addr")
_world = whole(1, NO_LIMIT)
_rank = whole(0, NO_LIMIT)
_registered: set[str] = set()
_here: dict[tuple[EtcdConfig, str], _Handler] = {}
"""This process's seat in each run. When the process takes part again, it gives up its old seat."""


def register_init_methods() -> None:
    """Register the schemes `etcd://` and `etcds://` (TLS) with `init_process_group` in this process. Idempotent.

    And `etcd+srv://` and `etcds+srv://`, with a domain for whose members DNS has SRV records.

        ftcoord.register_init_methods()
        init_process_group("gloo", init_method="etcd://h1:2379,h2:2379/run7", rank=rank, world_size=4)

    `rank` and `world_size` may be in the URL instead. Without ranks, processes are ranked in the order in which they
    join. Without either, the world is every process that joins within `last_call_timeout` (30 s) of the first one. A
    rank needs a world size. The URL's query takes settings of `rdzv_conf`; TLS and login also come from the
    environment. (https://docs.pytorch.org/docs/stable/distributed.html#initialization)

    `init_process_group` waits for `timeout`, 30 minutes by default, and raises:

    - `ConfigError` (a ValueError) for a bad URL, before any socket is opened;
    - torch's `RendezvousTimeoutError` when the world is not complete in time;
    - `RendezvousConnectionError` when etcd refuses or does not answer;
    - `RendezvousClosedError` when the run is over;
    - `RendezvousStateError` when two processes have the same rank, the world sizes differ, or the run's record cannot
      be read.
    """
    for scheme in SCHEMES.keys() - _registered:
        register_rendezvous_handler(scheme, _rendezvous)  # type: ignore[no-untyped-call]
        _registered.add(scheme)


def _rendezvous(url: str, timeout: timedelta = DEFAULT_TIMEOUT, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield one world. Raises ConfigError before any socket is opened, and what `next_rendezvous` raises."""
    settings, asked = parse_url(url, timeout.total_seconds())
    assert settings.etcd is not None
    check_local_addr(settings.local_addr)
    run = (settings.etcd, settings.prefix)
    if before := _here.pop(run, None):
        before.leave()
    handler = _Handler(settings, connect(settings.etcd, settings.times.join_timeout))
    with ExitStack() as undo:
        undo.callback(handler.leave)  # else it would keep its seat, and whoever tries again find the world full
        info = handler.next_rendezvous()
        info.store.set_timeout(timeout)
        rank = info.rank if asked is None else asked
        if asked is not None:
            _claim(info.store, asked, handler.host)
        undo.pop_all()
    _here[run] = handler
    yield info.store, rank, info.world_size
    raise RendezvousStateError("this world is decided for good: start the process again to take part in another one")


class _Handler(EtcdRendezvousHandler):
    """Ends with its process, and serves no TCPStore."""

    use_agent_store = False

    def leave(self) -> None:
        """Give up the seat, and leave the run to the others."""
        self._leave()


def _claim(store: Store, rank: int, host: str) -> None:
    """Claim a rank in this round. Raises RendezvousStateError if another process has it."""
    owner = f"{host}, {uuid.uuid4().hex}"
    holder = store.compare_set(f"ftcoord/ranks/{rank}", "", owner).decode()
    if holder != owner:
        raise RendezvousStateError(
            f"rank {rank} was given to {holder} and to {owner}: give each process a rank of its own"
        )


def parse_url(url: str, timeout: float, env: Mapping[str, str] | None = None) -> tuple[RendezvousSettings, int | None]:
    """The run's settings, and this member's rank, if the URL has one.

    `timeout`, in seconds, is the join timeout if the URL has none. The path is the run id, percent-encoded. Besides
    `rank`, `world_size` and `local_addr` the query takes the keys of `rdzv_conf`. The default port is 2379; without a
    host, the endpoints come from FTCOORD_ENDPOINTS.

    Raises ConfigError.
    """
    scheme, place, name, query = parse_job_url("init_method", url, _FORM)
    world_size = _world("world_size", query["world_size"]) if "world_size" in query else None
    rank = _rank("rank", query["rank"]) if "rank" in query else None
    if rank is not None and (world_size is None or rank >= world_size):
        raise ConfigError("rank", rank, "give the world_size too, and a rank below it")
    settings = RendezvousSettings.parse(
        backend="etcd-v3",
        endpoint=endpoints_of(scheme, place),
        run_id=name,
        min_nodes=world_size or 1,
        max_nodes=world_size or NO_LIMIT,
        local_addr=query.get("local_addr"),
        conf={
            "join_timeout": timeout,
            **({"protocol": "https"} if SCHEMES[scheme] else {}),
            **{k: v for k, v in query.items() if k not in _OWN},
        },
        env=env,
    )
    return settings, rank
