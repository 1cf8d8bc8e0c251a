"""Log texts about a rendezvous for torchrun's users, which name nodes."""

from __future__ import annotations

from collections.abc import Sequence

from ftcoord.core.rendezvous_records import AnyRound, JoinRequest, Round
from ftcoord.core.round_situation import contradicts
from ftcoord.escaping import named, spanned


def round_line(run_id: str, round_: AnyRound, rank: int) -> str:
    """A participant's log line for a round that is ready. In a large round it does not know the other participants."""
    where = f"on {named(seat.host for seat in round_.seats)}" if isinstance(round_, Round) else f"with {round_.address}"
    before = f"; the round before ended: {round_.before}" if round_.before else ""
    who = f"decided by {decider_of(round_)}"
    return f"run {run_id!r}, round {round_.number}: this node is rank {rank} of {round_.size}, {where}, {who}{before}"


def decider_of(round_: AnyRound) -> str:
    """The host of the member that decided a round; that member's id if it has no seat, or the round is large."""
    hosts = {seat.member: seat.host for seat in round_.seats} if isinstance(round_, Round) else {}
    return hosts.get(round_.by, f"member {round_.by}")


def attendance(asks: Sequence[JoinRequest], count: int, limits: tuple[int, int]) -> str:
    """How many nodes are there for a round with these limits, and which; and who is refused for other ones. `asks` are
    the first of the `count` requests with these limits, and others."""
    hosts = [ask.host for ask in asks if ask.limits == limits]
    who = f" ({named(hosts, count)})" if hosts else ""
    there = f"{count} of {spanned(limits, 'node')} {'is' if count == 1 else 'are'} there{who}"
    refused = [f"{ask.host} {contradicts(ask.limits, limits)}" for ask in asks if ask.limits != limits]
    return "; ".join([there, *refused])
