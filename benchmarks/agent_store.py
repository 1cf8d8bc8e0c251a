"""What torch's agents do with the store of a round: they assign ranks through it, and leave through a barrier.

The steps are those of torch/distributed/elastic/agent/server/api.py (`_assign_worker_ranks`, `_exit_barrier`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final

from torch.distributed.elastic.utils.store import barrier

from benchmarks.agents import Host
from benchmarks.crowd import TIMEOUT, Crowd
from benchmarks.metrics import AS_ETCD_DOES, Load
from benchmarks.processes import BenchmarkError
from ftcoord.config import EtcdConfig
from ftcoord.etcd.api import Put
from ftcoord.etcd.client import EtcdClient
from ftcoord.store import EtcdStore
from tests.etcd_cluster import EtcdCluster

FENCE: Final = "/benchmark/round"
ROUND, PLAIN = KINDS = ("a round's", "EtcdStore")
"""A round's store has a fence, which every change checks and every waiter watches, and a lease that it never renews."""


class StoreUser:
    """One agent: the same calls in the same order as torch's."""

    def __init__(self, kind: str, endpoints: str, count: int, lease: int, number: int) -> None:
        self._rank, self._count, self._turn = number, count, 0
        self._store = _store(kind, endpoints, lease)

    def connect(self) -> None:
        """The first operation."""
        self._store.set(f"here/{self._rank}", "")

    def assign(self) -> None:
        """Each sets one key, rank 0 reads all and writes all, each reads one."""
        self._turn += 1
        mine, theirs = f"torchelastic/{self._turn}/role_info/", f"torchelastic/{self._turn}/assigned_ranks/"
        self._store.set(f"{mine}{self._rank}", f'{{"role": "default", "rank": {self._rank}, "local_world_size": 8}}')
        if self._rank == 0:
            infos = self._store.multi_get([f"{mine}{rank}" for rank in range(self._count)])
            answers = [f"[{8 * rank}, {8 * len(infos)}, {8 * rank}, {8 * len(infos)}]" for rank in range(len(infos))]
            self._store.multi_set([f"{theirs}{rank}" for rank in range(self._count)], answers)
        self._store.get(f"{theirs}{self._rank}")

    def leave(self) -> None:
        """The barrier at an agent's end."""
        self._turn += 1
        barrier(self._store, self._count, f"torchelastic/{self._turn}/agent/terminal_state", TIMEOUT.total_seconds())


def _store(kind: str, endpoints: str, lease: int) -> EtcdStore:
    host_client = Host(EtcdConfig.load(endpoints))
    if kind == PLAIN:
        return EtcdStore(host_client, "/benchmark/plain/", TIMEOUT)
    return EtcdStore(host_client, "/benchmark/store/", TIMEOUT, lease=lease, fence=FENCE)


@dataclass(frozen=True, slots=True)
class Use:
    """What one step took (seconds, median), and what it cost etcd for all agents."""

    seconds: float
    load: Load


def measure(kind: str, count: int, members: int, repeat: int, patience: float, processes: int) -> dict[str, Use]:
    """Raises BenchmarkError when a step does not come about in time."""
    with EtcdCluster(members, extra_args=AS_ETCD_DOES) as cluster, EtcdClient(cluster.endpoints) as client:
        lease = client.grant(3600).id
        client.txn((), [Put(FENCE, b"", lease)])
        with _crowd(kind, cluster.endpoints, count, lease, patience, processes) as crowd:
            found = {}
            for name, step in STEPS.items():
                before = Load.read(cluster.endpoints)
                seconds = median(crowd.do(step) for _ in range(repeat))
                found[name] = Use(seconds, Load.read(cluster.endpoints).since(before))
            return found


def _crowd(kind: str, endpoints: str, count: int, lease: int, patience: float, processes: int) -> Crowd[StoreUser]:
    make = partial(StoreUser, kind, endpoints, count, lease)
    return Crowd(make, count, StoreUser.connect, processes, patience)


STEPS: Final = {"assign ranks": StoreUser.assign, "leave": StoreUser.leave}


def rows(sizes: Sequence[int], members: int, repeat: int, patience: float, processes: int) -> list[list[str]]:
    """For a table: N, the step, the store, ms, and for each agent CPU of etcd (ms), kB, requests, events, writes."""
    found = []
    for count in sizes:
        for kind in KINDS:
            try:
                uses = measure(kind, count, members, repeat, patience, processes)
            except BenchmarkError as error:
                found.append([str(count), "-", kind, str(error), *"-----"])
                continue
            found += [[str(count), name, kind, *_cells(use, count * repeat)] for name, use in uses.items()]
    return found


def _cells(use: Use, each: int) -> list[str]:
    load = use.load
    requests = sum(load.requests.values())
    return [
        f"{1000 * use.seconds:.0f}",
        f"{1000 * load.cpu / each:.2f}",
        f"{load.bytes_out / each / 1000:.2f}",
        f"{requests / each:.1f}",
        f"{load.events / each:.1f}",
        f"{load.writes / each:.2f}",
    ]
