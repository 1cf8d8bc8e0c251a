"""The JSON records of expiration timers, layout v2, and how a timer is displayed. Pure: `now` is an argument, in
seconds.

A worker has one key, with all timers that it holds. Another key marks a timer as expired.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from ftcoord.core.strict import LARGEST, Range, Size, build, build_each, dump, load, part

LAYOUT: Final = 2
MOST_TIMERS: Final = 256
"""How many timers a process may hold at once."""
LONGEST_SCOPE: Final = 256
"""Characters of a scope's name that are recorded: the last ones, where torch puts the line number. With as many timers
as a process may hold, a record fits into one write of etcd's."""
_Ms = Annotated[int, Range(0, 10**15)]
"""Milliseconds, up to some 30,000 years: no clock shows more, and arithmetic on it is exact."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A process, identified beyond doubt.

    Args:
        host: the machine's boot and the pid namespace; on one host, pids and monotonic clocks are the same for all.
        pid, start: the process, and when it started, in the kernel's clock ticks.
        node: the host's name, for people.
        rank: the worker's rank, for people; -1 if it has none.
        ledger: the process's descriptor of its ledger, which shows at once which timers it holds.
    """

    host: str
    pid: Annotated[int, Range(1, 2**22)]
    start: Size
    node: str
    rank: Annotated[int, Range(-1, LARGEST)]
    ledger: Annotated[int, Range(0, 2**31 - 1)]


@dataclass(frozen=True, slots=True)
class Timer:
    """A timer that a worker holds.

    Args:
        scope: the scope that the worker is in.
        after_ms: how long it may be there in all.
        until_ms: when that is over, on the host's monotonic clock.
        wall_ms: the same on its wall clock, for people.
        slot, token: its place in the worker's ledger, and the value there while it is held.
    """

    scope: str
    after_ms: _Ms
    until_ms: _Ms
    wall_ms: _Ms
    slot: Annotated[int, Range(0, MOST_TIMERS - 1)]
    token: Size


@dataclass(frozen=True, slots=True)
class HeldTimers:
    """The timers that a worker holds; in a mark, the one that has expired."""

    worker: Worker
    timers: tuple[Timer, ...]


@dataclass(frozen=True, slots=True)
class TimerInfo:
    """A timer, for display. Its times are exact on the worker's own host; elsewhere they include clock skew.

    Attributes:
        host: the name of the worker's host.
        pid: the worker's pid on that host.
        rank: the worker's rank in its world; None if it has none.
        scope: the scope that the worker is in.
        age: seconds since it entered the scope.
        left: seconds until the timer expires; negative if it is overdue.
    """

    host: str
    pid: int
    rank: int | None
    scope: str
    age: float
    left: float


def encode(held: HeldTimers) -> bytes:
    """The record as JSON, with the layout's version."""
    return dump(held, LAYOUT)


def parse_timers(key: str, value: bytes) -> HeldTimers:
    """The timers in a worker's key, or in a mark. Raises StateError."""
    raw = load(key, value, LAYOUT)
    worker = build(Worker, key, part(key, raw, "worker"))
    return build(HeldTimers, key, {**raw, "worker": worker, "timers": build_each(Timer, key, raw, "timers")})


def inform(worker: Worker, timer: Timer, host: str, now: float, wall: float) -> TimerInfo:
    """A timer as seen by a reader on `host`, whose monotonic clock shows `now` and whose wall clock shows `wall`."""
    left = timer.until_ms / 1000 - now if worker.host == host else timer.wall_ms / 1000 - wall
    rank = worker.rank if worker.rank >= 0 else None
    return TimerInfo(
        host=worker.node, pid=worker.pid, rank=rank, scope=timer.scope, age=timer.after_ms / 1000 - left, left=left
    )
