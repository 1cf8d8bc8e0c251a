"""What a decider may do: the one vocabulary of all `decide` functions, and of the group that carries it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from ftcoord.core.event_records import HistoryEvent
from ftcoord.core.layout import Span

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Publish(Generic[R]):
    """Make this the decided record.

    A `decide` gives the record; the policy around it gives the record's bytes, and the keys that change with it.

    Args:
        record: the new record. Its bytes must differ from all that were ever published before in this group.
        reason: why, for people.
        rule: the rule of `decide`'s module that it follows.
        puts: keys to write in the same transaction, and their values.
        deletes: keys to delete in the same transaction.
        beside: keys that the record refers to, and their values: no matter when they are written, they say something
            only through the record. Their keys must be unlike all that another decider, or another decision of the same
            one, ever wrote, or hold the same. They are written with the record if they fit into one transaction, and
            else before it.
        nothing_follows: whether nothing is due once this is decided, as long as no member comes, changes or goes.
        events: what the job's history has to say of it, written in the same transaction where etcd takes it.
    """

    record: R
    reason: str
    rule: str = ""
    puts: Sequence[tuple[str, bytes]] = ()
    deletes: Sequence[Span] = ()
    beside: Sequence[tuple[str, bytes]] = ()
    nothing_follows: bool = False
    events: Sequence[HistoryEvent] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Decide nothing now.

    Args:
        reason: why not, for people.
        until: the time, on the decider's clock, at which to look again whatever happens; None: when something does.
        rule: the rule of `decide`'s module that it follows.
        events: what the job's history has to say all the same. It is written by itself, and once.
    """

    reason: str
    until: float | None = None
    rule: str = ""
    events: Sequence[HistoryEvent] = ()


Verdict: TypeAlias = Publish[R] | Wait
