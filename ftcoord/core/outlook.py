"""What a decided record means for a member that asks: the member's half of every protocol here, and its vocabulary.

Each use has a pure `outlook(record, me, ask)` beside its `decide`. `primitives.group.participant` does what it says.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Generic, TypeVar

A_co = TypeVar("A_co", covariant=True)


class Standing(enum.Enum):
    """Where a member stands with what it asks."""

    PENDING = "pending"
    """Nothing is decided about it yet."""
    SEATED = "seated"
    """It has a seat, and must say that it takes it."""
    ANSWERED = "answered"
    """It has what it asked for."""
    MISSED = "missed"
    """What answered it is over already, or went on without it."""
    SPARE = "spare"
    """Others go on without it for now: it may wait forever."""
    CLOSED = "closed"
    """It is all over."""
    REFUSED = "refused"
    """It asks for what cannot be had beside what the others ask for."""
    DRAINED = "drained"
    """An operator wants it to leave."""
    LOST = "lost"
    """Its lease is gone, and what it asked with it. Only the participant says so: no record tells."""


class Next(enum.Enum):
    """What the member does about it."""

    WAIT = "wait"
    """For the next record."""
    WRITE = "write"
    """Its key, with `Outlook.ask`; then wait."""
    READ = "read"
    """The part beside the record that is about this member, which was not read yet; then judge again."""
    RETURN = "return"
    """To its caller, who knows what to do."""


@dataclass(frozen=True, slots=True)
class Outlook(Generic[A_co]):
    """Where a member stands, and what it does next.

    Args:
        ask: what it writes; None: what it asked before, again.
    """

    standing: Standing
    next: Next = Next.WAIT
    ask: A_co | None = None
