"""When a member that waits looks for itself whether a decision is due, and makes it: the arithmetic, pure.

The decider may be dead, frozen or cut off while its lease lives. Two deciders are harmless, so whoever waits for an
answer does not wait for the decider: after a short delay it reads all members, decides if a decision is due, and stops
watching them again. This is a *look*.

What makes a decision due is almost always somebody's ask, and whoever asked last has just begun to wait. So the delay
before a look starts short and doubles, and it starts again with each record: a record shows that somebody decides.

All waiters must not look at once. Each adds a random part of a *stagger* that grows with the group: of n waiters one
looks per slot, and the others hear its decision before their turn. The slot is as long as a decision takes, and grows
with what a look costs, so a long wait costs the job one look per slot at most, whatever n is.

Times are monotonic seconds of the member's own clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

FIRST_LOOK_DELAY: Final = 0.15
"""Seconds until the first look. A quorum of processes takes about a tenth of that."""
LONGEST_LOOK_DELAY: Final = 2.0
"""Seconds that the delay grows to."""
SLOT: Final = 0.02
"""Seconds between two looks of a small group: opening a view, reading 64 members and publishing takes 5 to 15 ms."""
SLOT_DOUBLES_AT: Final = 200
"""Seats that double the slot: what a look reads grows with the members."""
SEATS_PER_SECOND: Final = 640
"""For groups that wait seldom, but long: how many members all of their looks read in a second."""


Slot: TypeAlias = Callable[[int], float]
"""Seconds between two looks of a group, by the number of its seats."""


def look_delay(attempt: int) -> float:
    """Seconds without news before look number `attempt`, 0, 1, 2, ..., without the stagger."""
    return min(FIRST_LOOK_DELAY * 2.0 ** min(attempt, 10), LONGEST_LOOK_DELAY)


def slot(seats: int) -> float:
    """Seconds between two looks of a group that decides in each step: nobody may wait for long."""
    return SLOT * (1 + seats / SLOT_DOUBLES_AT)


def rare_slot(seats: int) -> float:
    """Seconds between two looks of a group whose members all come, one by one, before a decision is due: of so many
    looks none must cost the others much. 64 seats look ten times a second, and 1,000 every second and a half."""
    return max(SLOT, seats / SEATS_PER_SECOND)


def stagger(seats: int, slot: Slot = slot) -> float:
    """The seconds over which `seats` waiters spread one look each."""
    return seats * slot(seats)


@dataclass(frozen=True, slots=True)
class Looking:
    """A member that waits: which look comes next, and when.

    Args:
        attempt: the number of the next look.
        since: when the last one was made, or the last record was heard of.
        at: when the next one is due, if no earlier one told of a better time.
        told_until: the time that the last look told to look again at; None if it told none.
    """

    attempt: int
    since: float
    at: float
    told_until: float | None = None

    @classmethod
    def begin(cls, now: float, seats: int, chance: float, slot: Slot = slot) -> Looking:
        """Somebody asks, or hears of a record. `chance` is random, from 0 to 1."""
        return cls(0, now, now + look_delay(0) + chance * stagger(seats, slot))

    def looked(self, now: float, seats: int, chance: float, slot: Slot = slot) -> Looking:
        """It looks now."""
        attempt = self.attempt + 1
        return Looking(attempt, now, now + look_delay(attempt) + chance * stagger(seats, slot))

    def told(self, until: float | None) -> Looking:
        """The look found nothing to decide before `until`; None: before something happens."""
        return Looking(self.attempt, self.since, self.at, until)

    @property
    def due(self) -> float:
        """When to look next. A time that a look told is met, in place of the look that comes next or just after it,
        but no two looks are closer to each other than the delay before them."""
        until, gap = self.told_until, look_delay(max(self.attempt - 1, 0))
        if until is None or until <= self.since or until > self.at + gap:
            return self.at
        return until if until > self.at else min(self.at, max(until, self.since + gap))
