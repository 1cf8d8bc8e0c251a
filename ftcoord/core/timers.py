"""When an expiration timer has expired, and what people see of it. Pure: `now` is an argument, in seconds."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from ftcoord.core.timer_records import Timer

CLAIM_TIMEOUT: Final = 2.0
"""Seconds for which a server leaves a timer to another server that found it expired."""

T = TypeVar("T")


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
    passed since it was written counts too: by the clock of the worker's host, which is the server's. A timer
    that another server found expired is left to that server for a while.
    """
    if timer.expired and timer.expired != me:
        return now + CLAIM_TIMEOUT
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
    """The timers that a server watches, by key. It has no clock: the caller's times count."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, Entry[T]] = {}
        self._held_until = -math.inf

    @property
    def entries(self) -> Mapping[Hashable, Entry[T]]:
        """All timers that are watched."""
        return self._entries

    def note(self, key: Hashable, item: T, due: float, now: float) -> None:
        """Watch a timer, in place of what was known under its key."""
        self._entries[key] = Entry(item, due, now, due)

    def drop(self, key: Hashable) -> None:
        """Stop watching it. Without effect if it is not watched."""
        self._entries.pop(key, None)

    def postpone(self, key: Hashable, until: float, item: T | None = None) -> None:
        """Look at a due timer again at `until`; `item` replaces what was known of it."""
        if (known := self._entries.get(key)) is not None:
            self._entries[key] = replace(known, look_at=until, item=known.item if item is None else item)

    def hold(self, until: float) -> None:
        """Let nothing expire before `until`: what the server knows may be old."""
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
