"""The ranks of one replica group, each in a process of its own: what a step costs them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any, Final

from torch.distributed import TCPStore

from benchmarks.crowd import Crowd
from benchmarks.lighthouses import OURS, TIMEOUT, TORCHFT, classes, serving
from benchmarks.metrics import Load
from benchmarks.processes import free_port
from benchmarks.report import table

WORLD_SIZES: Final = (1, 2, 4, 8)


class Rank:
    """A rank, which knows its manager from the group's TCPStore, as torchft's Manager does. Rank 0 runs the manager."""

    def __init__(self, kind: str, address: str, store_port: int, world_size: int, number: int) -> None:
        server, client = classes(kind)
        store = TCPStore("127.0.0.1", store_port, is_master=False, timeout=TIMEOUT)
        self._rank, self._step = number, 0
        if number == 0:
            beat = timedelta(milliseconds=100)
            where = ("localhost", "[::]:0", "store:1")
            self._server = server("group", address, *where, world_size, beat, TIMEOUT, 0)
            store.set("manager", self._server.address())
        self._client = client(store.get("manager").decode(), TIMEOUT)

    def quorum(self) -> Any:
        """Ask for one together with the other ranks."""
        self._step += 1
        return self._client._quorum(self._rank, self._step, "metadata", False, True, 0, TIMEOUT)

    def commit(self) -> bool:
        """Vote on a step together with the other ranks."""
        return bool(self._client.should_commit(self._rank, self._step, True, TIMEOUT))


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of a quorum and of a vote (medians), and etcd's writes for both, of the whole group."""

    quorum: float
    commit: float
    writes: float


@contextlib.contextmanager
def _group(kind: str, address: str, world_size: int) -> Iterator[Crowd[Rank]]:
    store = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    make = partial(Rank, kind, address, store.port, world_size)
    with Crowd(make, world_size, Rank.quorum, processes=world_size) as ranks:
        yield ranks


def measure(kind: str, world_size: int, repeat: int) -> Step:
    """Steps of one group that is alone in its job."""
    with serving(kind, 1) as (address, etcd), _group(kind, address, world_size) as ranks:
        before = Load.read(etcd) if etcd else None
        quorums, commits = [], []
        for _ in range(repeat):
            quorums.append(ranks.do(Rank.quorum))
            commits.append(ranks.do(Rank.commit))
        writes = Load.read(etcd).since(before).writes / repeat if etcd and before else 0.0
        return Step(median(quorums), median(commits), writes)


def run(world_sizes: tuple[int, ...], repeat: int) -> str:
    """Measure, and tell it in Markdown."""
    rows = []
    for size in world_sizes:
        ours, theirs = (measure(kind, size, repeat) for kind in (OURS, TORCHFT))
        pairs: list[Callable[[Step], float]] = [lambda step: step.quorum, lambda step: step.commit]
        cells = [f"{1000 * of(step):.2f}" for of in pairs for step in (ours, theirs)]
        rows.append([str(size), *cells, f"{ours.writes / size:.2f}"])
    header = ["ranks", *(f"`{call}`, {kind}" for call in ("_quorum", "should_commit") for kind in (OURS, TORCHFT))]
    return f"""### The ranks of a group

One group, each rank a process; ms until the last rank is answered, medians of {repeat}. A step is one of each.

{table([*header, "etcd writes a rank and step"], rows)}"""
