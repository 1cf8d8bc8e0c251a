"""The records of a quorum in etcd: what is written is what is read, and what does not fit is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcoord.core import strict
from ftcoord.core.quorum_records import (
    IdleMember,
    QuorumRecord,
    QuorumRequest,
    QuorumSeat,
    ReplicaRecord,
    encode,
    parse_quorum,
    parse_replica,
)
from ftcoord.core.rendezvous_records import JoinRequest
from ftcoord.core.rendezvous_records import encode as encode_ask
from ftcoord.errors import StateError

KEY = "/ftcoord/v1/job/decided"
REQUEST = QuorumRequest("rep_0:4f1c", "http://host0:1234", "host0:29500", 7, 8, False, '{"a": 1}', 2, ("h0", "h1"))
PETITION = ReplicaRecord(REQUEST, 3, 12, 99)
QUORUM = QuorumRecord(5, 4, (QuorumSeat("694d", 3, REQUEST),), (IdleMember("694e", 2),), 1_700_000_000.25, "694d")

Parse = Callable[[str, bytes], "ReplicaRecord | QuorumRecord"]
BOTH = pytest.mark.parametrize(
    ("parse", "record"), [(parse_replica, PETITION), (parse_quorum, QUORUM)], ids=["ReplicaRecord", "QuorumRecord"]
)

texts = st.text(st.characters(), max_size=20)
whole = st.integers(-strict.LARGEST, strict.LARGEST)
handles = st.lists(texts, max_size=3).map(tuple)
data = st.just("") | st.dictionaries(texts, texts | whole, max_size=2).map(json.dumps)
requests = st.builds(QuorumRequest, texts, texts, texts, whole, whole, st.booleans(), data, whole, handles)
replica_records = st.builds(ReplicaRecord, requests, whole, whole, whole)
quorums = st.builds(
    QuorumRecord,
    number=whole,
    id=whole,
    seats=st.lists(st.builds(QuorumSeat, texts, whole, requests), max_size=3).map(tuple),
    idle=st.lists(st.builds(IdleMember, texts, whole), max_size=3).map(tuple),
    created=st.floats(allow_nan=False, allow_infinity=False),
    by=texts,
)


def fields(record: ReplicaRecord | QuorumRecord) -> dict[str, Any]:
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


@given(replica_records)
def test_a_petition_is_read_as_it_was_written(petition: ReplicaRecord) -> None:
    assert parse_replica(KEY, encode(petition)) == petition


@given(quorums)
def test_a_quorum_is_read_as_it_was_written(quorum: QuorumRecord) -> None:
    assert parse_quorum(KEY, encode(quorum)) == quorum


@BOTH
def test_one_record_is_always_the_same_bytes(parse: Parse, record: ReplicaRecord | QuorumRecord) -> None:
    assert encode(parse(KEY, encode(record))) == encode(record)
    assert b"\n" not in encode(record)
    assert fields(record)["v"] == 1


def test_the_form_of_the_records() -> None:
    """Others read them too: this changes with the layout's version only."""
    request = {
        "replica_id": "rep_0:4f1c",
        "address": "http://host0:1234",
        "store_address": "host0:29500",
        "step": 7,
        "world_size": 8,
        "shrink_only": False,
        "data": '{"a": 1}',
        "commit_failures": 2,
        "handles": ["h0", "h1"],
    }
    assert fields(PETITION) == {"v": 1, "request": request, "asked": 3, "after": 12, "beat": 99}
    assert fields(QUORUM) == {
        "v": 1,
        "number": 5,
        "id": 4,
        "seats": [{"member": "694d", "asked": 3, "request": request}],
        "idle": [{"member": "694e", "asked": 2}],
        "created": 1_700_000_000.25,
        "by": "694d",
    }


def test_a_thousand_replicas_of_eight_ranks_fit_into_one_request() -> None:
    """etcd takes 1.5 MiB a request."""
    one = QuorumRequest("r" * 40, "a" * 60, "s" * 60, 2**40, 8, False, "d" * 200, 0, ("h" * 40,) * 8)
    full = QuorumRecord(
        2**31, 2**31, (QuorumSeat("b" * 16, 2**31, one),) * 1000, (IdleMember("c" * 16, 2**31),) * 1000, 1e9, "b"
    )
    assert len(encode(full)) < 2**20


