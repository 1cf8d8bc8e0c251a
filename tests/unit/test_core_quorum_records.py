"""The records of a quorum in etcd: what is written is what is read, and what does not fit is refused."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, strategies as st

from ftcoord.core import strict
from ftcoord.core.quorum_records import (
    IdleMember,
    QuorumRecord,
    QuorumRequest,
    QuorumSeat,
    ReplicaRecord,
    encode,
    encode_quorum,
    parse_quorum,
    parse_replica,
)
from ftcoord.core.rendezvous_records import JoinRequest, encode as encode_ask
from ftcoord.errors import StateError

KEY = "/ftcoord/v2/job/decided"
REQUEST = QuorumRequest("rep_0:4f1c", "http://host0:1234", "host0:29500", 7, 8, False, '{"a": 1}', 2, ("h0", "h1"))
PETITION = ReplicaRecord(REQUEST, 3, 12, 99, heard=40, min_replicas=2)
QUORUM = QuorumRecord(5, 4, (QuorumSeat("694d", 3, REQUEST),), (IdleMember("694e", 2),), 1_700_000_000.25, "694d")

DECIDED = zlib.decompress(encode_quorum(QUORUM))
"""As JSON."""


def parse_decided(key: str, value: bytes) -> QuorumRecord:
    return parse_quorum(key, zlib.compress(value))


Parse = Callable[[str, bytes], "ReplicaRecord | QuorumRecord"]
EACH = pytest.mark.parametrize(
    ("parse", "value"),
    [(parse_replica, encode(PETITION)), (parse_decided, DECIDED)],
    ids=["ReplicaRecord", "QuorumRecord"],
)

texts = st.text(max_size=20)
whole = st.integers(-strict.LARGEST, strict.LARGEST)
counted = st.integers(0, strict.LARGEST_COUNT)
sizes = st.integers(0, strict.LARGEST)
handles = st.lists(texts, max_size=3).map(tuple)
data = st.just("") | st.dictionaries(texts, texts | whole, max_size=2).map(json.dumps)
requests = st.builds(QuorumRequest, texts, texts, texts, whole, sizes, st.booleans(), data, whole, handles)
replica_records = st.builds(ReplicaRecord, requests, counted, counted, whole)
quorums = st.builds(
    QuorumRecord,
    number=counted,
    id=counted,
    seats=st.lists(st.builds(QuorumSeat, texts, counted, requests), max_size=3, unique_by=lambda seat: seat.member).map(
        tuple
    ),
    idle=st.lists(st.builds(IdleMember, texts, counted), max_size=3).map(tuple),
    created=st.floats(allow_nan=False, allow_infinity=False),
    by=texts,
)


def fields(value: bytes) -> dict[str, Any]:
    raw = json.loads(value)
    assert isinstance(raw, dict)
    return raw


def refused(parse: Parse, raw: object) -> str:
    """The message; it names the key."""
    with pytest.raises(StateError) as caught:
        parse(KEY, raw if isinstance(raw, bytes) else json.dumps(raw).encode())
    assert repr(KEY) in str(caught.value)
    assert caught.value.key == KEY
    return str(caught.value)


@given(replica_records)
def test_a_petition_is_read_as_it_was_written(petition: ReplicaRecord) -> None:
    assert parse_replica(KEY, encode(petition)) == petition


@given(quorums)
def test_a_quorum_is_read_as_it_was_written(quorum: QuorumRecord) -> None:
    assert parse_quorum(KEY, encode_quorum(quorum)) == quorum


@EACH
def test_one_record_is_always_the_same_bytes(parse: Parse, value: bytes) -> None:
    assert b"\n" not in value
    assert fields(value)["v"] == 4
    assert json.dumps(fields(value), separators=(",", ":"), sort_keys=True).encode() == value
    parse(KEY, value)


def test_a_thousand_replicas_of_eight_ranks_fit_into_one_request() -> None:
    """etcd takes 1.5 MiB a request. Little of this is alike, so that it compresses badly."""
    chance = Random(1)

    def text(length: int) -> str:
        return f"{chance.getrandbits(4 * length):0{length}x}"

    def asked(name: str) -> QuorumRequest:
        data, handles = json.dumps({"at": text(100)}), tuple(text(40) for _ in range(8))
        return QuorumRequest(name, text(60), text(60), 2**40, 8, False, data, 0, handles)

    seats = tuple(QuorumSeat(text(16), 2**31, asked(text(40))) for _ in range(1000))
    idle = tuple(IdleMember(text(16), 2**31) for _ in range(1000))
    assert 2**18 < len(encode_quorum(QuorumRecord(2**31, 2**31, seats, idle, 1e9, "b"))) < 2**20


@EACH
@pytest.mark.parametrize("version", [0, 1, 3, 5, "4", None, True, 4.0], ids=repr)
def test_another_layout_version_is_refused(parse: Parse, value: bytes, version: object) -> None:
    assert f"version {version!r}" in refused(parse, {**fields(value), "v": version})


@EACH
def test_every_field_must_be_there(parse: Parse, value: bytes) -> None:
    for name in fields(value):
        message = refused(parse, {k: v for k, v in fields(value).items() if k != name})
        assert {"v": "version"}.get(name, name) in message
    assert "surprise" in refused(parse, {**fields(value), "surprise": 1})


@EACH
@pytest.mark.parametrize("wrong", [None, True, float("nan"), {}, [1.5], [True], [[]], [{}]], ids=repr)
def test_every_field_must_have_its_type(parse: Parse, value: bytes, wrong: object) -> None:
    for name in fields(value):
        message = refused(parse, {**fields(value), name: wrong})
        assert {"v": "version", "idle": "", "seats": "", "request": ""}.get(name, name) in message


def test_what_is_cut_off_or_unpacks_to_more_than_a_quorum_is_refused() -> None:
    whole = encode_quorum(QUORUM)
    assert "cut off" in refused(parse_quorum, whole[:-1])
    assert "too large" in refused(parse_quorum, zlib.compress(bytes(strict.LARGEST_PACKED + 1)))
    assert "not compressed" in refused(parse_quorum, DECIDED)
    assert "layout version 3" in refused(parse_quorum, json.dumps({**fields(DECIDED), "v": 3}).encode())


def test_one_kind_is_not_read_as_the_other() -> None:
    refused(parse_replica, DECIDED)
    refused(parse_decided, encode(PETITION))
    refused(parse_replica, encode_ask(JoinRequest("node", "host", 1, 0, "host", "nonce", 1, 2)))


json_values = st.recursive(
    st.none() | st.booleans() | whole | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)


@st.composite
def mangled(draw: st.DrawFn) -> bytes:
    """A good record with a few fields replaced, or cut, or with some bytes changed."""
    raw = fields(draw(replica_records.map(encode) | quorums.map(encode_quorum).map(zlib.decompress)))
    for name in draw(st.lists(st.sampled_from(sorted(raw)), max_size=2)):
        raw[name] = draw(json_values)
    value = bytearray(json.dumps(raw).encode())
    for at in draw(st.lists(st.integers(0, len(value) - 1), max_size=2)):
        value[at] = draw(st.integers(0, 255))
    return bytes(value[: draw(st.none() | st.integers(0, len(value)))])


@given(st.binary(max_size=64) | json_values.map(lambda raw: json.dumps(raw).encode()) | mangled())
def test_whatever_is_there_is_a_record_or_a_state_error(value: bytes) -> None:
    with contextlib.suppress(StateError):
        record = parse_replica(KEY, value)
        assert parse_replica(KEY, encode(record)) == record
    with contextlib.suppress(StateError):
        quorum = parse_decided(KEY, value)
        assert parse_quorum(KEY, encode_quorum(quorum)) == quorum
    with contextlib.suppress(StateError):
        parse_quorum(KEY, value)
