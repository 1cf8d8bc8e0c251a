"""Rolls that lie beside their head, as keys and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, NamedTuple

import pytest

from ftcoord.core import layout
from ftcoord.core.layout import roll_key
from ftcoord.core.rendezvous_records import (
    Away,
    HeardRound,
    Place,
    RollSizes,
    Round,
    RoundHead,
    Seat,
    chunk_of,
    chunks_of,
    encode,
    head_of,
    in_order,
    parse_chunk,
    parse_decided,
    roll_id,
    round_of,
)
from ftcoord.errors import StateError

PREFIX: Final = "/g"
IN_TWOS: Final = RollSizes(inline=0, chunk=2)


@cache
def round_with(number: int, first: str, size: int = 3, away: int = 0) -> Round:
    seats = tuple(Seat(f"{first}{n}", f"node {first}{n}", "h") for n in range(size))
    return Round(number, seats, "here", 1, tuple(Away(f"{first}away{n}", 1) for n in range(away)), 1, size)


ABSENT, PRESENT, EARLIER = 0, 1, -1
"""Revisions of the record, as far as they matter: an absent record has 0, and each write gives it one that it never had
before."""


class Attempt(NamedTuple):
    """A decision under way: on which revision of the record it is, by whom, and how many chunks of it were written."""

    decider: str
    base: int
    round: Round
    written: int = 0


class State(NamedTuple):
    """What is in etcd: the record, and the chunks of rolls. And what is under way, in no order that matters."""

    head: RoundHead | None = None
    keys: frozenset[tuple[str, bytes]] = frozenset()
    attempts: tuple[Attempt, ...] = ()
    begun: int = 0

    @property
    def at(self) -> int:
        """The record's revision."""
        return ABSENT if self.head is None else PRESENT

    def trying(self, attempts: Iterable[Attempt]) -> State:
        return self._replace(attempts=tuple(sorted(attempts, key=_order)))

    def with_record(self, head: RoundHead | None) -> State:
        """With another one, or the same one written anew: nobody has decided on that yet."""
        stale = (one._replace(base=EARLIER) if one.base == PRESENT else one for one in self.attempts)
        return self._replace(head=head).trying(stale)


def _order(attempt: Attempt) -> tuple[str, int, int, str, int]:
    return attempt.decider, attempt.base, attempt.round.number, attempt.round.seats[0].member, attempt.written


@dataclass(frozen=True)
class Rolls:
    """The rules of one exploration.

    Args:
        guarded: whether a head requires that its roll is there, and each chunk that the record is unchanged.
        last: whether a head is written after its roll.
        named: whether a roll's name has its decider and its contents in it.
    """

    guarded: bool = True
    last: bool = True
    named: bool = True

    def events(self, state: State) -> Iterator[tuple[str, State]]:
        if state.begun < 3:
            for decider in "xy" if state.begun else "x":  # whoever decides first may be called x
                for first in "ab":
                    decided = round_with((state.head.number if state.head else 0) + 1, first)
                    attempt = Attempt(decider, state.at, decided)
                    if attempt not in state.attempts:
                        after = state.trying((*state.attempts, attempt))
                        yield f"{decider} decides for {first}", after._replace(begun=state.begun + 1)
        for attempt in state.attempts:
            who = f"{attempt.decider} ({attempt.round.seats[0].member})"
            yield f"{who} writes a chunk", self._write(state, attempt, goes_on=True)
            yield f"{who} writes a chunk, and hears nothing of it", self._write(state, attempt, goes_on=False)
            if attempt.written == self._chunks(attempt) or not self.last:
                yield f"{who} writes the head", self._publish(state, attempt)
        if state.head is not None:
            yield "somebody recalls it", state.with_record(state.head)
            yield "somebody deletes the record", state.with_record(None)

    def _chunks(self, attempt: Attempt) -> int:
        return IN_TWOS.chunks_for(attempt.round)

    def _name(self, attempt: Attempt) -> str:
        return named(attempt.round, self._chunks(attempt), attempt.decider) if self.named else "one"

    def _write(self, state: State, attempt: Attempt, *, goes_on: bool) -> State:
        at = attempt.written
        if at == self._chunks(attempt) or (self.guarded and attempt.base != state.at):
            return state
        key = roll_key(PREFIX, self._name(attempt), at)
        value = encoded(attempt.round, self._chunks(attempt))[at]
        keys = frozenset({*((k, v) for k, v in state.keys if k != key), (key, value)})
        after = attempt._replace(written=at + 1) if goes_on else attempt
        return state._replace(keys=keys).trying(after if one is attempt else one for one in state.attempts)

    def _publish(self, state: State, attempt: Attempt) -> State:
        name = self._name(attempt)
        there = dict(state.keys)
        if attempt.base != state.at or (self.guarded and self.last and roll_key(PREFIX, name, 0) not in there):
            return state
        spans = layout.other_rolls(PREFIX, name)
        kept = frozenset((key, value) for key, value in state.keys if not any(key in span for span in spans))
        head = head_of(attempt.round, name, self._chunks(attempt), attempt.decider)
        return state._replace(keys=kept).with_record(head)


