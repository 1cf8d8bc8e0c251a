"""The members of a run by what they do: who asks, who is busy, who leaves, and who holds which seat.

The rules are R1, R6, R8 and R9 in `core.rendezvous`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from ftcoord.core.rendezvous_records import Round
from ftcoord.core.round_situation import RoundCandidate, RoundSituation


@dataclass(frozen=True, slots=True)
class RoundPoll:
    """The members that count, by what they do. Of one node only the newest incarnation does: nobody renews the lease of
    an older one any more.

    Args:
        asking: those that ask for a round, oldest first.
        busy: those that still have one to end.
        held: the seats that are held through another lease, by the members that took them: their holders.
    """

    situation: RoundSituation
    limits: tuple[int, int]
    asking: Sequence[RoundCandidate]
    busy: Sequence[RoundCandidate]
    held: Mapping[str, RoundCandidate]

    @property
    def seated(self) -> Set[str]:
        """The members that have a seat in the last round, there or not, and those that hold one for such a one."""
        previous = self.situation.previous
        if previous is None:
            return frozenset()
        if not previous.seats:  # etcd has lost who had one; they know it
            return {member.id for member in self.busy if member.ask.seated == previous.number}
        return previous.ranks.keys() | {holder.id for holder in self.held.values()}

    def last_seat_of(self, member: RoundCandidate) -> int:
        """The last round that a member is known to have had a seat in; 0 for none."""
        previous = self.situation.previous
        known = previous.last_seats.get(member.id, 0) if previous else 0
        return max(known, member.ask.seated)


def poll_of(situation: RoundSituation, limits: tuple[int, int]) -> RoundPoll:
    previous = situation.previous
    newest = {member.ask.node: member for member in situation.members}
    last = previous.last_seats if previous else {}
    drained = previous.drained if previous else ()
    asking: list[RoundCandidate] = []
    busy: list[RoundCandidate] = []
    for member in situation.members:
        ask = member.ask
        if ask.node in drained:
            continue
        if newest[ask.node] is member and ask.limits == limits:
            has_seat = ask.holds or ask.after < max(ask.seated, last.get(member.id, 0))
            (busy if has_seat else asking).append(member)
    held = held_seats(previous, busy) if previous else {}
    return RoundPoll(situation, limits, asking, busy, held)


def held_seats(previous: Round, members: Iterable[RoundCandidate]) -> dict[str, RoundCandidate]:
    """The holders of seats, by the members that took them. Who says it of its own seat is no holder."""
    named = (one for one in members if one.ask.holds not in ("", one.id))
    return {one.ask.holds: one for one in named if holds_seat(one, previous)}


def vacant(previous: Round, members: Iterable[RoundCandidate], unreadable: Set[str] = frozenset()) -> Set[str]:
    """The members that took a seat in this round and are gone, and whose seats nobody holds."""
    members = list(members)
    live = {member.id for member in members} | unreadable
    return previous.ranks.keys() - live - held_seats(previous, members).keys()


def holds_seat(member: RoundCandidate, previous: Round) -> bool:
    """R9. The node must be the one that has the seat, and the round the one that it started."""
    rank = previous.ranks.get(member.ask.holds) if member.ask.holds else None
    if rank is None or not previous.ready or member.ask.seated != previous.number:
        return False
    return previous.seats[rank].node == member.ask.node
