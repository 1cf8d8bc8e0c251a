"""The records in etcd: what is written is what is read, and what does not fit is refused, never guessed at."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable
from typing import Any

import builders
import pytest
from hypothesis import given, strategies as st

from ftcoord.core import rendezvous_records, strict
from ftcoord.core.rendezvous_records import (
    MOST_CHUNKS,
    Away,
    Chunk,
    JoinRequest,
    KnownRound,
    Round,
    RoundHead,
    Seat,
    chunk_of,
    chunks_for,
    chunks_of,
    encode,
    encode_chunk,
    encode_seats,
    parse_chunk,
    parse_decided,
    parse_join_request,
    seated,
)
from ftcoord.errors import StateError

KEY = "/ftcoord/v2/job/decided"
SEAT = Seat("694d8a2f1c3e5b07", "4f1c0d6e8b7a49d2a7e5c3b1f0987654", "host1 (pid 4711)")
ASK = JoinRequest(SEAT.node, "10.0.0.7", 29500, 3, SEAT.host, "a nonce", 2, 4, seated=3, reopens=1)
AWAY = Away("694d8a2f1c3e5b08", 2)
ROUND = RoundHead(
    4,
    "00112233445566aa",
    1,
    1,
    "10.0.0.7",
    29500,
    2,
    4,
    ready=True,
    recalled="host2 is gone",
    waiting=1,
    closed="done",
    outcome=rendezvous_records.FINISHED,
    before="host3 is gone",
    by=SEAT.member,
)

Parse = Callable[[str, bytes], "JoinRequest | RoundHead"]
BOTH = pytest.mark.parametrize(
    ("parse", "record"), [(parse_join_request, ASK), (parse_decided, ROUND)], ids=["JoinRequest", "RoundHead"]
)

texts = st.text(max_size=20)
whole = st.integers(-strict.LARGEST, strict.LARGEST)
counted = st.integers(0, strict.LARGEST_COUNT)
sizes = st.integers(0, strict.LARGEST)
ports = st.integers(0, 65535)
limits = st.tuples(st.integers(1, strict.LARGEST), st.integers(1, strict.LARGEST)).map(sorted)
asks = st.builds(
    lambda limits, *rest: JoinRequest(*rest[:6], *limits, *rest[6:]),
    limits,
    *(texts, texts, ports, counted, texts, texts, counted, st.integers(-1, strict.LARGEST_COUNT), texts),
)
rounds = st.builds(
    RoundHead,
    number=st.integers(1, strict.LARGEST_COUNT),
    token=st.text("0123456789abcdef", min_size=16, max_size=16),
    size=st.integers(1, strict.LARGEST),
    chunks=st.integers(1, MOST_CHUNKS),
    address=texts,
    port=ports,
    min_nodes=sizes,
    max_nodes=sizes,
    ready=st.booleans(),
    recalled=texts,
    waiting=sizes,
    closed=texts,
    outcome=texts,
    before=texts,
    by=texts,
    drained=st.lists(texts, max_size=3).map(tuple),
)


def fields(record: JoinRequest | RoundHead) -> dict[str, Any]:
    raw = json.loads(encode(record))
    assert isinstance(raw, dict)
    return raw


def refused(parse: Parse, raw: object) -> str:
    """The message; it names the key."""
    with pytest.raises(StateError) as caught:
        parse(KEY, raw if isinstance(raw, bytes) else json.dumps(raw).encode())
    assert repr(KEY) in str(caught.value)
    assert caught.value.key == KEY
    return str(caught.value)


# -- what is written is what is read ----------------------------------------------------------------------------


@given(asks)
def test_an_ask_is_read_as_it_was_written(ask: JoinRequest) -> None:
    assert parse_join_request(KEY, encode(ask)) == ask


@given(rounds)
def test_a_head_is_read_as_it_was_written(round_: RoundHead) -> None:
    assert parse_decided(KEY, encode(round_)) == round_


# -- what does not fit is refused -------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("version", [0, 1, 2, 99, -1, "3", None, [3], True, 3.0], ids=repr)
def test_another_layout_version_is_refused_with_advice(
    parse: Parse, record: JoinRequest | RoundHead, version: object
) -> None:
    message = refused(parse, {**fields(record), "v": version})
    assert f"version {version!r}" in message
    assert "one release in all of a job" in message


@BOTH
def test_every_field_must_be_there(parse: Parse, record: JoinRequest | RoundHead) -> None:
    for name in fields(record):
        message = refused(parse, {k: v for k, v in fields(record).items() if k != name})
        assert "version" in message if name == "v" else name in message


@BOTH
def test_a_field_that_we_do_not_know_is_refused(parse: Parse, record: JoinRequest | RoundHead) -> None:
    assert "surprise" in refused(parse, {**fields(record), "surprise": 1})


@BOTH
@pytest.mark.parametrize("wrong", [None, True, 1.0, float("nan"), [], {}, [1], [[]], [{}]], ids=repr)
def test_every_field_must_have_its_type(parse: Parse, record: JoinRequest | RoundHead, wrong: object) -> None:
    for name, value in fields(record).items():
        if not (isinstance(value, list) and isinstance(wrong, list)) and type(value) is not type(wrong):
            assert name in refused(parse, {**fields(record), name: wrong}).replace("version", "v")


# -- limits and ranks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [(0, 1), (2, 1), (-1, 1), (0, 0)])
def test_limits_that_cannot_be_are_refused(limits: tuple[int, int]) -> None:
    assert "cannot be" in refused(parse_join_request, fields(ASK) | {"min_nodes": limits[0], "max_nodes": limits[1]})


# -- who sits where -----------------------------------------------------------------------------------------------


def a_round(size: int = 3, away: int = 0) -> Round:
    seats = [Seat(f"{n:016x}", f"node {n}", "h" * 60) for n in range(size)]
    return builders.round_(7, seats, away=[Away(f"{n:016x}", n % 6) for n in range(size, size + away)])


def as_read(round_: Round) -> list[Chunk]:
    return [parse_chunk(KEY, encode_chunk(one)) for one in chunks_of(round_)]


@pytest.mark.parametrize(("size", "away"), [(1, 0), (2, 1), (5, 0), (9, 4), (200, 30), (4000, 0)])
def test_seats_are_read_as_they_were_written(size: int, away: int) -> None:
    decided = a_round(size, away)
    head, parts = parse_decided(KEY, encode(decided)), as_read(decided)
    assert seated("/run", head, dict(encode_seats("/run", decided))) == decided
    for member in [*list(decided.last_seats)[:40], "nobody"]:
        at = chunk_of(member, head.chunks)
        assert KnownRound.of(head, parts[at], at).place_of(member) == decided.place_of(member)
    assert decided.place_of("nobody") == (None, 0)


def test_a_member_knows_its_place_by_its_own_chunk_alone() -> None:
    decided = a_round(40)
    member = decided.seats[7].member
    at, parts = chunk_of(member, decided.chunks), chunks_of(decided)
    other = (at + 1) % decided.chunks
    assert KnownRound.of(decided, parts[at], at).rank_of(member) == 7
    assert KnownRound.of(decided, parts[other], other).place_of(member) is None
    assert parse_decided(KEY, encode(decided)).place_of(member) is None


@pytest.mark.parametrize(("members", "chunks"), [(0, 0), (1, 1), (8, 1), (9, 2), (800, 100), (10_000, 100)])
def test_a_round_is_written_in_one_transaction(members: int, chunks: int) -> None:
    """etcd takes 128 operations and 1.5 MiB."""
    assert chunks_for(members) == chunks
    decided = a_round(members)
    written = [encode(decided), *map(encode_chunk, chunks_of(decided))]
    assert len(written[0]) < 600
    assert sum(map(len, written)) < 2**20


@pytest.mark.parametrize(
    "wrong",
    [
        {"chunks": 0},
        {"chunks": 101},
        {"size": 0},
        {"token": ""},
        {"token": "a/b"},
        {"token": "x" * 16},
        {"token": "0" * 17},
        {"number": 0},
    ],
    ids=str,
)
def test_a_head_that_names_no_seats_is_refused(wrong: dict[str, int | str]) -> None:
    with pytest.raises(StateError, match=r"has no token|has the chunks |has \d+ seats in "):
        parse_decided(KEY, encode(dataclasses.replace(ROUND, **wrong)))  # type: ignore[arg-type]


def test_chunks_that_are_not_whole_are_refused() -> None:
    decided = a_round(20)
    whole = chunks_of(decided)[0]
    with pytest.raises(StateError, match="not whole"):
        parse_chunk(KEY, encode_chunk(dataclasses.replace(whole, ranks=())))
    for wrong in (encode(decided), b"", encode_chunk(whole)[:-3]):
        with pytest.raises(StateError, match="not ftcoord's"):
            parse_chunk(KEY, wrong)
    (key, _), *others = encode_seats("/run", decided)
    with pytest.raises(StateError, match="is gone, though /run/decided names it: delete that"):
        seated("/run", decided, dict(others))
    with pytest.raises(StateError, match="not the seats of 20 nodes"):
        seated("/run", decided, dict(others) | {key: others[0][1]})


@pytest.mark.parametrize(
    "wrong",
    [
        {"seats": [[]]},
        {"seats": [{}]},
        {"seats": [{"member": "m", "node": "n", "host": "h", "rank": 0}]},
        {"seats": [{"member": "m", "node": "n", "host": 1}]},
        {"away": [{"member": "m", "round": "2"}]},
        {"ranks": ["0"]},
    ],
    ids=str,
)
def test_every_seat_is_checked(wrong: dict[str, Any]) -> None:
    (chunk,) = chunks_of(a_round(1))
    raw = json.loads(zlib.decompress(encode_chunk(chunk)))
    with pytest.raises(StateError, match=r"seats|Seat|host|round|ranks"):
        parse_chunk(KEY, zlib.compress(json.dumps(raw | wrong).encode()))


def test_the_run_that_never_had_a_round_can_be_written_as_closed() -> None:
    assert parse_decided(KEY, encode(rendezvous_records.NO_ROUND)) == rendezvous_records.NO_ROUND
