"""Who takes part in the next round, and when: the decisions of a rendezvous, pure.

Rules
  R1 asking. A run starts without a round; each decided round replaces the one before and has the next number. A member
     with a seat that asks for nothing later is busy: what it asked before counts no more. A member that had a seat in
     an earlier round and has not come back since is away. All others ask. A member whose record cannot be read, such as
     that of another release, lives and asks for nothing.
  R2 seats. A round that was decided is not yet ready: first each participant says that it takes its seat, and repeats
     that as long as it waits. When all have said so within the last moments, the round is ready, and only then does
     anybody start. Nobody starts a round that was recalled before it was ready.
  R3 recall. A round is recalled when a participant is gone, comes back for another round or says that a worker failed;
     when somebody waits while there is room; or when seats are not taken in time. A recall only tells the participants
     to come back; it changes no membership.
  R4 forming. The next round forms among the members that ask for it. It is complete
       - at once, when every seat is taken and no participant of the last round is still to come back;
       - when the settle time-out has passed without change and all live participants of the last round are back;
       - when the last call, which starts as soon as there are `min_nodes`, is over. It is half as long again while
         participants of the last round are still to come back: torch gives workers 30 s to end before it kills them.
     Seats of participants that are still to come back are kept free until then. A participant that is not back by the
     end of the last call is away: it has no seat, and asks for none before it comes back.
  R5 ranks. Participants of the last round go before newcomers. They keep their ranks where the new size allows, and
     rank 0 is one of them: newcomers fill the gaps. Of a node with several members only the newest counts.
  R6 limits. All members share one pair of limits (--nnodes): those of the record as long as any live member wants the
     same, else those of the oldest member. Members with other limits do not count, and the record tells them so.
  R7 closed. A closed run stays closed, unless the user's `restart` lets new members go on from it. They say so, and
     wait until nobody of the closed round is left.
  R8 leaving. A member whose key vanishes is gone. Why is in its deaths/ record, which its sentinel, an operator, or the
     member itself, when it leaves, has written before; without one its lease has ended. A node that an operator drains
     is as good as gone: the record names it, it gets no seat any more, and leaves when it reads so.
  R9 reattaching. A lost lease is no lost node: etcd may have hung, and ended the leases of all. A node whose lease is
     gone while its workers run takes another one, and says as which member it took its seat in which round. It holds
     that seat from then on, as long as the round is the last one. When one has come back like that just before, or most
     are gone in one moment, those that are gone without a word have a lease's time to come back before the round is
     recalled for them, or for a newcomer. A node whose round etcd does not have, or has with another token, comes back
     for the next one (G5).

Times are the decider's own monotonic seconds, from when it saw the event.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Final, Literal, TypeAlias

from ftcoord.core import rendezvous_records as records
from ftcoord.core.death_records import KnownCause
from ftcoord.core.history import HistoryEvent, lost_ends, note_ends, told_ends, why_ended
from ftcoord.core.rendezvous_records import NO_ROUND, Away, JoinRequest, KnownRound, Round, RoundHead, Seat
from ftcoord.core.verdict import Next, Outlook, Publish, Standing, Verdict, Wait
from ftcoord.escaping import counted

RULES: Final = (
    "R1 asking",
    "R2 seats",
    "R3 recall",
    "R4 forming",
    "R5 ranks",
    "R6 limits",
    "R7 closed",
    "R8 leaving",
    "R9 reattaching",
)
"""The rules above, as verdicts name them."""
DRAINED_KEPT: Final = 8
"""Nodes that were drained and are gone whose names a record keeps: all nodes are sent it."""
_, SEATS, RECALL, FORMING, _, LIMITS, CLOSED_RUN, _, REATTACHING = RULES


# -- what a decision rests on -----------------------------------------------------------------------------------------

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


@dataclass(frozen=True)
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

    @cached_property
    def limits(self) -> tuple[int, int]:
        """The fewest and the most nodes of a round (R6). Zeros without members."""
        stated = self.previous.limits if self.previous else None
        if stated is not None and any(member.ask.limits == stated for member in self.members):
            return stated
        return self.members[0].ask.limits if self.members else (0, 0)

    @cached_property
    def _polled(self) -> tuple[Sequence[RoundCandidate], Sequence[RoundCandidate]]:
        newest = {member.ask.node: member for member in self.members}
        drained = self.previous.drained if self.previous else ()
        asking: list[RoundCandidate] = []
        busy: list[RoundCandidate] = []
        for member in self.members:
            ask = member.ask
            if ask.node not in drained and newest[ask.node] is member and ask.limits == self.limits:
                (busy if ask.holds or ask.after < self.last_seat_of(member) else asking).append(member)
        return asking, busy

    @property
    def asking(self) -> Sequence[RoundCandidate]:
        """The members that ask for a round, oldest first (R1). Of one node only the newest incarnation counts: nobody
        renews the lease of an older one any more."""
        return self._polled[0]

    @property
    def busy(self) -> Sequence[RoundCandidate]:
        """The members that still have a round to end."""
        return self._polled[1]

    @cached_property
    def held(self) -> Mapping[str, RoundCandidate]:
        """The seats that are held through another lease, by the members that took them: their holders (R9)."""
        return held_seats(self.previous, self.busy) if self.previous else {}

    @cached_property
    def seated(self) -> Set[str]:
        """The members that have a seat in the last round, there or not, and those that hold one for such a one."""
        return self.previous.ranks.keys() | {one.id for one in self.held.values()} if self.previous else frozenset()

    @property
    def unheard(self) -> Sequence[Seat]:
        """The seats of the last round whose members live and cannot be read."""
        if not self.unreadable or self.previous is None:
            return ()
        return [seat for seat in self.previous.seats if seat.member in self.unreadable]

    def last_seat_of(self, member: RoundCandidate) -> int:
        """The last round that a member is known to have had a seat in; 0 for none."""
        known = self.previous.last_seats.get(member.id, 0) if self.previous else 0
        return max(known, member.ask.seated)

    def was_said_since(self, member: RoundCandidate, time: float) -> bool:
        """Whether what a member asks of the last round was certainly said after that time."""
        return member.seen > max(time, self.read_at)


def contradicts(wanted: tuple[int, int], limits: tuple[int, int]) -> str:
    """Why a node that wants other limits than the run's takes no part, to follow its host."""
    return f"was refused: its --nnodes is {spelled(wanted)}, this run's is {spelled(limits)}"


