"""What a decider may do, and what a decided record means for a member that asks: the vocabulary of every protocol here.

Each use has a pure `decide`, which returns a verdict that the group carries out, and beside it a pure
`outlook(record, me, ask)`, which `primitives.group.participant` carries out.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from ftcoord.core.history import HistoryEvent
from ftcoord.core.layout import Span

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Publish(Generic[R]):
    """Make this the decided record.

    A `decide` returns the record; the policy around it returns the record's bytes, and the keys that change with it.

    Args:
        record: the new record. Its bytes must differ from all that were ever published in this group.
        reason: why, for people.
        rule: the rule of `decide`'s module that it follows.
        puts: keys to write in the same transaction, and their values.
        deletes: keys to delete in the same transaction.
        nothing_follows: whether nothing is due after this decision, as long as no member comes, changes or goes.
        events: the events for the job's history, written in the same transaction if etcd takes them.
    """

    record: R
    reason: str
    rule: str = ""
    puts: Sequence[tuple[str, bytes]] = ()
    deletes: Sequence[Span] = ()
    nothing_follows: bool = False
    events: Sequence[HistoryEvent] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Decide nothing now.

    Args:
        reason: why not, for people.
        until: the time, on the decider's clock, at which to decide again in any case; None for the next event.
        rule: the rule of `decide`'s module that it follows.
    """

    reason: str
    until: float | None = None
    rule: str = ""


Verdict: TypeAlias = Publish[R] | Wait


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
