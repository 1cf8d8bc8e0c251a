"""What a decider may do: the vocabulary of all `decide` functions, and of the group that carries it out."""

from __future__ import annotations

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
        no_newer: spans, each with a revision of etcd: etcd refuses the decision if a key of the span was created later.
        beside: keys that the record refers to, and their values. It does not matter when they are written, because they
            mean something only through the record. Their keys must be unlike all that another decider, or another
            decision of the same one, ever wrote, or hold the same value. They are written with the record if they fit
            into one transaction, else before it.
        nothing_follows: whether nothing is due after this decision, as long as no member comes, changes or goes.
        events: the events for the job's history, written in the same transaction if etcd takes them.
    """

    record: R
    reason: str
    rule: str = ""
    puts: Sequence[tuple[str, bytes]] = ()
    deletes: Sequence[Span] = ()
    no_newer: Sequence[tuple[Span, int]] = ()
    beside: Sequence[tuple[str, bytes]] = ()
    nothing_follows: bool = False
    events: Sequence[HistoryEvent] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Decide nothing now.

    Args:
        reason: why not, for people.
        until: the time, on the decider's clock, at which to decide again in any case; None for the next event.
        rule: the rule of `decide`'s module that it follows.
        events: events for the job's history, written alone, and once.
    """

    reason: str
    until: float | None = None
    rule: str = ""
    events: Sequence[HistoryEvent] = ()


Verdict: TypeAlias = Publish[R] | Wait