def spelled(limits: tuple[int, int]) -> str:
    """Limits as torchrun's --nnodes takes them."""
    return ":".join(map(str, dict.fromkeys(limits)))


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


# -- the decider's half -----------------------------------------------------------------------------------------------


def decide(situation: RoundSituation, options: RoundOptions, now: float) -> Verdict[Round]:
    """What to do now. Depends on nothing but its arguments."""
    previous = situation.previous
    if previous is not None and previous.closed and not may_reopen(previous, options.restart):
        return Wait("the run is closed", rule=CLOSED_RUN)
    if _must_be_told(situation):
        fewest, most = situation.limits
        stated = replace(previous or Round.of(NO_ROUND), min_nodes=fewest, max_nodes=most)
        return Publish(stated, f"--nnodes is {spelled(situation.limits)}, not what all members want", LIMITS)
    if previous is not None and previous.closed:
        return _judge_closed(previous, situation, options, now)
    if previous is not None and previous.seats and not previous.recalled:
        return _judge_running(previous, situation, options, now)
    return form(situation, situation.asking, situation.busy, options, now)


def _must_be_told(situation: RoundSituation) -> bool:
    """Whether the record does not say which limits count, though somebody wants others, or says that others do."""
    limits, stated = situation.limits, situation.previous.limits if situation.previous else NO_ROUND.limits
    if stated == limits or not situation.members:
        return False
    return stated != NO_ROUND.limits or any(member.ask.limits != limits for member in situation.members)


def _judge_closed(previous: Round, situation: RoundSituation, options: RoundOptions, now: float) -> Verdict[Round]:
    """R7. Only members that have seen the end may go on from it: one that waited before it came must hear of it."""
    reopening = [member for member in situation.asking if member.ask.reopens == previous.number]
    left = [member.ask.host for member in situation.members if situation.last_seat_of(member)]
    left += [seat.host for seat in situation.unheard]
    if not reopening:
        return Wait("the run is closed", rule=CLOSED_RUN)
    if left:
        return Wait(f"the run is closed, and {_names(left)} has still to leave it", rule=CLOSED_RUN)
    return form(situation, reopening, (), options, now)


def may_reopen(closed: RoundHead, restart: Restart) -> bool:
    """Whether new members may go on from a closed run."""
    return restart == "always" or (restart == "failed" and closed.outcome in (records.FAILED, records.STOPPED))


