"""The events of a run's history about its rounds: how each member's part ended, and what was decided. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeAlias

from ftcoord.core.causes import in_causal_order, told_leaving
from ftcoord.core.event_records import EventKind, HistoryEvent, WorkerFailure
from ftcoord.core.rendezvous_records import NO_ROUND, JoinRequest, Round, Seat

if TYPE_CHECKING:  # what tells a history needs no decisions, which take a tenth of a command's time to load
    from ftcoord.core.round_situation import RoundCandidate

MOST_ENDS: Final = 16
"""Ends that are written with one decision: in a large round thousands may follow the first."""
_SHOWN: Final = 8
"""Hosts that a reason names."""

Ends: TypeAlias = Mapping[tuple[str, str], HistoryEvent]
"""How parts in one round ended, by kind and node, as first reported."""


@dataclass(frozen=True, slots=True)
class VacantSeat:
    """A seat whose member is gone.

    Args:
        seat: the seat.
        cause: why its process died, as its sentinel or an operator wrote; empty if no cause is known.
        noted: etcd's revision at which that was written, or else at which the decider saw that the member is gone.
        word: the member's last request; None if the decider never saw it alive.
        seen_ms: when the decider saw that it is gone, on its wall clock, in milliseconds since 1970.
        silent_ms: for how long it may have been gone then, if no cause is known; 0 if that is unknown.
        said_at: etcd's revision of its last request; 0 if there is none.
    """

    seat: Seat
    cause: str
    noted: int
    word: JoinRequest | None
    seen_ms: int = 0
    silent_ms: int = 0
    said_at: int = 0


def note_ends(
    before: Ends, round_: Round, members: Iterable[RoundCandidate], vacant: Iterable[VacantSeat], wall_ms: int = 0
) -> Ends:
    """The known ends in this round, with those that these members and seats add now (`wall_ms`).

    Members that are gone without a reason are left out: they may come back to their seats; see `lost_ends`.
    """
    found = dict(before)

    def note(event: HistoryEvent) -> None:
        found.setdefault((event.kind, event.node), replace(event, wall_ms=wall_ms))

    for member in members:
        if member.ask.failed or member.ask.leaving:
            for event in _said(member.ask, round_, member.revision):
                note(event)
    for one in vacant:
        if one.cause:
            note(HistoryEvent("died", round_.number, one.seat.host, one.seat.node, one.cause, noted=one.noted))
        if one.word is not None:
            for event in _said(one.word, round_, one.said_at or one.noted):
                note(event)
    return found


def lost_ends(round_: Round, vacant: Iterable[VacantSeat], ends: Ends, present: Collection[str]) -> list[HistoryEvent]:
    """The members that are gone without a reason, and have not come back as any of the nodes that are `present`.

    In a recalled round only those count that the decider saw alive: others may have left before it looked.
    """
    spoken = {node for kind, node in ends if kind in ("died", "left")}
    return [
        HistoryEvent(
            "lost",
            round_.number,
            one.seat.host,
            one.seat.node,
            f"{one.seat.host} is gone (its lease ended)",
            noted=one.noted,
            wall_ms=one.seen_ms,
            since_ms=max(one.seen_ms - one.silent_ms, 0) if one.silent_ms and one.word is not None else 0,
        )
        for one in vacant
        if one.seat.node not in spoken
        and one.seat.node not in present
        and (one.word is not None or not round_.recalled)
    ]


def failure_event(number: int, host: str, node: str, failure: WorkerFailure) -> HistoryEvent:
    """The event for a failed worker of this node in the round of this number."""
    return HistoryEvent("expired" if failure.timer else "failed", number, host, node, failure.line, (failure,))


def _said(ask: JoinRequest, round_: Round, revision: int) -> list[HistoryEvent]:
    """How a node's part in this round ended, in its own words."""
    if ask.node not in round_.nodes or round_.number not in (ask.seated, ask.after):
        return []
    failed = [failure_event(round_.number, ask.host, ask.node, one) for one in ask.failed]
    said = [replace(event, noted=min(ask.failed_at or revision, revision)) for event in failed]
    if ask.leaving:
        reason = told_leaving(ask.host, ask.leaving)
        said.append(HistoryEvent("left", round_.number, ask.host, ask.node, reason, noted=revision))
    return said


def round_events(
    previous: Round | None, new: Round, reason: str, ends: Sequence[HistoryEvent], by: str, wall_ms: int
) -> list[HistoryEvent]:
    """The events for the history when the record `new` replaces `previous`: first the unwritten ends of parts in that
    round, and then what was decided."""
    old = previous or NO_ROUND
    told = [replace(end, by=by, wall_ms=end.wall_ms or wall_ms) for end in in_causal_order(ends)[:MOST_ENDS]]
    kind, why = _decided(old, new, reason)
    return [*told, HistoryEvent(kind, new.number, reason=why, by=by, wall_ms=wall_ms)]


def _decided(old: Round, new: Round, reason: str) -> tuple[EventKind, str]:
    if new.number != old.number and new.seats:
        return "round", _formed(old, new)
    if new.recalled:
        return "recalled", new.recalled
    if new.ready and not old.ready:
        return "started", reason
    return "limits", reason


def _formed(old: Round, new: Round) -> str:
    came = [seat.host for seat in new.seats if seat.node not in old.nodes]
    gone = [seat.host for seat in old.seats if seat.node not in new.nodes]
    parts = [counted(new.size, "node")]
    parts += [f"new: {named(came)}"] if came else []
    parts += [f"without {named(gone)}"] if gone else []
    parts += [f"the round before ended: {new.before}"] if new.before else []
    return "; ".join(parts)


def counted(number: int, what: str) -> str:
    """A count with its noun: "one node", "two nodes"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def spanned(limits: tuple[int, int], what: str) -> str:
    """Limits with their noun: "2 to 3 nodes", or "1 node" where both are the same."""
    fewest, most = limits
    return counted(most, what) if fewest == most else f"{fewest} to {counted(most, what)}"


def named(hosts: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = len(hosts) - _SHOWN
    return ", ".join(hosts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
