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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Final

from ftcoord.core import rendezvous_records as records
from ftcoord.core import round_situation
from ftcoord.core.history import told_ends, why_ended
from ftcoord.core.rendezvous_records import NO_ROUND, Away, JoinRequest, KnownRound, Round, RoundHead, Seat
from ftcoord.core.round_situation import MOMENT, Restart, RoundCandidate, RoundOptions, RoundPoll, RoundSituation
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


def decide(situation: RoundSituation, options: RoundOptions, now: float) -> Verdict[Round]:
    """What to do now. Depends on nothing but its arguments."""
    previous = situation.previous
    if previous is not None and previous.closed and not may_reopen(previous, options.restart):
        return Wait("the run is closed", rule=CLOSED_RUN)
    limits = round_situation.limits_of(situation)
    if _must_be_told(situation, limits):
        stated = replace(previous or Round.of(NO_ROUND), min_nodes=limits[0], max_nodes=limits[1])
        return Publish(stated, f"--nnodes is {round_situation.spelled(limits)}, not what all members want", LIMITS)
    poll = round_situation.poll_of(situation, limits)
    if previous is not None and previous.closed:
        return _judge_closed(previous, poll, options, now)
    if previous is not None and previous.seats and not (previous.recalled or previous.closed):
        return _judge_running(previous, poll, options, now)
    return form(poll, options, now)


def _must_be_told(situation: RoundSituation, limits: tuple[int, int]) -> bool:
    """Whether the record does not say which limits count, though somebody wants others, or says that others do."""
    stated = situation.previous.limits if situation.previous else NO_ROUND.limits
    if stated == limits or not situation.members:
        return False
    return stated != NO_ROUND.limits or any(member.ask.limits != limits for member in situation.members)


def _judge_closed(previous: Round, poll: RoundPoll, options: RoundOptions, now: float) -> Verdict[Round]:
    """R7. Only members that have seen the end may go on from it: one that waited before it came must hear of it."""
    reopening = [member for member in poll.asking if member.ask.reopens == previous.number]
    left = [member.ask.host for member in poll.situation.members if poll.last_seat_of(member)]
    left += [seat.host for seat in poll.situation.unheard]
    if not reopening:
        return Wait("the run is closed", rule=CLOSED_RUN)
    if left:
        return Wait(
            f"the run is closed, and {_names(left)} has still to leave it",
            rule=CLOSED_RUN,
        )
    return form(replace(poll, asking=reopening, busy=()), options, now)


def may_reopen(closed: RoundHead, restart: Restart) -> bool:
    """Whether new members may go on from a closed run."""
    return restart == "always" or (restart == "failed" and closed.outcome == records.FAILED)


def _judge_running(previous: Round, poll: RoundPoll, options: RoundOptions, now: float) -> Verdict[Round]:
    """R2, R3, R8 and R9. The order is part of the rules: who came back has ended the round, whatever else happened; a
    failure is a better reason than the nodes that it made leave; and those that may come back to their seats are
    awaited before the round is recalled for them, or a newcomer gets their room.
    """
    seated = poll.seated
    running = [member for member in poll.busy if member.id in seated]
    # Also through another lease than its seat's: whoever asks for another round has ended this one.
    back = [one for one in poll.asking if one.id in seated or one.ask.node in previous.nodes]
    new = len(poll.asking) - len(back)
    live = {member.id for member in (*running, *back)} | poll.situation.unreadable
    held = poll.held.keys() - poll.situation.deaths.keys()  # who was evicted has no seat to come back to
    gone = [seat for seat in previous.seats if seat.member not in live and seat.member not in held]
    if back:
        came_back = f"{_names(member.ask.host for member in back)} came back for a new round"
        return _recall(previous, told_ends(poll.situation.ends) or came_back, new)
    drained = [seat.host for seat in previous.seats if seat.node in previous.drained] if previous.drained else []
    if drained:  # whoever ordered it did not know that they had seats here
        return _recall(previous, f"{_names(drained)} was drained", new)
    failing = [one.ask.host for one in running if one.ask.failed and one.ask.seated == previous.number]
    if failing and options.recall_on_loss:
        return _recall(previous, told_ends(poll.situation.ends) or f"a worker of {_names(failing)} failed", new)
    if gone and now < (until := _may_come_back_until(previous, gone, poll, options)):
        hosts = _names(seat.host for seat in gone)
        return Wait(f"{hosts} lost a lease, as others did, and may come back to its seat", until, REATTACHING)
    if gone and (options.recall_on_loss or not running or not previous.ready):
        return _recall(previous, _why_gone(gone, poll.situation.deaths), new)
    if new and len(previous.seats) - len(gone) < poll.limits[1]:
        return _recall(previous, f"{_names(member.ask.host for member in poll.asking)} waits to join", new)
    if not previous.ready:
        return _judge_seated(previous, running, poll.situation, options, now)
    return Wait(f"round {previous.number} is running on {counted(len(running), 'node')}", rule=RECALL)


