"""Expiration timers: their records and keys, and when one has expired. Pure: `now` is an argument, in seconds.

    <prefix>/timers/<host>/<lease id>/<slot>    a Timer under the worker's lease; empty once it was released

A slot is a worker's place for one timer at a time. It is written over and never deleted, so that its version grows
with each write: a late copy of an old write is told by that, and a lease that ended is never taken for a release.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from ftcoord.core.strict import build, dump, load, part
from ftcoord.errors import StateError

RELEASED: Final = b""
"""The value of a slot without a timer."""
CLAIM_PATIENCE: Final = 2.0
"""Seconds for which a server leaves a timer to another one that has found it expired."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Worker:
    """A process, so described that no other one can be taken for it.

    Args:
        host: the machine's boot and the pid namespace; on one host pids and monotonic clocks are the same for all.
        pid, start: the process, and when it began, in the kernel's clock ticks.
        node: the host's name, for people.
        rank: the worker's rank, for people; -1 if it has none.
        ledger: the descriptor in that process of what tells at once which timers are held.
        ttl: of its lease, in seconds.
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
        worker: whose it is.
        scope: where the worker is.
        after_ms: how long it may be there in all.
        left_ms: how much of that was left when this was written.
        at_ms: when this was written, on the host's monotonic clock.
        wall_ms: the same on its wall clock, for people.
        slot, token: its place in the worker's ledger, and what stands there as long as it is held.
        expired: the server that found it expired and sees to it; empty while it runs.
        reaped: whether that server did.
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


@dataclass(frozen=True, slots=True)
class TimerInfo:
    """A timer as people want to see it. On its own host the times are exact, elsewhere they compare wall clocks.

    Attributes:
        host: the name of the worker's host.
        pid: the worker's, on that host.
        rank: the worker's in its world; None if it has none.
        scope: where the worker is.
        age: seconds since it entered the scope.
        left: seconds until the timer expires, negative if that is overdue.
    """

    host: str
    pid: int
    rank: int | None
    scope: str
    age: float
    left: float


def timers_prefix(prefix: str, host: str = "") -> str:
    """What the keys of a run's timers start with, or those of one of its hosts."""
    return f"{prefix}/timers/{host}/" if host else f"{prefix}/timers/"


def slot_key(prefix: str, host: str, lease: int, slot: str) -> str:
    return f"{timers_prefix(prefix, host)}{lease:016x}/{slot}"


def encode(timer: Timer) -> bytes:
    """The record as JSON, with the layout's version."""
    return dump(timer)


def parse(key: str, value: bytes) -> Timer | None:
    """The timer in a slot; None if it was released. Raises StateError."""
    if value == RELEASED:
        return None
    raw = load(key, value)
    timer = build(Timer, key, {**raw, "worker": build(Worker, key, part(key, raw, "worker"))})
    if timers_prefix("", timer.worker.host) not in key:
        raise StateError(key, "holds a timer of another host, so it is not ftcoord's")
    if timer.worker.pid < 1 or timer.worker.ttl < 1 or min(timer.left_ms, timer.slot, timer.token) < 0:
        raise StateError(key, "holds numbers that no timer has, so it is not ftcoord's")
    return timer


def inform(timer: Timer, host: str, now: float, wall: float) -> TimerInfo:
    """What a reader on `host` can say of a timer, whose monotonic clock says `now` and whose wall clock `wall`."""
    worker = timer.worker
    since = now - timer.at_ms / 1000 if worker.host == host else wall - timer.wall_ms / 1000
    left = timer.left_ms / 1000 - max(since, 0.0)
    rank = worker.rank if worker.rank >= 0 else None
    return TimerInfo(worker.node, worker.pid, rank, timer.scope, timer.after_ms / 1000 - left, left)


def due(timer: Timer, me: str, now: float, listed: bool) -> float:
    """When a server, `me`, that learns of a timer now has to see to it.

    The time runs from now. Where the timer was `listed`, because it was there before the server began to look, what
    passed since it was written counts too: by the clock of the worker's host, which is the server's. What another
    server has found expired is left to that one for a while.
    """
    if timer.expired and timer.expired != me:
        return now + CLAIM_PATIENCE
    passed = max(now - timer.at_ms / 1000, 0.0) if listed else 0.0
    return now + max(timer.left_ms / 1000 - passed, 0.0)


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """What a server knows of a timer: when it is due, since when it is known, and when to look at it next."""

    item: T
    due: float
    since: float
    look_at: float


class Book(Generic[T]):
    """The timers that a server watches, by key. Knows no clock: times are those of whoever asks."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, Entry[T]] = {}
        self._held_until = -math.inf

    @property
    def entries(self) -> Mapping[Hashable, Entry[T]]:
        """All of them."""
        return self._entries

    def note(self, key: Hashable, item: T, due: float, now: float) -> None:
        """Watch a timer, in place of what was known under its key."""
        self._entries[key] = Entry(item, due, now, due)

    def drop(self, key: Hashable) -> None:
        """Watch it no more, if it is watched."""
        self._entries.pop(key, None)

    def postpone(self, key: Hashable, until: float, item: T | None = None) -> None:
        """Look at a timer that is due again then, and at what it has become, if that is given."""
        if (known := self._entries.get(key)) is not None:
            self._entries[key] = replace(known, look_at=until, item=known.item if item is None else item)

    def hold(self, until: float) -> None:
        """Let nothing expire before that: what the server knows may be old."""
        self._held_until = max(self._held_until, until)

    def shift(self, seconds: float) -> None:
        """Give all timers more time: for as long neither the server ran nor, perhaps, the workers."""
        for key, one in self._entries.items():
            self._entries[key] = replace(one, due=one.due + seconds, look_at=one.look_at + seconds)

    def expired(self, now: float) -> list[tuple[Hashable, Entry[T]]]:
        """What is to be looked at, the oldest first; nothing while it is held."""
        if now < self._held_until:
            return []
        found = [(key, one) for key, one in self._entries.items() if one.look_at <= now]
        return sorted(found, key=lambda pair: pair[1].due)

    def look_at(self) -> float:
        """When there will be something to look at; infinity if never."""
        return max(min((one.look_at for one in self._entries.values()), default=math.inf), self._held_until)
