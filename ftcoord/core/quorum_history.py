"""The events of a job's history about its quorums. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Final

from ftcoord.core.event_records import EndId, HistoryEvent
from ftcoord.core.losses import Losses
from ftcoord.core.quorum_records import QuorumRecord, QuorumSeat
from ftcoord.core.round_history import MOST_ENDS, counted, named

REPEATED: Final = 3600.0
"""Seconds within which the same replicas get one event for quorums after failed commits: so those of a week fit into
what is kept, beside the ends of replicas."""
FAILED_COMMITS: Final = 3
"""Failed commits in a row from which on a replica needs attention: one or two are usual when another replica dies."""


def lost_seats(previous: QuorumRecord | None, new: QuorumRecord) -> list[QuorumSeat]:
    """The seats that the new quorum no longer has."""
    return [seat for seat in previous.seats if seat.request.replica_id not in new.names] if previous else []


class LateEnds:
    """The ends of replicas while no other quorum follows: too few are left, or none asks. For one decider.

    A death or a departure is reported at once. A replica that is gone without a cause is reported as lost if no member
    has its name after `timeout` seconds. Replicas that the last quorum went on without, although their leases lived,
    are followed too: their hosts may be lost. So is the former member of a replica that the last quorum has under
    another one: if it died or left, that is reported also when the replica was back before anybody noticed. Each end is
    reported once.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout  # never changes
        self._quorum: QuorumRecord | None = None  # that was followed last
        self._names: dict[str, str] = {}
        """The replicas' names, by member id."""
        self._numbers: dict[str, int] = {}
        """The id of the last quorum in which each had a seat, by member id."""
        self._replaced: set[str] = set()
        """Those of them whose replicas have had a seat under another member since."""
        self._losses = Losses({}, timeout)
        self._told: dict[EndId, str] = {}
        """The ends that were reported, and their members."""

    @property
    def due(self) -> float | None:
        """When to look again whatever happens; None for never."""
        return None if self._losses.due == inf else self._losses.due

    @property
    def begins(self) -> bool:
        """Whether nothing was followed yet."""
        return self._quorum is None

    def follow(self, quorum: QuorumRecord, present: Collection[str]) -> None:
        """Follow the members of this quorum, which is the last one now.

        Args:
            present: the ids of the members that live, or whose end is only noticed now.
        """
        if quorum is self._quorum:
            return
        before, self._quorum = self._quorum, quorum
        seats = {seat.member: _name(seat) for seat in quorum.seats}
        if before is None or before.id != quorum.id or not seats.keys() <= self._names.keys():
            self._follow_anew(quorum, seats, present)
        self._replaced = {  # two processes of one name may take a seat in turn
            one
            for one, name in self._names.items()
            if one not in seats and (one in self._replaced or name in quorum.names)
        }

    def _follow_anew(self, quorum: QuorumRecord, seats: Mapping[str, str], present: Collection[str]) -> None:
        unnoticed = {one: self._names[one] for one in self._losses.gone(())}
        # What became of a replica that is gone, and has no seat any more, was written with that decision.
        absent = {one: name for one, name in unnoticed.items() if one in present or name in quorum.names}
        self._names = absent | dict(seats)
        self._numbers = {one: self._numbers[one] for one in absent} | dict.fromkeys(seats, quorum.id)
        self._losses = Losses(self._names, self._timeout)
        self._told = {end: member for end, member in self._told.items() if member in self._names}

    def asks_for(self, present: Collection[str], now: float) -> list[str]:
        """The members whose causes and words `ends` needs, by id."""
        return [*self._losses.gone(present), *self._losses.over(now)]

    def ends(
        self,
        present: Collection[str],
        names: Collection[str],
        causes: Mapping[str, tuple[str, int]],
        words: Mapping[str, str],
        now: float,
    ) -> list[HistoryEvent]:
        """The ends to write now.

        Args:
            present: the ids of the live members.
            names: the replica ids of the live members.
            causes, words: see `quorum_events`; those of the members that `asks_for` returned.
            now: monotonic seconds.
        """
        found = list[HistoryEvent]()
        for member in self._losses.gone(present):
            known, word = causes.get(member), words.get(member)
            loss = self._losses.note(member, known[0] if known else word or "", now)
            if loss is not None:
                found.append(_end(self._numbers[member], member, loss.replica_id, known, word))
        lost, _ = self._losses.judge(names, {member: known[0] for member, known in causes.items()}, now)
        found += [
            _end(self._numbers[one.member], one.member, one.replica_id, causes.get(one.member), None)
            for one in lost
            if one.cause or one.member not in self._replaced  # else it came back, and may be gone again by now
        ]
        told = dict[EndId, HistoryEvent]()
        for end in self.untold(found)[:MOST_ENDS]:
            told.setdefault(end.end_id, end)
        self._told |= {id_: end.member for id_, end in told.items()}
        return list(told.values())

    def untold(self, events: Sequence[HistoryEvent]) -> list[HistoryEvent]:
        """The events that `ends` has not returned yet."""
        return [one for one in events if one.end_id not in self._told]