@cache
def named(round_: Round, chunks: int, decider: str) -> str:
    return roll_id(round_, chunks, decider)


@cache
def encoded(round_: Round, chunks: int) -> list[bytes]:
    return [encode(one) for one in chunks_of(round_, chunks)]


# -- a roll as keys and bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "away"), [(1, 0), (2, 1), (5, 0), (9, 4), (200, 30)])
def test_a_roll_is_read_as_it_was_written(size: int, away: int) -> None:
    decided = round_with(7, "m", size, away)
    chunks = IN_TWOS.chunks_for(decided)
    head = parse_decided("decided", encode(head_of(decided, "7-x-y", chunks, "x")))
    assert isinstance(head, RoundHead)
    parts = [parse_chunk("chunk", encode(one)) for one in chunks_of(decided, chunks)]
    assert round_of("roll", head, parts) == replace(decided, away=in_order(decided.away), by="x")
    for member in [*decided.ranks, *decided.last_seats, "nobody"]:
        at = chunk_of(member, chunks)
        heard = HeardRound.of(head, parts[at], at)
        assert heard.place_of(member) == decided.place_of(member)
        assert HeardRound.of(head, parts[at], at + 1).place_of(member) is None, "another chunk tells nothing"
    assert heard.place_of("nobody") == Place(None, 0)


def test_members_are_spread_over_all_chunks() -> None:
    assert {chunk_of(f"{n:016x}", 7) for n in range(200)} == set(range(7))


def test_a_head_has_one_size_and_a_chunk_too() -> None:
    """etcd takes 1.5 MiB a request, and everybody is sent the head."""
    for size in (64, 10_000):
        decided = Round(
            2**31, tuple(Seat(f"{i:016x}", f"{i:032x}", f"{i:060d}") for i in range(size)), "f" * 39, 65535, (), 1, size
        )
        chunks = RollSizes(32, 8).chunks_for(decided)
        assert len(encode(head_of(decided, roll_id(decided, chunks, "f" * 16), chunks, "f" * 16))) < 500
        assert max(len(encode(one)) for one in chunks_of(decided, chunks)) < 5000


def test_either_form_of_a_round_is_told_from_the_other() -> None:
    decided = round_with(7, "m")
    head = head_of(decided, "7-x-y", 2, "x")
    assert parse_decided("decided", encode(decided)) == decided
    assert parse_decided("decided", encode(head)) == head


@pytest.mark.parametrize(
    "wrong",
    [{"chunks": 0}, {"chunks": 2**40}, {"size": 0}, {"roll": ""}, {"roll": "a/b"}, {"roll": "x" * 200}],
    ids=str,
)
def test_a_head_that_names_no_roll_is_refused(wrong: dict[str, int | str]) -> None:
    head = head_of(round_with(7, "m"), "7-x-y", 2, "x")
    with pytest.raises(StateError, match=r"names no roll|has the (chunks|size) "):
        parse_decided("decided", encode(replace(head, **wrong)))  # type: ignore[arg-type]


def test_chunks_that_are_not_whole_are_refused() -> None:
    decided = round_with(7, "m", away=1)
    whole, other = chunks_of(decided, 2)
    for wrong in (replace(whole, ranks=()), replace(whole, hosts=(*whole.hosts, "h"))):
        with pytest.raises(StateError, match="not whole"):
            parse_chunk("chunk", encode(wrong))
    with pytest.raises(StateError, match="since when"):
        parse_chunk("chunk", encode(replace(whole, away=("m",), rounds=())))
    with pytest.raises(StateError, match="no roll of 3 nodes"):
        round_of("roll", head_of(decided, "r", 2, ""), [other])
