"""The records of a quorum in etcd: what is written is what is read, and what does not fit is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcoord.core import strict
from ftcoord.core.layout import roster_key
from ftcoord.core.quorum_head import Roster, encode_quorum, parse_quorum, parse_roster
from ftcoord.core.quorum_records import (
    IdleMember,
    QuorumRecord,
    QuorumRequest,
    QuorumSeat,
    ReplicaRecord,
    digest_of,
    encode,
    parse_replica,
)
from ftcoord.core.rendezvous_records import JoinRequest
from ftcoord.core.rendezvous_records import encode as encode_ask
from ftcoord.errors import StateError

KEY = "/ftcoord/v1/job/decided"
REQUEST = QuorumRequest("rep_0:4f1c", "http://host0:1234", "host0:29500", 7, 8, False, '{"a": 1}', 2, ("h0", "h1"))
PETITION = ReplicaRecord(REQUEST, 3, 12, 99, heard=40, min_replicas=2)
QUORUM = QuorumRecord(5, 4, (QuorumSeat("694d", 3, REQUEST),), (IdleMember("694e", 2),), 1_700_000_000.25, "694d")

SHORT = replace(PETITION, profile=digest_of(REQUEST.profile))


def written(quorum: QuorumRecord) -> tuple[bytes, bytes]:
    """Head and roster."""
    head, roster = encode_quorum(quorum)
    assert roster is not None
    return head, roster


HEAD, ROSTER = written(QUORUM)


def parse_head(key: str, value: bytes) -> QuorumRecord:
    return parse_quorum(key, value, ROSTER)


Parse = Callable[[str, bytes], "ReplicaRecord | QuorumRecord | Roster"]
EACH = pytest.mark.parametrize(
    ("parse", "value"),
    [(parse_replica, encode(PETITION)), (parse_replica, encode(SHORT)), (parse_head, HEAD), (parse_roster, ROSTER)],
    ids=["ReplicaRecord", "without its profile", "QuorumHead", "Roster"],
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
    seats=st.lists(st.builds(QuorumSeat, texts, whole, requests), max_size=3, unique_by=lambda seat: seat.member).map(
        tuple
    ),
    idle=st.lists(st.builds(IdleMember, texts, whole), max_size=3).map(tuple),
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
    head, roster = written(quorum)
    assert parse_quorum(KEY, head, roster) == quorum
    known = parse_roster(roster_key(KEY), roster)
    assert encode_quorum(quorum, known) == (head, None)
    assert {digest_of(one.profile) for one in quorum.requests} == quorum.profiles.keys()


def test_a_step_writes_no_roster() -> None:
    """What changes with a step is in the head, all else in the roster."""
    known = parse_roster(roster_key(KEY), ROSTER)
    moved = {"step": 8, "commit_failures": 3, "shrink_only": True}
    for name, value in {
        **moved,
        "address": "x",
        "store_address": "x",
        "world_size": 9,
        "data": "",
        "handles": (),
    }.items():
        seat = replace(QUORUM.seats[0], asked=4, request=replace(REQUEST, **{name: value}))
        changed = replace(QUORUM, number=6, seats=(seat,))
        head, roster = encode_quorum(changed, known)
        assert (roster is None) == (name in moved), name
        assert parse_quorum(KEY, head, roster or ROSTER) == changed
    assert encode_quorum(replace(QUORUM, seats=(replace(QUORUM.seats[0], member="694f"),)), known)[1] is not None


@EACH
def test_one_record_is_always_the_same_bytes(parse: Parse, value: bytes) -> None:
    assert b"\n" not in value
    assert fields(value)["v"] == 4
    assert json.dumps(fields(value), separators=(",", ":"), sort_keys=True).encode() == value
    parse(KEY, value)


def test_a_thousand_replicas_of_eight_ranks_fit_into_one_request() -> None:
    """etcd takes 1.5 MiB a request."""
    one = QuorumRequest("r" * 40, "a" * 60, "s" * 60, 2**40, 8, False, "d" * 200, 0, ("h" * 40,) * 8)
    full = QuorumRecord(
        2**31, 2**31, (QuorumSeat("b" * 16, 2**31, one),) * 1000, (IdleMember("c" * 16, 2**31),) * 1000, 1e9, "b"
    )
    head, roster = written(full)
    assert len(head) + len(roster) < 2**20
    assert len(head) < 2**17


@EACH
@pytest.mark.parametrize("version", [0, 1, 3, 5, "4", None, True, 4.0], ids=repr)
def test_another_layout_version_is_refused(parse: Parse, value: bytes, version: object) -> None:
    assert f"version {version!r}" in refused(parse, {**fields(value), "v": version})


@EACH
def test_every_field_must_be_there(parse: Parse, value: bytes) -> None:
    for name in fields(value):
        message = refused(parse, {k: v for k, v in fields(value).items() if k != name})
        assert {"v": "version", "profile": ""}.get(name, name) in message
    assert "surprise" in refused(parse, {**fields(value), "surprise": 1})


@EACH
@pytest.mark.parametrize("wrong", [None, True, float("nan"), {}, [1.5], [True], [[]], [{}]], ids=repr)
def test_every_field_must_have_its_type(parse: Parse, value: bytes, wrong: object) -> None:
    for name in fields(value):
        message = refused(parse, {**fields(value), name: wrong})
        assert {"v": "version", "idle": "", "joined": "", "seats": "", "request": "", "profile": ""}.get(
            name, name
        ) in message


def test_nobody_has_asked_more_often_than_can_be_counted() -> None:
    far = {"common": strict.LARGEST, "ranks": [], "values": []}
    assert "asked" in refused(parse_head, {**fields(HEAD), "asked": far})


def job_of(count: int, asked: int = 1, step: int = 1) -> QuorumRecord:
    requests = [
        replace(REQUEST, replica_id=f"rep_{number:04}", step=step, commit_failures=0) for number in range(count)
    ]
    seats = tuple(QuorumSeat(f"{number:x}", asked, request) for number, request in enumerate(requests))
    return QuorumRecord(asked, 1, seats, (), 1_700_000_000.5, "0")


def test_the_head_of_a_step_that_all_take_has_one_size() -> None:
    sizes = set()
    for count in (1, 8, 64, 1000):
        known = parse_roster(roster_key(KEY), written(job_of(count))[1])
        head, roster = encode_quorum(job_of(count, 2, 2), known)
        assert roster is None
        sizes.add(len(head))
    assert len(sizes) == 1
    assert max(sizes) < 400


def test_a_head_goes_with_its_own_roster_only() -> None:
    """Somebody deleted or wrote one of the two keys: the error names the key that is wrong, and says what to do."""
    with pytest.raises(StateError, match=r"is gone from .*roster.*: delete both keys") as gone:
        parse_quorum(KEY, HEAD, None)
    assert gone.value.key == KEY
    other = written(replace(QUORUM, seats=(replace(QUORUM.seats[0], member="694f"),)))[1]
    with pytest.raises(StateError, match=f"not the roster that '{KEY}' goes with.*: delete both keys") as wrong:
        parse_quorum(KEY, HEAD, other)
    assert wrong.value.key == roster_key(KEY)
    with pytest.raises(StateError, match="does not hold JSON") as garbled:
        parse_quorum(KEY, HEAD, b"x")
    assert garbled.value.key == roster_key(KEY)


def test_one_kind_is_not_read_as_the_other() -> None:
    refused(parse_replica, HEAD)
    refused(parse_head, encode(PETITION))
    refused(parse_head, ROSTER)
    refused(parse_roster, HEAD)
    refused(parse_replica, encode_ask(JoinRequest("node", "host", 1, 0, "host", "nonce", 1, 2)))


json_values = st.recursive(
    st.none() | st.booleans() | whole | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)


@st.composite
def mangled(draw: st.DrawFn) -> bytes:
    """A good record with a few fields replaced, or cut, or with some bytes changed."""
    raw = fields(draw(replica_records.map(encode) | quorums.map(written).flatmap(st.sampled_from)))
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
        parse_roster(KEY, value)
    with contextlib.suppress(StateError):
        quorum = parse_quorum(KEY, value, ROSTER)
        assert parse_quorum(KEY, *written(quorum)) == quorum
    with contextlib.suppress(StateError):
        assert parse_quorum(KEY, HEAD, value) == QUORUM
