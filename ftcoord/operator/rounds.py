"""The rendezvous of a run, from its keys: who is there, who is missing, and why there is no next round. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ftcoord.core.layout import member_of, roll_key, roll_span
from ftcoord.core.rendezvous import decide, outlook
from ftcoord.core.rendezvous_records import (
    NO_ROUND,
    AnyRound,
    JoinRequest,
    Round,
    RoundHead,
    Seat,
    WholeRoll,
    parse_chunk,
    parse_decided,
    parse_join_request,
    roll_of,
    with_roll,
)
from ftcoord.core.round_situation import RoundCandidate, RoundOptions, RoundSituation, limits_of
from ftcoord.core.verdict import Publish, Standing
from ftcoord.errors import StateError
from ftcoord.etcd.api import KeyValue
from ftcoord.operator.job_keys import GroupKeys, OddKey, by_kind, read_member
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
    """A live member. `holder_of` is the member that it has its seat as; `since` is when it came, as etcd's revision."""

    candidate: RoundCandidate
    ask: JoinRequest
    holder_of: str
    since: int
    key: str

    @property
    def highest(self) -> int:
        return self.ask.highest


def tell_rounds(keys: GroupKeys, options: RoundOptions) -> tuple[RoundsStatus, list[Unreadable]]:
    """The state of a run's rounds, and the keys that are not counted in it.

    Args:
        options: the nodes' `rdzv_conf`, which etcd does not have.
    """
    members, odd = by_kind(map(_read_ask, keys.below_members))
    try:
        previous = _last_round(keys)
        members, uncounted = keys.counted((previous or NO_ROUND).number, members)
    except StateError as error:
        unreadable = [*(one.told for one in odd), Unreadable(error.key, str(error))]
        withheld = NextDecision("withheld", str(error))
        nodes = _statuses(None, members, (0, 0))
        return _told("unreadable", NO_ROUND, withheld, nodes, (), (0, 0)), unreadable
    odd = [*odd, *uncounted]
    causes = keys.causes()
    situation = RoundSituation(
        [member.candidate for member in members],
        NOW,
        previous,
        NOW,
        deaths=causes,
        gone_since=NOW,
        unreadable={one.member for one in odd if one.member},
    )
    limits = limits_of(situation)
    next_ = _next(situation, options)
    told = _told(
        _state(previous, members),
        previous or NO_ROUND,
        replace(next_, reason=keys.with_last_death(next_.reason)),
        _statuses(previous, members, limits),
        _missing(previous or NO_ROUND, members, causes),
        limits,
    )
    return told, [one.told for one in odd]


def _statuses(previous: Round | None, members: Sequence[_Member], limits: tuple[int, int]) -> tuple[NodeStatus, ...]:
    newest = {member.ask.node: member for member in members}
    told = [_node_status(previous, one, limits, newest[one.ask.node] is one) for one in members]
    return tuple(sorted(told, key=lambda one: (one.rank is None, one.rank or 0)))


def _last_round(keys: GroupKeys) -> Round | None:
    """With all of its seats; None before the first. Raises StateError."""
    if keys.decided is None:
        return None
    record: AnyRound = parse_decided(keys.decided.key, keys.decided.value)
    return with_roll(record, *_read_roll(keys.decided, record, keys)) if isinstance(record, RoundHead) else record


def _read_roll(decided: KeyValue, head: RoundHead, keys: GroupKeys) -> WholeRoll:
    """Raises StateError."""
    chunks = [roll_key(keys.prefix, head.roll, at) for at in range(head.chunks)]
    start = roll_span(keys.prefix, head.roll).start
    if not all(key in keys.roll for key in chunks):
        raise StateError(start, f"is not whole, though {decided.key} names it")
    return roll_of(start, head, (parse_chunk(key, keys.roll[key].value) for key in chunks))


def _read_ask(kv: KeyValue) -> _Member | OddKey:
    def read(key: str, value: bytes) -> _Member:
        ask, id_ = parse_join_request(key, value), member_of(key)
        return _Member(RoundCandidate(id_, ask, NOW), ask, ask.holds or id_, kv.create_revision, key)

    return read_member(kv, read)


def _next(situation: RoundSituation, options: RoundOptions) -> NextDecision:
    verdict = decide(situation, options, NOW)
    if not isinstance(verdict, Publish):
        return NextDecision("wait", verdict.reason, verdict.rule)
    return NextDecision("publish", verdict.reason, verdict.rule)


def _state(previous: Round | None, members: Sequence[_Member]) -> str:
    if previous is None:
        return "forming" if members else "empty"
    if previous.closed:
        reopens = any(member.ask.reopens == previous.number for member in members)
        return "forming" if reopens else previous.outcome or "closed"
    if previous.recalled or not previous.size or not members:
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


def _node_status(previous: Round | None, member: _Member, limits: tuple[int, int], is_newest: bool) -> NodeStatus:
    ask = member.ask
    return NodeStatus(
        previous.ranks.get(member.holder_of) if previous else None,
        ask.node,
        ask.host,
        member.candidate.id,
        _standing(previous, member, limits) if is_newest else "replaced",
        ask.leaving or "; ".join(one.line for one in ask.failed),
        member.since,
    )


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
