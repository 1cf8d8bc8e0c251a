"""The events of a job's history about its quorums. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ftcoord.core.event_records import HistoryEvent
from ftcoord.core.quorum_records import QuorumRecord, QuorumSeat
from ftcoord.core.round_history import MOST_ENDS, counted, named


def lost_seats(previous: QuorumRecord | None, new: QuorumRecord) -> list[QuorumSeat]:
    """The seats that the new quorum no longer has."""
    return [seat for seat in previous.seats if seat.request.replica_id not in new.names] if previous else []


def quorum_events(
    previous: QuorumRecord | None,
    new: QuorumRecord,
    causes: Mapping[str, tuple[str, int]],
    words: Mapping[str, str],
    wall_ms: int,
) -> list[HistoryEvent]:
    """The events for the history when the quorum `new` follows `previous`; none if its id stays the same, as in most
    steps.

    Args:
        causes: why members of the last quorum are gone, by id, and etcd's revision at which that was written.
        words: why members that are there, or left, no longer take part, in their own words, by id.
        wall_ms: when, for people.
    """
    if previous is not None and previous.id == new.id:
        return []
    gone = lost_seats(previous, new)
    ended = previous.id if previous else 0
    ends = [_end(ended, seat, causes.get(seat.member), words.get(seat.member)) for seat in gone[:MOST_ENDS]]
    told = HistoryEvent("quorum", new.id, reason=_reason(previous, new, [_name(seat) for seat in gone]))
    return [replace(one, by=new.by, wall_ms=wall_ms) for one in (*ends, told)]


def _end(number: int, seat: QuorumSeat, known: tuple[str, int] | None, word: str | None) -> HistoryEvent:
    name = _name(seat)
    if known is not None:
        return HistoryEvent("died", number, name, name, f"{name}: {known[0]}", noted=known[1])
    if word is not None:
        return HistoryEvent("left", number, name, name, f"{name} left ({word})")
    # A decider that has only just taken over has not seen whether it said that it leaves.
    return HistoryEvent("lost", number, name, name, f"{name} is gone (its lease ended, or it left)")


def _reason(previous: QuorumRecord | None, new: QuorumRecord, gone: Sequence[str]) -> str:
    came = sorted(new.names - previous.names) if previous else []
    parts = [counted(len(new.seats), "replica")]
    parts += [f"new: {named(came)}"] if came else []
    parts += [f"without {named(gone)}"] if gone else []
    parts += ["the same replicas, after commits that failed"] if previous and not (came or gone) else []
    return "; ".join(parts)


def _name(seat: QuorumSeat) -> str:
    return seat.request.replica_id