def _judge_running(previous: Round, situation: RoundSituation, options: RoundOptions, now: float) -> Verdict[Round]:
    """R2, R3, R8 and R9. The order is part of the rules: who came back has ended the round, whatever else happened; a
    failure is a better reason than the nodes that it made leave; and those that may come back to their seats are
    awaited before the round is recalled for them, or a newcomer gets their room.
    """
    seated = situation.seated
    running = [member for member in situation.busy if member.id in seated]
    # Also through another lease than its seat's: whoever asks for another round has ended this one.
    back = [one for one in situation.asking if one.id in seated or one.ask.node in previous.nodes]
    new = len(situation.asking) - len(back)
    live = {member.id for member in (*running, *back)} | situation.unreadable
    held = situation.held.keys() - situation.deaths.keys()  # who was evicted has no seat to come back to
    gone = [seat for seat in previous.seats if seat.member not in live and seat.member not in held]
    if back:
        came_back = f"{_names(member.ask.host for member in back)} came back for a new round"
        return _recall(previous, told_ends(situation.ends) or came_back, new)
    drained = [seat.host for seat in previous.seats if seat.node in previous.drained] if previous.drained else []
    if drained:  # whoever ordered it did not know that they had seats here
        return _recall(previous, f"{_names(drained)} was drained", new)
    failing = [one.ask.host for one in running if one.ask.failed and one.ask.seated == previous.number]
    if failing and options.recall_on_loss:
        return _recall(previous, told_ends(situation.ends) or f"a worker of {_names(failing)} failed", new)
    if gone and now < (until := _may_come_back_until(previous, gone, situation, options)):
        hosts = _names(seat.host for seat in gone)
        return Wait(f"{hosts} lost a lease, as others did, and may come back to its seat", until, REATTACHING)
    if gone and (options.recall_on_loss or not running or not previous.ready):
        return _recall(previous, _why_gone(gone, situation.deaths), new)
    if new and not previous.stop and len(previous.seats) - len(gone) < situation.limits[1]:
        return _recall(previous, f"{_names(member.ask.host for member in situation.asking)} waits to join", new)
    if not previous.ready:
        return _judge_seated(previous, running, situation, options, now)
    return Wait(f"round {previous.number} is running on {counted(len(running), 'node')}", rule=RECALL)


def _may_come_back_until(
    previous: Round, gone: Sequence[Seat], situation: RoundSituation, options: RoundOptions
) -> float:
    """R9. Until when those that are gone may come back to their seats; in the past if they are simply lost.

    A seat that was taken again long before says nothing of them. Whoever has read it when it began to decide cannot
    tell how long ago that was, and takes it for new.
    """
    known = situation.deaths.keys() | {member.id for member in situation.members}
    if not previous.ready or any(seat.member in known for seat in gone):
        return -inf
    since, whole = situation.gone_since, options.return_to_seat
    many = 2 * len(gone) > previous.size or any(holder.seen > since - whole for holder in situation.held.values())
    return since + (whole if many else min(MOMENT, whole))


def _judge_seated(
    previous: Round,
    participants: Sequence[RoundCandidate],
    situation: RoundSituation,
    options: RoundOptions,
    now: float,
) -> Verdict[Round]:
    """R2. All take their seats, or nobody starts."""
    seating = seating_time(previous.size, options.last_call_timeout, options.seat_timeout)
    until = situation.previous_at + seating
    since = now - options.fresh * unhurried(previous.size, now - situation.previous_at)
    missing = [
        member.ask.host
        for member in participants
        if member.ask.seated != previous.number or not situation.was_said_since(member, since)
    ]
    missing += [seat.host for seat in situation.unheard]
    if not missing:
        reason = f"round {previous.number} is ready on {counted(len(participants), 'node')}"
        return Publish(replace(previous, ready=True), reason, SEATS)
    if now >= until:
        return _recall(previous, f"{_names(missing)} did not take its seat", 0)
    return Wait(f"{len(missing)} of {len(participants)} nodes have still to take their seats", until, SEATS)


def _why_gone(gone: Sequence[Seat], deaths: Mapping[str, str]) -> str:
    """Who died of what, or left why, and whose lease ended without a reason."""
    told = [deaths[seat.member] for seat in gone if seat.member in deaths]
    silent = [seat.host for seat in gone if seat.member not in deaths]
    parts = [_some(told, "; ")] if told else []
    parts += [f"{_names(silent)} is gone (its lease ended)"] if silent else []
    return "; ".join(parts)


def _recall(previous: Round, reason: str, waiting: int) -> Publish[Round]:
    recalled = replace(previous, recalled=reason, waiting=waiting)
    return Publish(recalled, f"round {previous.number} recalled: {reason}", RECALL)


def _names(hosts: Iterable[str]) -> str:
    return _some(hosts, ", ")


def _some(texts: Iterable[str], separator: str) -> str:
    """The first three of them, by the alphabet, and how many more there are."""
    ordered = sorted(set(texts))
    shown = separator.join(ordered[:3])
    return shown if len(ordered) <= 3 else f"{shown} and {len(ordered) - 3} more"


