"""What a decision about rounds rests on: the live members and what they do, the last round, and what the decider's user
asked for.

The rules are R1, R2, R6, R8 and R9 in `core.rendezvous`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import inf
from typing import Final, Literal, TypeAlias

from ftcoord.core.death_records import KnownCause
from ftcoord.core.history import HistoryEvent, lost_ends, note_ends
from ftcoord.core.rendezvous_records import JoinRequest, Round, Seat

SEATING: Final = 10.0
"""Seconds within which seats are to be taken, where the last call is not longer. A healthy node takes milliseconds."""
TAKEN_PER_SECOND: Final = 50
"""Seats that are surely taken in a second, also where etcd and all nodes share two busy cores. A round that is too
large for the time above, and for the last call, has as much longer."""
FRESH: Final = 3.0
"""Seconds for which a seat counts as taken after its member said so: nobody must wait for a member that died since."""
SAY_AGAIN: Final = 1.0
"""Seconds until a member that waits for others says again that it takes its seat."""
AT_ONCE: Final = 125
"""Seats of a round up to which these two hold. In larger rounds both are longer, so that no more than so many members
repeat it in a second: that must not keep the others from saying it for the first time, also where they all share two
cores with etcd."""


def seating_time(size: int, last_call: float, least: float = SEATING) -> float:
    """Seconds within which all seats of a round are to be taken (R2), from when the round is heard of.

    Args:
        size: the round's.
        last_call: how long the last call lasts, in seconds.
        least: how long it lasts in any case.
    """
    return max(last_call, least, size / TAKEN_PER_SECOND)


def unhurried(size: int, elapsed: float) -> float:
    """How many times longer it counts that a seat was taken, and how many times less often that is said again.

    Taking seats lasts longer in a large round, and where etcd or the hosts are slow. There to say it as often as ever
    would make them slower still, and the round would never be ready.

    Args:
        size: the round's.
        elapsed: seconds for which seats are being taken, as far as is known.
    """
    return max(1.0, size / AT_ONCE, elapsed / (2 * FRESH))


RETURN_FACTOR: Final = 1.5
"""How much longer than the last call participants of the last round have to come back. With the defaults, 30 s and
torch's `shutdown_timeout` of 30 s, a node whose workers had to be killed would else be too late by a moment."""
MOMENT: Final = 0.5
"""Seconds within which leases that end together are gone: etcd ends those that are over twice a second."""

Restart: TypeAlias = Literal["failed", "always", "never"]
"""Which closed runs may be gone on from."""


@dataclass(frozen=True, slots=True)
class RoundOptions:
    """What the decider's user asked for, but for the limits, which are in what its members ask. Times in seconds.

    Args:
        last_call_timeout: how long a round with enough nodes waits for more.
        settle_timeout: how long a round waits when every live node of the last one is back.
        recall_on_loss: whether a round is recalled when a node's lease expires. torch goes on without it.
        restart: which closed runs a new start may continue, once no node of the old run is left: those that ``failed``,
            ``always`` any, or ``never``.
        seat_timeout: how long taking seats may last, where the last call, or `seating_time` for the round's size, is
            not longer.
        fresh: how long it counts that a member said that it takes its seat.
        return_to_seat: how long nodes have to come back to their seats when many lost their leases.
    """

    last_call_timeout: float = 30.0
    settle_timeout: float = 1.0
    recall_on_loss: bool = True
    restart: Restart = "failed"
    seat_timeout: float = SEATING
    fresh: float = FRESH
    return_to_seat: float = 0.0

    @property
    def return_timeout(self) -> float:
        """How long participants of a recalled round have to come back."""
        return self.last_call_timeout * RETURN_FACTOR


@dataclass(frozen=True, slots=True)
class RoundCandidate:
    """A live member: its id, what it asks, when the decider saw it ask that, and etcd's revision of it."""

    id: str
    ask: JoinRequest
    seen: float
    revision: int = 0


