"""The JSON records of expiration timers, layout v1.

A slot is a worker's place for one timer at a time. It is overwritten and never deleted, so its version grows with each
write. The version exposes a late copy of an old write, and the end of a lease cannot be mistaken for a release.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from ftcoord.core.layout import timers_span
from ftcoord.core.strict import LARGEST, Range, Size, build, dump, load, part
from ftcoord.errors import StateError

RELEASED: Final = b""
"""The value of a slot without a timer."""
SLOTS: Final = 8192
"""How many timers a process may hold at once."""
LONGEST_TTL: Final = 3600
"""Seconds that a worker's lease may live after its last renewal."""
_MOST_MS: Final = 10**15
"""Milliseconds, some 30,000 years: no clock shows more, and arithmetic on it is exact."""
_Ms = Annotated[int, Range(0, _MOST_MS)]


@dataclass(frozen=True, slots=True)
class Worker:
    """A process, identified beyond doubt.

    Args:
        host: the machine's boot and the pid namespace; on one host, pids and monotonic clocks are the same for all.
        pid, start: the process, and when it started, in the kernel's clock ticks.
        node: the host's name, for people.
        rank: the worker's rank, for people; -1 if it has none.
        ledger: the process's descriptor of its ledger, which shows at once which timers are held.
        ttl: its lease's TTL, in seconds.
    """

    host: str
    pid: Annotated[int, Range(1, 2**22)]
    start: Size
    node: str
    rank: Annotated[int, Range(-1, LARGEST)]
    ledger: Annotated[int, Range(-1, 2**31 - 1)]
    ttl: Annotated[int, Range(1, LONGEST_TTL)]


@dataclass(frozen=True, slots=True)
class Timer:
    """A timer that runs, or has expired.

    Args:
        worker: its worker.
        scope: the scope that the worker is in.
        after_ms: how long the worker may be there in all.
        left_ms: how much of that was left when this was written.
        at_ms: when this was written, on the host's monotonic clock.
        wall_ms: the same on its wall clock, for people.
        slot, token: its place in the worker's ledger, and the value there while it is held.
        expired: the server that marked it expired and handles it; empty while it runs.
        reaped: whether that server has reaped the worker.
    """

    worker: Worker
    scope: str
    after_ms: _Ms
    left_ms: _Ms
    at_ms: _Ms
    wall_ms: int
    slot: Annotated[int, Range(0, SLOTS - 1)]
    token: Size
    expired: str = ""
    reaped: bool = False


def encode(timer: Timer) -> bytes:
    """The record as JSON, with the layout's version."""
    return dump(timer)


def parse_timer(key: str, value: bytes) -> Timer | None:
    """The timer in a slot; None if it was released. Raises StateError."""
    if value == RELEASED:
        return None
    raw = load(key, value)
    timer = build(Timer, key, {**raw, "worker": build(Worker, key, part(key, raw, "worker"))})
    if timers_span("", timer.worker.host).start not in key:
        raise StateError(key, "holds a timer of another host, so it is not ftcoord's")
    return timer
