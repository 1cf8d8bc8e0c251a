"""The records in etcd: what is written is what is read, and what does not fit is refused, never guessed at."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcoord.core import rendezvous_records, strict
from ftcoord.core.rendezvous_records import Away, JoinRequest, Round, Seat, encode, parse_join_request, parse_round
from ftcoord.errors import StateError

KEY = "/ftcoord/v1/job/decided"
SEAT = Seat("694d8a2f1c3e5b07", "4f1c0d6e8b7a49d2a7e5c3b1f0987654", "host1 (pid 4711)")
ASK = JoinRequest(SEAT.node, "10.0.0.7", 29500, 3, SEAT.host, "a nonce", 2, 4, seated=3, reopens=1)
AWAY = Away("694d8a2f1c3e5b08", 2)
ROUND = Round(
    4,
    (SEAT,),
    "10.0.0.7",
    29500,
    (AWAY,),
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

Parse = Callable[[str, bytes], "JoinRequest | Round"]
BOTH = pytest.mark.parametrize(
    ("parse", "record"), [(parse_join_request, ASK), (parse_round, ROUND)], ids=["JoinRequest", "Round"]
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
seats = st.builds(Seat, texts, texts, texts)
rounds = st.builds(
    Round,
    number=counted,
    seats=st.lists(seats, max_size=4).map(tuple),
    address=texts,
    port=ports,
    away=st.lists(st.builds(Away, texts, counted), max_size=3).map(tuple),
    min_nodes=sizes,
    max_nodes=sizes,
    ready=st.booleans(),
    recalled=texts,
    waiting=sizes,
    closed=texts,
    outcome=texts,
    before=texts,
    by=texts,
)


def fields(record: JoinRequest | Round) -> dict[str, Any]:
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
def test_a_round_is_read_as_it_was_written(round_: Round) -> None:
    assert parse_round(KEY, encode(round_)) == round_


@BOTH
def test_one_record_is_always_the_same_bytes(parse: Parse, record: JoinRequest | Round) -> None:
    assert encode(parse(KEY, encode(record))) == encode(record)
    assert b"\n" not in encode(record)
    assert fields(record)["v"] == 4


def test_thousands_of_seats_fit_into_one_request() -> None:
    """etcd takes 1.5 MiB a request. Host names are long here: 60 characters is more than clouds give."""
    many = tuple(Seat(f"{i:016x}", f"{i:032x}", f"{i:060d} (pid 4194304)") for i in range(4000))
    full = Round(2**31, many, "f" * 39, 65535, recalled="r" * 200, waiting=4000, closed="c" * 200, by="b" * 32)
    assert len(encode(full)) < 2**20


# -- what does not fit is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("parse", [parse_join_request, parse_round])
@pytest.mark.parametrize(
    "value",
    [b"", b"\xff\x00", b"{", b"nonsense", b"[" * 100_000, b"[]", b"null", b'"text"', b"1", b"1" * 10_000],
    ids=repr,
)
def test_what_is_no_json_object_is_not_ours(parse: Parse, value: bytes) -> None:
    assert "not ftcoord's" in refused(parse, value)


@BOTH
@pytest.mark.parametrize("version", [0, 1, 2, 99, -1, "3", None, [3], True, 3.0], ids=repr)
def test_another_layout_version_is_refused_with_advice(
    parse: Parse, record: JoinRequest | Round, version: object
) -> None:
    message = refused(parse, {**fields(record), "v": version})
    assert f"version {version!r}" in message
    assert "one release in all of a job" in message


@BOTH
def test_every_field_must_be_there(parse: Parse, record: JoinRequest | Round) -> None:
    for name in fields(record):
        message = refused(parse, {k: v for k, v in fields(record).items() if k != name})
        assert "version" in message if name == "v" else name in message


@BOTH
def test_a_field_that_we_do_not_know_is_refused(parse: Parse, record: JoinRequest | Round) -> None:
    assert "surprise" in refused(parse, {**fields(record), "surprise": 1})


@BOTH
@pytest.mark.parametrize("wrong", [None, True, 1.0, float("nan"), [], {}, [1], [[]], [{}]], ids=repr)
def test_every_field_must_have_its_type(parse: Parse, record: JoinRequest | Round, wrong: object) -> None:
    for name, value in fields(record).items():
        if not (isinstance(value, list) and isinstance(wrong, list)) and type(value) is not type(wrong):
            assert name in refused(parse, {**fields(record), name: wrong}).replace("version", "v")


@BOTH
@pytest.mark.parametrize("number", [2**63, -(2**63), 10**4300 - 1], ids=["2**63", "-2**63", "4300 digits"])
def test_a_number_is_bounded(parse: Parse, record: JoinRequest | Round, number: int) -> None:
    for name, value in fields(record).items():
        if type(value) is int and name != "v":
            assert name in refused(parse, {**fields(record), name: number})


@BOTH
def test_a_text_is_no_number_and_a_number_no_text(parse: Parse, record: JoinRequest | Round) -> None:
    for name, value in fields(record).items():
        refused(parse, {**fields(record), name: "1" if type(value) is int else 1})


def test_every_seat_is_checked() -> None:
    good = fields(ROUND)["seats"][0]
    assert "seats" in refused(parse_round, {**fields(ROUND), "seats": [good, []]})
    assert "Seat" in refused(parse_round, {**fields(ROUND), "seats": [good, {}]})
    assert "Seat" in refused(parse_round, {**fields(ROUND), "seats": [{**good, "rank": 0}]})
    assert "host" in refused(parse_round, {**fields(ROUND), "seats": [{**good, "host": 1}]})
    assert "round" in refused(parse_round, {**fields(ROUND), "away": [{"member": SEAT.member, "round": "2"}]})


def test_one_kind_is_not_read_as_the_other() -> None:
    refused(parse_join_request, encode(ROUND))
    refused(parse_round, encode(ASK))


json_values = st.recursive(
    st.none() | st.booleans() | whole | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)


@st.composite
def mangled(draw: st.DrawFn) -> bytes:
    """A good record with a few fields replaced, or cut, or with some bytes changed."""
    raw = fields(draw(asks | rounds))
    for name in draw(st.lists(st.sampled_from(sorted(raw)), max_size=2)):
        raw[name] = draw(json_values)
    value = bytearray(json.dumps(raw).encode())
    for at in draw(st.lists(st.integers(0, len(value) - 1), max_size=2)):
        value[at] = draw(st.integers(0, 255))
    return bytes(value[: draw(st.none() | st.integers(0, len(value)))])


@given(st.binary(max_size=64) | json_values.map(lambda raw: json.dumps(raw).encode()) | mangled())
def test_whatever_is_there_is_a_record_or_a_state_error(value: bytes) -> None:
    for parse in (parse_join_request, parse_round):
        with contextlib.suppress(StateError):
            record = parse(KEY, value)
            assert parse(KEY, encode(record)) == record


# -- limits and ranks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [(0, 1), (2, 1), (-1, 1), (0, 0)])
def test_limits_that_cannot_be_are_refused(limits: tuple[int, int]) -> None:
    assert "cannot be" in refused(parse_join_request, fields(ASK) | {"min_nodes": limits[0], "max_nodes": limits[1]})


def test_a_rank_is_the_place_among_the_seats() -> None:
    round_ = Round(1, tuple(Seat(member, "node", "host") for member in ("x", "y")), "", 0)
    assert [round_.rank_of(member) for member in ("x", "y", "z")] == [0, 1, None]


def test_the_last_seat_is_in_this_round_or_the_one_that_the_away_never_left() -> None:
    round_ = Round(7, (Seat("x", "node", "host"),), "", 0, (Away("y", 5),))
    assert round_.last_seats == {"x": 7, "y": 5}


def test_the_run_that_never_had_a_round_can_be_written_as_closed() -> None:
    assert parse_round(KEY, encode(rendezvous_records.NO_ROUND)) == Round(0, (), "", 0)