def quorum_events(
    previous: QuorumRecord | None,
    new: QuorumRecord,
    causes: Mapping[str, tuple[str, int]],
    words: Mapping[str, str],
    before: QuorumRecord | None = None,
) -> list[HistoryEvent]:
    """The events for the history when the quorum `new` follows `previous`; none if its id stays the same, as in most
    steps, and none if `previous` was one of the same replicas after failed commits too: without an end to these, they
    would push all other events out of the history.

    Args:
        causes: why members of the last quorum are gone, by id, and etcd's revision at which that was written.
        words: why members that are there, or left, no longer take part, in their own words, by id.
        before: the last quorum with another id than `previous`, if it is known.
    """
    if previous is not None and (previous.id == new.id or _repeats(before, previous, new)):
        return []
    gone = lost_seats(previous, new)
    ended = previous.id if previous else 0
    ends = [
        _end(ended, seat.member, _name(seat), causes.get(seat.member), words.get(seat.member))
        for seat in gone[:MOST_ENDS]
    ]
    return [*ends, HistoryEvent("quorum", new.id, reason=_reason(previous, new, [_name(seat) for seat in gone]))]


def _repeats(before: QuorumRecord | None, previous: QuorumRecord, new: QuorumRecord) -> bool:
    is_same = before is not None and before.names == previous.names == new.names
    return is_same and before is not None and new.created - before.created < REPEATED


def attendance(asking: Sequence[str], live: int, fewest: int) -> str:
    """Which replicas ask for the next quorum, of how many: those that live, or at least `fewest`."""
    who = f" ({named(sorted(asking))})" if asking else ""
    of = f"at least {fewest}" if live < fewest else f"{live} live"
    return f"{len(asking)} of {of} replicas {'asks' if len(asking) == 1 else 'ask'}{who}"


def failing(quorum: QuorumRecord, fewest: int) -> str:
    """That the commits of its replicas fail again and again, and why that is likely; empty if they do not."""
    failures = max((one.commit_failures for one in quorum.requests), default=0)
    if failures < FAILED_COMMITS:
        return ""
    return (
        f"{failures} commits in a row failed with {counted(len(quorum.seats), 'replica')}: if the Manager's"
        f" min_replica_size is larger than min_replicas={fewest} of the job's address, make them equal; else see the"
        " replicas' logs"
    )


def signed(events: Sequence[HistoryEvent], by: str, wall_ms: int) -> list[HistoryEvent]:
    """The same events, with their writer and the time, for people."""
    return [replace(one, by=by, wall_ms=wall_ms) for one in events]


def _end(number: int, member: str, name: str, known: tuple[str, int] | None, word: str | None) -> HistoryEvent:
    if known is not None:
        return HistoryEvent("died", number, name, name, f"{name}: {known[0]}", noted=known[1], member=member)
    if word is not None:
        return HistoryEvent("left", number, name, name, f"{name} left ({word})", member=member)
    # A decider that has only just taken over has not seen whether it said that it leaves.
    return HistoryEvent("lost", number, name, name, f"{name} is gone (its lease ended, or it left)", member=member)


def _reason(previous: QuorumRecord | None, new: QuorumRecord, gone: Sequence[str]) -> str:
    came = sorted(new.names - previous.names) if previous else []
    parts = [counted(len(new.seats), "replica")]
    parts += [f"new: {named(came)}"] if came else []
    parts += [f"without {named(gone)}"] if gone else []
    parts += ["the same replicas, after commits that failed"] if previous and not (came or gone) else []
    return "; ".join(parts)


def _name(seat: QuorumSeat) -> str:
    return seat.request.replica_id
