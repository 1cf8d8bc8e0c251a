"""When an expiration timer expires, and how it is displayed. Pure: `now` is an argument, in seconds."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from ftcoord.core.timer_records import Timer

CLAIM_TIMEOUT: Final = 2.0
"""Seconds for which a server leaves an expired timer to another server that has marked it."""

T = TypeVar("T")


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


def inform(timer: Timer, host: str, now: float, wall: float) -> TimerInfo:
    """A timer as seen by a reader on `host`, whose monotonic clock shows `now` and whose wall clock shows `wall`."""
    worker = timer.worker
    since = now - timer.at_ms / 1000 if worker.host == host else wall - timer.wall_ms / 1000
    left = timer.left_ms / 1000 - max(since, 0.0)
    rank = worker.rank if worker.rank >= 0 else None
    return TimerInfo(worker.node, worker.pid, rank, timer.scope, timer.after_ms / 1000 - left, left)


def due(timer: Timer, me: str, now: float, listed: bool) -> float:
    """When the server `me`, which learns of a timer now, must handle it.

    The time runs from now. If the timer was `listed`, because it existed before the server began to watch, the time
    since it was written counts too, by the clock of the worker's host, which is the server's host. A timer that another
    server has marked as expired is left to that server for `CLAIM_TIMEOUT`.
    """
    if timer.expired and timer.expired != me:
        return now + CLAIM_TIMEOUT
    passed = max(now - timer.at_ms / 1000, 0.0) if listed else 0.0
    return now + max(timer.left_ms / 1000 - passed, 0.0)


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """What a server knows about a timer: when it is due, since when it is known, and when to check it next."""

    item: T
    due: float
    since: float
    look_at: float


class Book(Generic[T]):
    """The timers that a server watches, by key. It has no clock: callers pass the times."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, Entry[T]] = {}
        self._held_until = -math.inf

    @property
    def entries(self) -> Mapping[Hashable, Entry[T]]:
        """All timers that are watched."""
        return self._entries

    def note(self, key: Hashable, item: T, due: float, now: float) -> None:
        """Watch a timer. Replaces the entry of the same key."""
        self._entries[key] = Entry(item, due, now, due)

    def drop(self, key: Hashable) -> None:
        """Stop watching a timer. Does nothing if it is not watched."""
        self._entries.pop(key, None)

    def postpone(self, key: Hashable, until: float, item: T | None = None) -> None:
        """Check a due timer again at `until`; `item`, if given, replaces the entry's item."""
        if (known := self._entries.get(key)) is not None:
            self._entries[key] = replace(known, look_at=until, item=known.item if item is None else item)

    def hold(self, until: float) -> None:
        """Let no timer expire before `until`: the entries may be out of date."""
        self._held_until = max(self._held_until, until)

    def shift(self, seconds: float) -> None:
        """Give all timers more time, because the server, and perhaps the workers, did not run for so long."""
        for key, one in self._entries.items():
            self._entries[key] = replace(one, due=one.due + seconds, look_at=one.look_at + seconds)

    def expired(self, now: float) -> list[tuple[Hashable, Entry[T]]]:
        """The timers to check now, the earliest due first; none during a `hold`."""
        if now < self._held_until:
            return []
        found = [(key, one) for key, one in self._entries.items() if one.look_at <= now]
        return sorted(found, key=lambda pair: pair[1].due)

    def look_at(self) -> float:
        """When there will be a timer to check; infinity if never."""
        return max(min((one.look_at for one in self._entries.values()), default=math.inf), self._held_until)