# -- the member's half ------------------------------------------------------------------------------------------


def outlook(now: RoundHead | None, me: str, ask: JoinRequest) -> Outlook[JoinRequest]:
    """What the decided record `now` means for the member `me`, which asks for this.

    SEATED: it writes that it takes its seat. ANSWERED: all have, so it starts. MISSED: its round came to nothing, or
    the others went on without it, and it asks again. SPARE: a round runs without it. CLOSED: the run is over. DRAINED:
    an operator wants it to leave. REFUSED: the run has other limits; it counts for nothing as long as any other member
    shares those.

    A member first reads the chunk that it is in, if that matters.
    """
    if now is None:  # etcd has lost the round in which it took its seat (G5)
        return Outlook(Standing.MISSED, Next.RETURN) if ask.seated > ask.after else _PENDING
    if (now.closed and now.number == ask.reopens) or (isinstance(now, KnownRound) and not now.chunk):
        return _PENDING
    must_start = now.ready and ask.seated == now.number > ask.after  # others count on it, wherever it stands by now
    if not now.closed and ask.node in now.drained and not must_start:
        return Outlook(Standing.DRAINED, Next.RETURN)
    if not now.closed and now.number < ask.seated:
        return Outlook(Standing.MISSED, Next.RETURN)  # etcd has lost the round (G5)
    if not now.closed and now.limits not in (ask.limits, NO_ROUND.limits):
        return Outlook(Standing.REFUSED)
    if not now.closed and now.recalled and now.number <= ask.after:
        return _PENDING  # wherever it sits
    place = now.place_of(me)
    if place is None:
        return Outlook(Standing.PENDING, Next.READ)
    rank, last = place
    if now.closed:
        return Outlook(Standing.CLOSED, Next.RETURN)
    if rank is not None and now.number > ask.after:
        return _of_seat(now, ask)
    if max(last, ask.seated) > ask.after:  # what it took its seat in is over, whether this record knows it or not
        return Outlook(Standing.MISSED, Next.RETURN)
    return Outlook(Standing.SPARE) if now.size and not now.recalled and rank is None else _PENDING


def _of_seat(now: RoundHead, ask: JoinRequest) -> Outlook[JoinRequest]:
    if now.ready:
        return Outlook(Standing.ANSWERED, Next.RETURN)
    if now.recalled:
        return Outlook(Standing.MISSED, Next.RETURN)
    if ask.seated == now.number:
        return _PENDING
    takes = replace(ask, seated=now.number, failed=())  # that was another round
    return Outlook(Standing.SEATED, Next.WRITE, takes)


_PENDING: Final[Outlook[JoinRequest]] = Outlook(Standing.PENDING)


def call_back(now: RoundHead | None, mine: RoundHead) -> tuple[int, str]:
    """How many nodes wait for a participant of the round `mine` to come back to the rendezvous, and why; 0 if none.

    A run that is over calls everybody back, to hear why, unless the workers of this very round are done: then all
    others are, or soon will be, and must not be disturbed.
    """
    if now is None or now.number < mine.number:
        return 1, f"etcd has lost the record of round {mine.number}"  # G5
    if now.closed:
        is_done = now.outcome in records.DONE and now.name == mine.name
        return (0, "") if is_done else (1, f"the run is over: {now.closed}")
    if now.name != mine.name:
        return 1, f"round {now.number} was formed without this node"
    return (max(1, now.waiting), now.recalled) if now.recalled else (0, "")


def why_not_stopped(now: RoundHead) -> str:
    """Why the ranks of a run cannot be asked to stop at an agreed step, or need not be; empty if they can."""
    if now.closed:
        return f"the run is over: {now.closed}"
    return f"it is to stop already: {now.stop}" if now.stop else "" if now.size else "the run has had no round yet"


def drain(now: RoundHead, leavers: Sequence[JoinRequest], reason: str) -> RoundHead | None:
    """The record that has nodes leave; None if `why_not_drained` gives a reason.

    Args:
        leavers: what the members of these nodes ask.
        reason: what their round is recalled for.
    """
    if why_not_drained(now, leavers):
        return None
    more = [node for node in dict.fromkeys(ask.node for ask in leavers) if node not in now.drained]
    recalled = now.recalled or (reason if any(_may_have_seat(now, ask) for ask in leavers) else "")
    return replace(now, drained=(*now.drained, *more), recalled=recalled)