@BOTH
@pytest.mark.parametrize("version", [0, 2, "1", None, True, 1.0], ids=repr)
def test_another_layout_version_is_refused(parse: Parse, record: ReplicaRecord | QuorumRecord, version: object) -> None:
    assert f"version {version!r}" in refused(parse, {**fields(record), "v": version})


@BOTH
def test_every_field_must_be_there(parse: Parse, record: ReplicaRecord | QuorumRecord) -> None:
    for name in fields(record):
        message = refused(parse, {k: v for k, v in fields(record).items() if k != name})
        assert "version" in message if name == "v" else name in message
    assert "surprise" in refused(parse, {**fields(record), "surprise": 1})


@BOTH
@pytest.mark.parametrize("wrong", [None, True, float("nan"), {}, [1], [[]], [{}]], ids=repr)
def test_every_field_must_have_its_type(parse: Parse, record: ReplicaRecord | QuorumRecord, wrong: object) -> None:
    for name in fields(record):
        message = refused(parse, {**fields(record), name: wrong})
        assert {"v": "version", "idle": "", "seats": "", "request": ""}.get(name, name) in message


@BOTH
def test_a_request_is_checked_wherever_it_is(parse: Parse, record: ReplicaRecord | QuorumRecord) -> None:
    wrong: dict[str, object] = dict.fromkeys(fields(PETITION)["request"], None)
    wrong |= {"shrink_only": 0, "step": True, "world_size": 1.0, "replica_id": 1, "handles": "ab", "data": "{"}
    for name, value in {**wrong, "surprise": 1}.items():
        raw = fields(record)
        inner = raw["seats"][0]["request"] if "seats" in raw else raw["request"]
        inner[name] = value
        assert name in refused(parse, raw)
    raw["request" if parse is parse_replica else "seats"] = [1]
    refused(parse, raw)


def test_every_seat_and_handle_is_checked() -> None:
    good = fields(QUORUM)["seats"][0]
    for bad in ({}, [], {**good, "rank": 0}, {**good, "asked": "3"}, {**good, "request": []}):
        refused(parse_quorum, {**fields(QUORUM), "seats": [good, bad]})
    assert "asked" in refused(parse_quorum, {**fields(QUORUM), "idle": [{"member": "x", "asked": 1.0}]})
    request = fields(PETITION)["request"]
    assert "handles" in refused(parse_replica, {**fields(PETITION), "request": {**request, "handles": ["h", 1]}})


@pytest.mark.parametrize("created", [b"NaN", b"Infinity", b"1e999", b"7"])
def test_created_is_a_time(created: bytes) -> None:
    assert "created" in refused(parse_quorum, encode(QUORUM).replace(b"1700000000.25", created))


def test_one_kind_is_not_read_as_the_other() -> None:
    refused(parse_replica, encode(QUORUM))
    refused(parse_quorum, encode(PETITION))
    refused(parse_replica, encode_ask(JoinRequest("node", "host", 1, 0, "host", "nonce", 1, 2)))


json_values = st.recursive(
    st.none() | st.booleans() | whole | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)


@st.composite
def mangled(draw: st.DrawFn) -> bytes:
    """A good record with a few fields replaced, or cut, or with some bytes changed."""
    raw = fields(draw(replica_records | quorums))
    for name in draw(st.lists(st.sampled_from(sorted(raw)), max_size=2)):
        raw[name] = draw(json_values)
    value = bytearray(json.dumps(raw).encode())
    for at in draw(st.lists(st.integers(0, len(value) - 1), max_size=2)):
        value[at] = draw(st.integers(0, 255))
    return bytes(value[: draw(st.none() | st.integers(0, len(value)))])


@given(st.binary(max_size=64) | json_values.map(lambda raw: json.dumps(raw).encode()) | mangled())
def test_whatever_is_there_is_a_record_or_a_state_error(value: bytes) -> None:
    for parse in (parse_replica, parse_quorum):
        with contextlib.suppress(StateError):
            record = parse(KEY, value)
            assert parse(KEY, encode(record)) == record