def _may_come_back_until(previous: Round, gone: Sequence[Seat], poll: RoundPoll, options: RoundOptions) -> float:
    """R9. Until when those that are gone may come back to their seats; in the past if they are simply lost.

    A seat that was taken again long before says nothing of them. Whoever has read it when it began to decide cannot
    tell how long ago that was, and takes it for new.
    """
    known = poll.situation.deaths.keys() | {member.id for member in poll.situation.members}
    if not previous.ready or any(seat.member in known for seat in gone):
        return -inf
    since, whole = poll.situation.gone_since, options.return_to_seat
    many = 2 * len(gone) > previous.size or any(holder.seen > since - whole for holder in poll.held.values())
    return since + (whole if many else min(MOMENT, whole))


def _judge_seated(
    previous: Round,
    participants: Sequence[RoundCandidate],
    situation: RoundSituation,
    options: RoundOptions,
    now: float,
) -> Verdict[Round]:
    """R2. All take their seats, or nobody starts."""
    seating = round_situation.seating_time(previous.size, options.last_call_timeout, options.seat_timeout)
    until = situation.previous_at + seating
    since = now - options.fresh * round_situation.unhurried(previous.size, now - situation.previous_at)
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
    if now.closed:
        return Outlook(Standing.CLOSED, Next.RETURN)
    if place.rank is not None and now.number > ask.after:
        return _of_seat(now, ask)
    if max(place.last, ask.seated) > ask.after:  # what it took its seat in is over, whether this record knows it or not
        return Outlook(Standing.MISSED, Next.RETURN)
    return Outlook(Standing.SPARE) if now.size and not now.recalled and place.rank is None else _PENDING


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
        is_done = now.outcome == records.FINISHED and now.name == mine.name
        return (0, "") if is_done else (1, f"the run is over: {now.closed}")
    if now.name != mine.name:
        return 1, f"round {now.number} was formed without this node"
    return (max(1, now.waiting), now.recalled) if now.recalled else (0, "")


def close(now: RoundHead, reason: str, outcome: str, *, speaks: bool) -> RoundHead | None:
    """The record that ends the run; None to leave it as it is.

    Args:
        speaks: whether whoever ends it has a seat in this round, or ends the run by hand. When the others went on
            without a node, what became of its workers says nothing.
    """
    return replace(now, closed=reason, outcome=outcome) if speaks and not now.closed else None


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


def form(poll: RoundPoll, options: RoundOptions, now: float) -> Verdict[Round]:
    """The next round, or why not yet."""
    situation, (fewest, most) = poll.situation, poll.limits
    previous = situation.previous
    nodes_before = previous.nodes if previous else {}
    back = [member for member in poll.asking if member.ask.node in nodes_before]
    if not poll.asking or len(poll.asking) < fewest:
        there = f"{len(poll.asking)} of at least {fewest} nodes are there" if fewest > 1 else "no node asks for a round"
        return Wait(there, rule=FORMING)
    seated = poll.seated
    still_out = sum(member.id in seated for member in poll.busy) + len(situation.unheard)
    if len(poll.asking) >= most and not still_out:
        return _complete(poll)
    last_call = options.return_timeout if still_out else options.last_call_timeout
    until, why = _enough_at(poll) + last_call, "the last call"
    if back and not still_out:
        until, why = min(until, situation.changed_at + options.settle_timeout), "the settle time-out"
    if now >= until:
        return _complete(poll)
    there = f"{counted(len(poll.asking), 'node')} {'is' if len(poll.asking) == 1 else 'are'} there"
    return Wait(f"{there}, {still_out} still to come back; {why} runs", until, FORMING)


def _enough_at(poll: RoundPoll) -> float:
    """When the last call began: when there were enough members, but not before the last round was recalled."""
    enough_at = sorted(member.seen for member in poll.asking)[poll.limits[0] - 1]
    return max(enough_at, poll.situation.previous_at) if poll.seated else enough_at


def _complete(poll: RoundPoll) -> Publish[Round]:
    situation, previous = poll.situation, poll.situation.previous or Round.of(NO_ROUND)
    nodes_before = previous.nodes
    back = sorted(
        (member for member in poll.asking if member.ask.node in nodes_before),
        key=lambda member: nodes_before[member.ask.node],
    )
    new = [member for member in poll.asking if member.ask.node not in nodes_before]
    ranked = _rank((back + new)[: poll.limits[1]], nodes_before)
    number = max([previous.number, *(member.ask.highest for member in situation.members)]) + 1
    away = [Away(member.id, poll.last_seat_of(member)) for member in poll.busy]
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
        min_nodes=poll.limits[0],
        max_nodes=poll.limits[1],
        before=previous.closed or why_ended(previous.recalled, situation.decided_revision, situation.ends),
        drained=_still_drained(previous.drained, situation.members),
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