def why_not_drained(now: RoundHead, leavers: Sequence[JoinRequest]) -> str:
    """Why nodes cannot be drained, or need not be; empty if they can. Takes what the members of these nodes ask."""
    if any(ask.seated > now.number for ask in leavers):  # nobody would learn of it from an older record
        return "etcd has lost the record of its round: stop its agent, or evict it"
    if now == NO_ROUND:
        return "the run has had no round yet: stop its agent, or evict it"
    if now.closed:
        return f"the run is over: {now.closed}"
    return "it is to leave already" if all(ask.node in now.drained for ask in leavers) else ""


def _may_have_seat(now: RoundHead, ask: JoinRequest) -> bool:
    """Errs on the safe side while seats are being taken: nobody has begun to work by then."""
    return ask.seated == now.number or not now.ready


# -- the next round: R4 and R5 ------------------------------------------------------------------------------------


def form(
    situation: RoundSituation,
    asking: Sequence[RoundCandidate],
    busy: Sequence[RoundCandidate],
    options: RoundOptions,
    now: float,
) -> Verdict[Round]:
    """The next round among those that are `asking`, or why not yet."""
    fewest, most = situation.limits
    if not asking or len(asking) < fewest:
        there = f"{len(asking)} of at least {fewest} nodes are there" if fewest > 1 else "no node asks for a round"
        return Wait(there, rule=FORMING)
    still_out = sum(member.id in situation.seated for member in busy) + len(situation.unheard)
    if len(asking) >= most and not still_out:
        return _complete(situation, asking, busy)
    # The last call begins when there are enough members, but not before the last round was recalled.
    began = sorted(member.seen for member in asking)[fewest - 1]
    if situation.seated:
        began = max(began, situation.previous_at)
    until, why = began + (options.return_timeout if still_out else options.last_call_timeout), "the last call"
    nodes_before = situation.previous.nodes if situation.previous else {}
    if not still_out and any(member.ask.node in nodes_before for member in asking):
        until, why = min(until, situation.changed_at + options.settle_timeout), "the settle time-out"
    if now >= until:
        return _complete(situation, asking, busy)
    there = f"{counted(len(asking), 'node')} {'is' if len(asking) == 1 else 'are'} there"
    return Wait(f"{there}, {still_out} still to come back; {why} runs", until, FORMING)


def _complete(
    situation: RoundSituation, asking: Sequence[RoundCandidate], busy: Sequence[RoundCandidate]
) -> Publish[Round]:
    previous, (fewest, most) = situation.previous or Round.of(NO_ROUND), situation.limits
    # Those of the last round by their ranks, then the newcomers in the order in which they came: sorting is stable.
    chosen = sorted(asking, key=lambda member: previous.nodes.get(member.ask.node, previous.size))
    ranked = _rank(chosen[:most], previous.nodes)
    number = max([previous.number, *(member.ask.highest for member in situation.members)]) + 1
    away = [Away(member.id, situation.last_seat_of(member)) for member in busy]
    away += [Away(seat.member, previous.number) for seat in situation.unheard]
    first = ranked[0].ask
    decided = Round(
        number,
        situation.token,
        len(ranked),
        records.chunks_for(len(ranked) + len(away)),
        first.address,
        first.port,
        seats=tuple(Seat(member.id, member.ask.node, member.ask.host) for member in ranked),
        away=tuple(away),
        min_nodes=fewest,
        max_nodes=most,
        before=previous.closed or why_ended(previous.recalled, situation.decided_revision, situation.ends),
        drained=_still_drained(previous.drained, situation.members),
        stop="" if previous.closed else previous.stop,
    )
    return Publish(decided, f"round {number} on {counted(len(ranked), 'node')}", FORMING)


def _still_drained(drained: Sequence[str], members: Sequence[RoundCandidate]) -> tuple[str, ...]:
    """Those nodes that have not left yet, and the last few that seem to have: who has lost its lease may come back
    without having read that it is to leave."""
    nodes = {member.ask.node for member in members} if drained else frozenset()
    gone = [node for node in drained if node not in nodes][-DRAINED_KEPT:]
    return tuple(node for node in drained if node in nodes or node in gone)


def _rank(chosen: Sequence[RoundCandidate], nodes_before: Mapping[str, int]) -> list[RoundCandidate]:
    """Order the members of a round by rank; `chosen` has those of the last round first, in its rank order."""
    places: list[RoundCandidate | None] = [None] * len(chosen)
    homeless = []
    for index, member in enumerate(chosen):
        rank = nodes_before.get(member.ask.node, len(chosen))
        wanted = 0 if index == 0 else rank
        if wanted < len(chosen) and places[wanted] is None:
            places[wanted] = member
        else:
            homeless.append(member)
    rest = iter(homeless)
    return [place if place is not None else next(rest) for place in places]