@dataclass(frozen=True, slots=True)
class RoundSituation:
    """All that a decision rests on: the live members, oldest first, and the last decided round.

    Args:
        changed_at: when any member last came, changed or went.
        previous_at: when `previous` was first seen in its state: formed, ready, recalled or closed.
        read_at: when the decider read the members as a whole. What they asked then, they may have said long before.
        deaths: the causes of those that have died, by their member ids, as far as anybody has said so.
        gone_since: when the decider saw that the first of those went that have a seat in the last round and are gone.
        ends: how parts in the last round have ended, as far as anybody has said so.
        decided_revision: etcd's, at which `previous` was written in that state.
        unreadable: the ids of the live members that say what cannot be read; they are not among `members`.
        token: that of the next round.
    """

    members: Sequence[RoundCandidate]
    changed_at: float
    previous: Round | None
    previous_at: float
    read_at: float = -inf
    deaths: Mapping[str, str] = field(default_factory=dict, hash=False)
    gone_since: float = -inf
    ends: Sequence[HistoryEvent] = ()
    decided_revision: int = 0
    unreadable: Set[str] = frozenset()
    token: str = ""

    @property
    def unheard(self) -> Sequence[Seat]:
        """The seats of the last round whose members live and cannot be read."""
        if not self.unreadable or self.previous is None:
            return ()
        return [seat for seat in self.previous.seats if seat.member in self.unreadable]

    def was_said_since(self, member: RoundCandidate, time: float) -> bool:
        """Whether what a member asks of the last round was certainly said after that time."""
        return member.seen > max(time, self.read_at)


def limits_of(situation: RoundSituation) -> tuple[int, int]:
    """The fewest and the most nodes of a round (R6). Zeros without members."""
    members, stated = situation.members, situation.previous.limits if situation.previous else None
    if stated is not None and any(member.ask.limits == stated for member in members):
        return stated
    return members[0].ask.limits if members else (0, 0)


def contradicts(wanted: tuple[int, int], limits: tuple[int, int]) -> str:
    """Why a node that wants other limits than the run's takes no part, to follow its host."""
    return f"was refused: its --nnodes is {spelled(wanted)}, this run's is {spelled(limits)}"


def spelled(limits: tuple[int, int]) -> str:
    """Limits as torchrun's --nnodes takes them."""
    return ":".join(map(str, dict.fromkeys(limits)))


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
    return RoundPoll(situation, limits, asking=asking, busy=busy, held=held)


def held_seats(previous: Round, members: Iterable[RoundCandidate]) -> dict[str, RoundCandidate]:
    """The holders of seats, by the members that took them. Who says it of its own seat is no holder."""
    named = (one for one in members if one.ask.holds not in ("", one.id))
    return {one.ask.holds: one for one in named if holds_seat(one, previous)}


def vacant(previous: Round, members: Iterable[RoundCandidate], unreadable: Set[str] = frozenset()) -> Set[str]:
    """The members that took a seat in this round and are gone, and whose seats nobody holds."""
    members = list(members)
    live = {member.id for member in members} | unreadable
    return previous.ranks.keys() - live - held_seats(previous, members).keys()


def ends_of(
    round_: Round,
    members: Sequence[RoundCandidate],
    deaths: Mapping[str, KnownCause],
    unreadable: Set[str] = frozenset(),
) -> list[HistoryEvent]:
    """How parts in this round ended, as its members and their sentinels have written it by now. Who is gone without a
    reason is noted as late as what was written last."""
    known = [*(one.revision for one in members), *(one.revision for one in deaths.values())]
    unknown = KnownCause("", max(known, default=0))
    evicted = held_seats(round_, members).keys() & deaths.keys()  # their nodes came back
    gone = [
        (round_.seats[round_.ranks[one]], deaths.get(one, unknown))
        for one in vacant(round_, members, unreadable) | evicted
    ]
    ends = note_ends({}, round_, ((one.ask, one.revision) for one in members), gone)
    return [*ends.values(), *lost_ends(round_, gone, {one.ask.node for one in members})]


def holds_seat(member: RoundCandidate, previous: Round) -> bool:
    """R9. The node must be the one that has the seat, and the round the one that it started."""
    rank = previous.ranks.get(member.ask.holds) if member.ask.holds else None
    if rank is None or not previous.ready or member.ask.seated != previous.number:
        return False
    return previous.seats[rank].node == member.ask.node
