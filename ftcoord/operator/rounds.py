"""The rendezvous of a run, from its keys: who is there, who is missing, and why there is no next round. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ftcoord.core.invariants import InvariantBroken, check_round
from ftcoord.core.layout import member_of, roll_key, roll_span
from ftcoord.core.outlook import Standing
from ftcoord.core.rendezvous import decide, outlook
from ftcoord.core.rendezvous_records import (
    NO_ROUND,
    AnyRound,
    JoinRequest,
    Round,
    RoundHead,
    Seat,
    parse_chunk,
    parse_decided,
    parse_join_request,
    round_of,
)
from ftcoord.core.round_situation import RoundCandidate, RoundOptions, RoundSituation, limits_of
from ftcoord.core.verdict import Publish
from ftcoord.errors import StateError
from ftcoord.operator.job_keys import GroupKeys
from ftcoord.operator.told import MissingNode, NextDecision, NodeStatus, RoundsStatus, Unreadable

NOW: Final = 0.0
"""The time of a look: everything counts as first seen now, since keys do not record when they were written."""

_STANDINGS: Final = {
    Standing.SEATED: "seating",
    Standing.ANSWERED: "running",
    Standing.MISSED: "away",
    Standing.SPARE: "spare",
    Standing.CLOSED: "over",
    Standing.REFUSED: "refused",
    Standing.DRAINED: "draining",
}


@dataclass(frozen=True, slots=True)
class _Member:
    candidate: RoundCandidate
    since: int

    @property
    def ask(self) -> JoinRequest:
        return self.candidate.ask

    @property
    def holder_of(self) -> str:
        """The member as which it has its seat."""
        return self.ask.holds or self.candidate.id


def tell_rounds(keys: GroupKeys, options: RoundOptions) -> tuple[RoundsStatus, list[Unreadable]]:
    """The state of a run's rounds, and the keys that do not count.

    Args:
        options: the nodes' `rdzv_conf`, which etcd does not have.
    """
    members, unreadable = _members(keys)
    try:
        previous = last_round(keys)
    except StateError as error:
        unreadable.append(Unreadable(error.key, str(error)))
        withheld = NextDecision("withheld", str(error))
        return _told("unreadable", NO_ROUND, withheld, _nodes(None, members, (0, 0)), (), (0, 0)), unreadable
    causes = keys.causes()
    situation = RoundSituation(
        [member.candidate for member in members],
        NOW,
        previous,
        NOW,
        deaths=causes,
        gone_since=NOW,
        unreadable={member_of(kv.key) for kv in keys.members()} - {member.candidate.id for member in members},
    )
    limits = limits_of(situation)
    missing = _missing(previous or NO_ROUND, members, causes)
    told = _told(
        _state(previous, members),
        previous or NO_ROUND,
        _next(situation, options),
        _nodes(previous, members, limits),
        missing,
        limits,
    )
    return told, unreadable


def last_round(keys: GroupKeys) -> Round | None:
    """The last round with all of its seats; None before the first. Raises StateError."""
    if keys.decided is None:
        return None
    record: AnyRound = parse_decided(keys.decided.key, keys.decided.value)
    if not isinstance(record, RoundHead):
        return record
    chunks = [roll_key(keys.prefix, record.roll, at) for at in range(record.chunks)]
    if not all(key in keys.roll for key in chunks):
        span = roll_span(keys.prefix, record.roll).start
        raise StateError(span, f"is not whole, though {keys.decided.key} names it")
    found = (parse_chunk(key, keys.roll[key].value) for key in chunks)
    return round_of(roll_span(keys.prefix, record.roll).start, record, found)


def _members(keys: GroupKeys) -> tuple[list[_Member], list[Unreadable]]:
    """Oldest first."""
    found, unreadable = list[_Member](), keys.strangers()
    for kv in keys.members():
        try:
            ask = parse_join_request(kv.key, kv.value)
        except StateError as error:
            unreadable.append(Unreadable(kv.key, str(error)))
        else:
            found.append(_Member(RoundCandidate(member_of(kv.key), ask, NOW), kv.create_revision))
    return found, unreadable


def _next(situation: RoundSituation, options: RoundOptions) -> NextDecision:
    verdict = decide(situation, options, NOW)
    if not isinstance(verdict, Publish):
        return NextDecision("wait", verdict.reason, verdict.rule)
    try:
        check_round(situation, verdict.record)
    except InvariantBroken as error:
        return NextDecision("withheld", f"{verdict.reason}; that would break {error}", verdict.rule)
    return NextDecision("publish", verdict.reason, verdict.rule)


def _state(previous: Round | None, members: Sequence[_Member]) -> str:
    if previous is None:
        return "forming" if members else "empty"
    if previous.closed:
        reopens = any(member.ask.reopens == previous.number for member in members)
        return "forming" if reopens else previous.outcome or "closed"
    if previous.recalled or not previous.size:
        return "forming" if members else "empty"
    return "running" if previous.ready else "seating"


def _missing(previous: Round, members: Sequence[_Member], causes: Mapping[str, str]) -> tuple[MissingNode, ...]:
    """Nobody is missing from a round that is over or recalled: live nodes join the next one."""
    if previous.closed or previous.recalled:
        return ()
    live = {member.holder_of for member in members}
    gone = ((rank, seat) for rank, seat in enumerate(previous.seats) if seat.member not in live)
    return tuple(_missing_node(rank, seat, causes) for rank, seat in gone)


def _missing_node(rank: int, seat: Seat, causes: Mapping[str, str]) -> MissingNode:
    return MissingNode(rank, seat.node, seat.host, seat.member, causes.get(seat.member, ""))


def _nodes(previous: Round | None, members: Sequence[_Member], limits: tuple[int, int]) -> tuple[NodeStatus, ...]:
    newest = {member.ask.node: member.candidate.id for member in members}
    ranks = previous.ranks if previous else {}
    told = []
    for member in members:
        ask, id_ = member.ask, member.candidate.id
        told.append(
            NodeStatus(
                ranks.get(member.holder_of),
                ask.node,
                ask.host,
                id_,
                "replaced" if newest[ask.node] != id_ else _standing(previous, member, limits),
                ask.leaving or "; ".join(one.line for one in ask.failed),
                member.since,
            )
        )
    return tuple(sorted(told, key=lambda one: (one.rank is None, one.rank or 0)))


def _standing(previous: Round | None, member: _Member, limits: tuple[int, int]) -> str:
    ask = member.ask
    if ask.leaving:
        return "leaving"
    if previous is not None and ask.node in previous.drained and not previous.closed:
        return _STANDINGS[Standing.DRAINED]
    if previous is None:
        return "waiting" if ask.limits == limits or limits == (0, 0) else "refused"
    # Who holds a seat has asked for that round, though its key names no earlier one any more.
    asked = replace(ask, after=min(ask.after, ask.seated - 1)) if ask.holds else ask
    found = outlook(previous, member.holder_of, asked).standing
    if found is Standing.PENDING:
        takes_seat = not previous.recalled and ask.seated == previous.number > 0
        return "seated" if takes_seat and previous.rank_of(member.holder_of) is not None else "waiting"
    if found is Standing.ANSWERED and previous.recalled:
        return "called back"
    return _STANDINGS[found]


def _told(
    state: str,
    round_: Round,
    next_: NextDecision,
    nodes: tuple[NodeStatus, ...],
    missing: tuple[MissingNode, ...],
    limits: tuple[int, int],
) -> RoundsStatus:
    runs = state == "running" and not missing and next_.decision == "wait"
    fewest, most = limits if limits != (0, 0) else round_.limits
    return RoundsStatus(
        state,
        runs or state == "finished",
        round_.number,
        round_.size,
        round_.ready,
        fewest,
        most,
        round_.address,
        round_.port,
        round_.recalled,
        round_.closed,
        round_.outcome,
        round_.before,
        next_,
        nodes,
        missing,
    )
