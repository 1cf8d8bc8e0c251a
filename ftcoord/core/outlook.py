"""What a decided record means for a member that asks: the member's half of every protocol here, and its vocabulary.

Each use has a pure `outlook(record, me, ask)` beside its `decide`. `primitives.group.participant` carries it out.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Generic, TypeVar

A_co = TypeVar("A_co", covariant=True)


class Standing(enum.Enum):
    """Where a member stands with its ask."""

    PENDING = "pending"
    """Nothing is decided about it yet."""
    SEATED = "seated"
    """It has a seat, and must write that it takes it."""
    ANSWERED = "answered"
    """Its ask was answered."""
    MISSED = "missed"
    """Its answer is already over, or the others went on without it."""
    SPARE = "spare"
    """Others go on without it for now: it may wait forever."""
    CLOSED = "closed"
    """The run is over."""
    REFUSED = "refused"
    """Its ask contradicts the others' asks."""
    DRAINED = "drained"
    """An operator wants it to leave."""
    LOST = "lost"
    """Its lease is gone, and its ask with it. Only the participant reports this: no record shows it."""


class Next(enum.Enum):
    """What the member does next."""

    WAIT = "wait"
    """For the next record."""
    WRITE = "write"
    """Its key, with `Outlook.ask`; then wait."""
    READ = "read"
    """Read the part beside the record about this member, then judge again."""
    RETURN = "return"
    """Return to its caller, who decides."""


@dataclass(frozen=True, slots=True)
class Outlook(Generic[A_co]):
    """Where a member stands, and what it does next.

    Args:
        ask: what it writes; None for its last ask again.
    """

    standing: Standing
    next: Next = Next.WAIT
    ask: A_co | None = None
