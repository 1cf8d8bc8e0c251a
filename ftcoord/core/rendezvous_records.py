"""The JSON records of a rendezvous and the keys they live under, layout v1. `docs/protocol.md` is their description.

    <prefix>/members/<lease id>   JoinRequest      one per member, under its lease
    <prefix>/decided              Round    the last decision, under the run's lease
    <prefix>/rounds/<number>      -        exists as long as this round may be written to
    <prefix>/store/<number>/...   -        the store of the round

Parsing is strict: what does not fit raises StateError naming the key, and is never guessed at or overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from ftcoord.core.strict import build, build_each, dump, load
from ftcoord.errors import StateError


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """What a member wants: a seat in any round later than `after`.

    Args:
        node: the agent's name, the same in all of its incarnations.
        address: where the other nodes reach its host.
        port: a port it holds open there for this request, for the case that it gets rank 0.
        after: the last round it took part in or knows of; 0 for none.
        host: the machine's name, for people.
        nonce: makes each request unlike all others of the member.
        min_nodes, max_nodes: how many nodes its user wants in a round (--nnodes).
        seated: the round in which it has taken its seat; 0 for none.
        reopens: the number of the closed round that it wants to go on from; -1 for none.
        leaving: why it is about to give up its lease; empty while it stays.
    """

    node: str
    address: str
    port: int
    after: int
    host: str
    nonce: str
    min_nodes: int
    max_nodes: int
    seated: int = 0
    reopens: int = -1
    leaving: str = ""

    @property
    def limits(self) -> tuple[int, int]:
        """The fewest and the most nodes of a round."""
        return self.min_nodes, self.max_nodes


@dataclass(frozen=True, slots=True)
class Seat:
    """One participant of a round; its place in `Round.seats` is its rank."""

    member: str
    node: str
    host: str


@dataclass(frozen=True, slots=True)
class Away:
    """A live member that a round was formed without: it had its last seat in `round`, and has not come back since."""

    member: str
    round: int


@dataclass(frozen=True)
class Round:
    """The decided record: one membership, and what became of it.

    Args:
        number: 1, 2, ...; never used twice in a run.
        seats: the participants in rank order.
        address, port: the bootstrap address of the round (MASTER_ADDR and MASTER_PORT), at rank 0's host.
        away: the live members that had not come back in time; what they asked before that does not count.
        min_nodes, max_nodes: the run's limits, which all of its members share; 0 while none were stated.
        ready: whether all participants have taken their seats. Nobody starts before that. It stays when the round is
            recalled: those who learn of it late must start too, since others rely on them.
        recalled: why the participants should come back for the next round; empty while they should not.
        waiting: how many members waited for a seat when the round was recalled.
        closed: why the run is over; empty while it is not.
        outcome: how it ended: FINISHED, FAILED or CLOSED; empty while it is not over.
        before: why the round before this one ended; empty for the first.
        by: the member that decided this.
    """

    number: int
    seats: tuple[Seat, ...]
    address: str
    port: int
    away: tuple[Away, ...] = ()
    min_nodes: int = 0
    max_nodes: int = 0
    ready: bool = False
    recalled: str = ""
    waiting: int = 0
    closed: str = ""
    outcome: str = ""
    before: str = ""
    by: str = ""

    @property
    def limits(self) -> tuple[int, int]:
        """The fewest and the most nodes of a round; zeros while no limits were stated."""
        return self.min_nodes, self.max_nodes

    def rank_of(self, member: str) -> int | None:
        """The rank of a member, by its member id."""
        return next((rank for rank, seat in enumerate(self.seats) if seat.member == member), None)

    @cached_property
    def last_seats(self) -> Mapping[str, int]:
        """By member: the last round that it is known to have had a seat in."""
        return {away.member: away.round for away in self.away} | {seat.member: self.number for seat in self.seats}


NO_ROUND: Final = Round(0, (), "", 0)
"""The record of a run that never had a round, where there must be one: to close it, or to state its limits."""

FINISHED: Final = "finished"
"""The outcome of a run whose workers are done."""
FAILED: Final = "failed"
"""The outcome of a run of which a node has used up its restarts."""
CLOSED: Final = "closed"
"""The outcome of a run that somebody closed by hand."""


def encode(record: JoinRequest | Round) -> bytes:
    """The record as JSON, with the layout's version."""
    return dump(record)


def parse_join_request(key: str, value: bytes) -> JoinRequest:
    """Raises StateError."""
    ask = build(JoinRequest, key, load(key, value))
    if not 1 <= ask.min_nodes <= ask.max_nodes:
        raise StateError(key, f"asks for rounds of {ask.min_nodes} to {ask.max_nodes} nodes, which cannot be")
    return ask


def parse_round(key: str, value: bytes) -> Round:
    """Raises StateError."""
    raw = load(key, value)
    lists = {"seats": build_each(Seat, key, raw, "seats"), "away": build_each(Away, key, raw, "away")}
    return build(Round, key, {**raw, **lists})
