"""Rolls that lie beside their head, as keys and bytes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Final

import builders
import pytest

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

IN_TWOS: Final = RollSizes(inline=0, chunk=2)


@cache
def round_with(number: int, first: str, size: int = 3, away: int = 0) -> Round:
    seats = tuple(Seat(f"{first}{n}", f"node {first}{n}", "h") for n in range(size))
    return builders.round_(
        number,
        seats,
        address="here",
        port=1,
        away=tuple(Away(f"{first}away{n}", 1) for n in range(away)),
        limits=(1, size),
    )


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
        decided = builders.round_(
            2**31,
            tuple(Seat(f"{i:016x}", f"{i:032x}", f"{i:060d}") for i in range(size)),
            address="f" * 39,
            port=65535,
            limits=(1, size),
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
