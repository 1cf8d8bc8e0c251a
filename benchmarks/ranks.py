"""The ranks of one replica group, each in a process of its own: what a step costs them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from statistics import median, quantiles
from typing import Any, Final

from torch.distributed import TCPStore

from benchmarks.lighthouses import OURS, TIMEOUT, TORCHFT, classes, serving
from benchmarks.processes import Processes, free_port
from benchmarks.report import run_alone, table
from ftcoord.core.layout import decided_key
from ftcoord.etcd.client import EtcdClient

WORLD_SIZES: Final = (1, 2, 4, 8)
STEPS_A_TURN: Final = 20
REPEAT: Final = 200
"""Steps of each; of fewer the 90th percentile says little."""
TARGET: Final = 1.5
"""Times torchft's."""


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

    def step(self) -> float:
        """A quorum and a vote together with the other ranks; the seconds of both."""
        begin = time.perf_counter()
        self._step += 1
        self._client._quorum(self._rank, self._step, "metadata", False, True, 0, TIMEOUT)
        self._client.should_commit(self._rank, self._step, True, TIMEOUT)
        return time.perf_counter() - begin

    def commit(self) -> float:
        """A vote together with the other ranks; its seconds."""
        begin = time.perf_counter()
        self._client.should_commit(self._rank, self._step, True, TIMEOUT)
        return time.perf_counter() - begin


def _serve(pipe: Connection, numbers: Sequence[int], kind: str, address: str, store_port: int, world_size: int) -> None:
    """One rank. Between the steps of a turn the ranks wait for nobody but each other, as in training."""
    logging.disable(logging.WARNING)
    (number,) = numbers
    rank = Rank(kind, address, store_port, world_size, number)
    rank.step()
    pipe.send(None)
    while True:
        method, count = pipe.recv()
        pipe.send([getattr(rank, method)() for _ in range(count)])


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds until the last rank was answered, of many calls, and etcd's revisions for each call."""

    seconds: list[float]
    writes: float

    @property
    def median(self) -> float:
        return median(self.seconds)

    def __str__(self) -> str:
        return f"{1000 * self.median:.2f} / {1000 * quantiles(self.seconds, n=10)[-1]:.2f}"


class Group:
    """The ranks of one kind, and what they took."""

    def __init__(self, ranks: Processes, etcd: EtcdClient | None) -> None:
        self._ranks, self._etcd = ranks, etcd
        self._seconds: dict[str, list[float]] = {"step": [], "commit": []}
        self._writes = {"step": 0, "commit": 0}

    def turn(self, method: str, count: int) -> None:
        """Have all ranks do it so often."""
        before = self._revision()
        times = self._ranks.ask((method, count))
        self._writes[method] += self._revision() - before
        self._seconds[method] += [max(each) for each in zip(*times, strict=True)]

    def times(self, method: str) -> Times:
        seconds = self._seconds[method]
        return Times(seconds, self._writes[method] / len(seconds))

    def _revision(self) -> int:
        return self._etcd.get(decided_key("/any")).revision if self._etcd else 0


@contextlib.contextmanager
def _group(kind: str, world_size: int) -> Iterator[Group]:
    store = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    with contextlib.ExitStack() as stack:
        address, endpoint = stack.enter_context(serving(kind, 1))
        etcd = stack.enter_context(EtcdClient(endpoint)) if endpoint else None
        arguments: tuple[Any, ...] = (kind, address, store.port, world_size)
        yield Group(stack.enter_context(Processes(world_size, _serve, *arguments, processes=world_size)), etcd)


def turns(repeat: int) -> list[int]:
    """How many steps each turn has, so that there are `repeat` in all."""
    return [min(STEPS_A_TURN, repeat - done) for done in range(0, repeat, STEPS_A_TURN)]


def measure(world_size: int, repeat: int) -> tuple[Group, Group]:
    """Steps of one group of ours and of one of torchft's, each alone in its job, by turns."""
    with _group(OURS, world_size) as ours, _group(TORCHFT, world_size) as theirs:
        for count in turns(repeat):
            for group in (ours, theirs):
                group.turn("step", count)
                group.turn("commit", count)
        return ours, theirs


def run(world_sizes: tuple[int, ...], repeat: int) -> str:
    """Measure, and tell it in Markdown."""
    rows, samples = [], 0
    quorum = 0.0
    """Seconds of one quorum, of a group of one rank: the first row's."""
    for size in world_sizes:
        ours, theirs = measure(size, repeat)
        samples = len(ours.times("step").seconds)
        cells = [size, *(of.times(method) for method in ("step", "commit") for of in (ours, theirs))]
        step, commit = ((ours.times(method), theirs.times(method)) for method in ("step", "commit"))
        quorum = quorum or step[0].median - commit[0].median
        ratios = (step[0].median - quorum) / step[1].median, commit[0].median / commit[1].median
        rows.append(
            [*map(str, cells), *(f"{ratio:.2f}" for ratio in ratios), f"{step[0].writes:.2f} / {commit[0].writes:.2f}"]
        )
    header = ["ranks", *(f"{call}, {kind}" for call in ("step", "`should_commit`") for kind in (OURS, TORCHFT))]
    return f"""## The ranks of a group

`python -m benchmarks.ranks`: one group, alone in its job; each rank is a process, and rank 0's has the manager. Until
the last rank is answered, median / 90th percentile in ms of {samples}. A step is a `_quorum` and a `should_commit`.
Targets: without the quorum (measured with one rank) a step and a `should_commit` take at most {TARGET} times torchft's.

{table([*header, "step without the quorum, ratio", "`should_commit`, ratio", "etcd's writes, step / vote"], rows)}"""


if __name__ == "__main__":
    run_alone("benchmarks.ranks", lambda repeat: run(WORLD_SIZES, repeat), REPEAT)
