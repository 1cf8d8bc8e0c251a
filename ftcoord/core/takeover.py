"""When a waiting member checks itself whether a decision is due, and makes it: the arithmetic, pure.

The decider may be dead, frozen or cut off while its lease is alive. Two deciders are harmless, so a member that waits
does not rely on the decider. After a short delay it reads all members, decides if a decision is due, and stops watching
them again. This is a *look*.

What makes a decision due is almost always an ask, and the last member to ask has just begun to wait. So the delay
before a look starts short and doubles. It restarts with each record, because a record shows that somebody decides.

Not all waiting members may look at once. Each adds a random part of a *stagger* that grows with the group: of n members
one looks per slot, and the others see its decision before their turn. The slot is as long as a decision takes, and
grows with the cost of a look, so a long wait costs the job at most one look per slot, whatever n is.

Times are monotonic seconds on the member's own clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

FIRST_LOOK_DELAY: Final = 0.15
"""Seconds until the first look. A quorum of processes takes about a tenth of that."""
LONGEST_LOOK_DELAY: Final = 2.0
"""Seconds up to which the delay grows."""
SLOT: Final = 0.02
"""Seconds between two looks of a small group: opening a view, reading 64 members and publishing takes 5 to 15 ms."""
SLOT_DOUBLES_AT: Final = 200
"""Seats that double the slot: a look reads more with more members."""
SEATS_PER_SECOND: Final = 640
"""For groups that wait rarely, but long: how many members all of their looks read per second."""


Slot: TypeAlias = Callable[[int], float]
"""Seconds between two looks of a group, by its number of seats."""


def look_delay(attempt: int) -> float:
    """Seconds without a record before look number `attempt`, 0, 1, 2, ..., without the stagger."""
    return min(FIRST_LOOK_DELAY * 2.0 ** min(attempt, 10), LONGEST_LOOK_DELAY)


def slot(seats: int) -> float:
    """Seconds between two looks of a group that decides in each step: no member may wait long."""
    return SLOT * (1 + seats / SLOT_DOUBLES_AT)


def rare_slot(seats: int) -> float:
    """Seconds between two looks of a group whose members all come, one by one, before a decision is due: with so many
    looks, each must cost the others little. 64 seats look ten times a second, and 1,000 every second and a half."""
    return max(SLOT, seats / SEATS_PER_SECOND)


def stagger(seats: int, slot: Slot = slot) -> float:
    """The seconds over which `seats` waiters spread one look each."""
    return seats * slot(seats)


@dataclass(frozen=True, slots=True)
class Looking:
    """A member that waits: which look is next, and when.

    Args:
        attempt: the number of the next look.
        since: when the last look was made, or the last record came.
        at: when the next look is due, unless an earlier one returned a better time.
        told_until: when to look again, by the last look; None if it set no time.
    """

    attempt: int
    since: float
    at: float
    told_until: float | None = None

    @classmethod
    def begin(cls, now: float, seats: int, chance: float, slot: Slot = slot) -> Looking:
        """A member asks, or a record comes. `chance` is random, from 0 to 1."""
        return cls(0, now, now + look_delay(0) + chance * stagger(seats, slot))

    def looked(self, now: float, seats: int, chance: float, slot: Slot = slot) -> Looking:
        """It looks now."""
        attempt = self.attempt + 1
        return Looking(attempt, now, now + look_delay(attempt) + chance * stagger(seats, slot))

    def told(self, until: float | None) -> Looking:
        """The look found nothing to decide before `until`; None for the next event."""
        return Looking(self.attempt, self.since, self.at, until)

    @property
    def due(self) -> float:
        """When to look next. A time set by a look replaces the next look or one right after it, but no two looks are
        closer to each other than the delay before them."""
        until, gap = self.told_until, look_delay(max(self.attempt - 1, 0))
        if until is None or until <= self.since or until > self.at + gap:
            return self.at
        return until if until > self.at else min(self.at, max(until, self.since + gap))
