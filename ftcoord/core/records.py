"""The JSON records of a rendezvous and the keys they live under, layout v1. `docs/protocol.md` is their description.

    <prefix>/members/<lease id>   Ask      one per member, under its lease
    <prefix>/decided              Round    the last decision, under the run's lease
    <prefix>/rounds/<number>      -        exists as long as this round may be written to
    <prefix>/store/<number>/...   -        the store of the round

Parsing is strict: what does not fit raises StateError naming the key, and is never guessed at or overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ftcoord.core.strict import build, build_each, dump, load


@dataclass(frozen=True, slots=True)
class Ask:
    """What a member wants: a seat in any round later than `after`.

    Args:
        node: the agent's name, the same in all of its incarnations.
        address: where the other nodes reach its host.
        port: a port it holds open there for this request, for the case that it gets rank 0.
        after: the last round it took part in or knows of; 0 for none.
        host: the machine's name, for people.
        nonce: makes each request unlike all others of the member.
    """

    node: str
    address: str
    port: int
    after: int
    host: str
    nonce: str


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


@dataclass(frozen=True, slots=True)
class Round:
    """The decided record: one membership, and what became of it.

    Args:
        number: 1, 2, ...; never used twice in a run.
        seats: the participants in rank order.
        address, port: the bootstrap address of the round (MASTER_ADDR and MASTER_PORT), at rank 0's host.
        away: the live members that had not come back in time; what they asked before that does not count.
        recalled: why the participants should come back for the next round; empty while they should not.
        waiting: how many members waited for a seat when the round was recalled.
        closed: why the run is over; empty while it is not.
        by: the member that decided this.
    """

    number: int
    seats: tuple[Seat, ...]
    address: str
    port: int
    away: tuple[Away, ...] = ()
    recalled: str = ""
    waiting: int = 0
    closed: str = ""
    by: str = ""

    def rank_of(self, member: str) -> int | None:
        """The rank of a member, by its member id."""
        return next((rank for rank, seat in enumerate(self.seats) if seat.member == member), None)

    def last_seat_of(self, member: str) -> int:
        """The last round that a member is known to have had a seat in; 0 for none."""
        return (
            self.number
            if self.rank_of(member) is not None
            else next((away.round for away in self.away if away.member == member), 0)
        )


NO_ROUND: Final = Round(0, (), "", 0)
"""What a run that never had a round is closed with."""


def member_key(prefix: str, member: str) -> str:
    return f"{prefix}/members/{member}"


def round_key(prefix: str, number: int) -> str:
    return f"{prefix}/rounds/{number}"


def store_prefix(prefix: str, number: int) -> str:
    return f"{prefix}/store/{number}/"


def encode(record: Ask | Round) -> bytes:
    """The record as JSON, with the layout's version."""
    return dump(record)


def parse_ask(key: str, value: bytes) -> Ask:
    """Raises StateError."""
    return build(Ask, key, load(key, value))


def parse_round(key: str, value: bytes) -> Round:
    """Raises StateError."""
    raw = load(key, value)
    lists = {"seats": build_each(Seat, key, raw, "seats"), "away": build_each(Away, key, raw, "away")}
    return build(Round, key, {**raw, **lists})
