"""The JSON records of expiration timers, layout v1.

A slot is a worker's place for one timer at a time. It is overwritten and never deleted, so its version grows with each
write. The version exposes a late copy of an old write, and the end of a lease cannot be mistaken for a release.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ftcoord.core.layout import timers_span
from ftcoord.core.strict import build, dump, load, part
from ftcoord.errors import StateError

RELEASED: Final = b""
"""The value of a slot without a timer."""


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
    pid: int
    start: int
    node: str
    rank: int
    ledger: int
    ttl: int


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
    after_ms: int
    left_ms: int
    at_ms: int
    wall_ms: int
    slot: int
    token: int
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
    if timer.worker.pid < 1 or timer.worker.ttl < 1 or min(timer.left_ms, timer.slot, timer.token) < 0:
        raise StateError(key, "holds numbers that no timer has, so it is not ftcoord's")
    return timer
