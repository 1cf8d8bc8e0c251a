"""The next round: whether it is complete, and who sits where (R4 and R5 in `core.rendezvous`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ftcoord.core.history import why_ended
from ftcoord.core.rendezvous_records import NO_ROUND, Away, Round, Seat
from ftcoord.core.round_poll import RoundPoll
from ftcoord.core.round_situation import RoundCandidate, RoundOptions
from ftcoord.core.verdict import Publish, Verdict, Wait
from ftcoord.escaping import counted

FORMING: Final = "R4 forming"
"""The rule, as verdicts name it."""

DRAINED_KEPT: Final = 8
"""Nodes that were drained and are gone whose names a record keeps: all nodes are sent it."""


def form(poll: RoundPoll, options: RoundOptions, now: float) -> Verdict[Round]:
    """The next round, or why not yet."""
    situation, (fewest, most) = poll.situation, poll.limits
    previous = situation.previous
    nodes_before = (previous or NO_ROUND).nodes
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
    situation, previous = poll.situation, poll.situation.previous or NO_ROUND
    nodes_before = previous.nodes
    back = sorted(
        (member for member in poll.asking if member.ask.node in nodes_before),
        key=lambda member: nodes_before[member.ask.node],
    )
    new = [member for member in poll.asking if member.ask.node not in nodes_before]
    ranked = _rank((back + new)[: poll.limits[1]], nodes_before)
    known = [max(member.ask.after, member.ask.seated) for member in situation.members]
    number = max([*known, previous.number, situation.highest]) + 1
    first = ranked[0].ask
    decided = Round(
        number,
        tuple(Seat(member.id, member.ask.node, member.ask.host) for member in ranked),
        first.address,
        first.port,
        (
            *(Away(member.id, poll.last_seat_of(member)) for member in poll.busy),
            *(Away(seat.member, previous.number) for seat in situation.unheard),
        ),
        *poll.limits,
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
