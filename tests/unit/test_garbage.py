"""Whatever lies in a group's keys: a decider reads it, raises the state error that names it, or leaves it alone."""

from __future__ import annotations

import json
import os
import pickle
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import builders
import pytest
from hypothesis import given, settings, strategies as st
from virtual import MemoryEtcd

from ftcoord.coordination.policy import HighestSeen, QuorumPolicy
from ftcoord.core import quorum_records, rendezvous_records
from ftcoord.core.quorum import QuorumOptions
from ftcoord.core.quorum_records import QuorumSeat
from ftcoord.core.rendezvous import RoundOptions
from ftcoord.core.rendezvous_records import Seat
from ftcoord.core.verdict import Publish, Wait
from ftcoord.errors import StateError
from ftcoord.etcd.api import Etcd, KeyValue, Span
from ftcoord.primitives.group.use import View
from ftcoord.rendezvous.policy import RendezvousPolicy

CASES = int(os.environ.get("FTCOORD_TEST_GARBAGE", "200"))
PREFIX = "/ftcoord/v2/run"
NOW = 1000.0
REQUEST = builders.request("a", address="addr", store_address="store", step=3)
QUORUM = quorum_records.encode_quorum(builders.quorum(7, (QuorumSeat("0000000000000001", 1, REQUEST),)))
ROUND = builders.round_(7, (Seat("0000000000000001", "n1", "h"),), port=1234)
SEATS = rendezvous_records.encode_chunk(rendezvous_records.chunks_of(ROUND)[0])
GOOD = [
    rendezvous_records.encode(builders.ask("n1", port=1234, host="h", nonce="x")),
    rendezvous_records.encode(builders.ask("n2", address="10.0.0.2", port=1234, after=7, host="h", nonce="y")),
    rendezvous_records.encode(ROUND),
    rendezvous_records.encode(replace(ROUND, recalled="somebody left")),
    SEATS,
    quorum_records.encode(builders.replica(REQUEST, asked=1)),
    quorum_records.encode(builders.replica(REQUEST, asked=2, after=7, beat=9)),
    QUORUM,
]


class Executed(Exception):
    """What was in the store was run."""


def execute() -> None:
    raise Executed


class Bomb:
    def __reduce__(self) -> Any:
        return execute, ()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def mangled(draw: st.DrawFn) -> bytes:
    """A good record with fields of another kind, without some, of another version, with bytes changed, or cut."""
    good = draw(st.sampled_from(GOOD))
    is_packed = good in (QUORUM, SEATS)
    raw = json.loads(zlib.decompress(good) if is_packed else good)
    for name in draw(st.lists(st.sampled_from([*sorted(raw), "new"]), max_size=2)):
        raw[name] = draw(json_values)
    for name in draw(st.lists(st.sampled_from(sorted(raw)), max_size=1)):
        raw.pop(name, None)
    value = bytearray(json.dumps(raw).encode())
    for at in draw(st.lists(st.integers(0, len(value) - 1), max_size=2)):
        value[at] = draw(st.integers(0, 255))
    if is_packed and draw(st.booleans()):
        return zlib.compress(value)
    return bytes(value[: draw(st.none() | st.integers(0, len(value)))])


large = st.sampled_from([b"x" * 1_500_000, b"[" * 100_000, b'{"v":1,"node":"' + b"n" * 1_400_000 + b'"}'])
garbage = (
    st.binary(max_size=64)
    | json_values.map(lambda raw: json.dumps(raw).encode())
    | mangled()
    | st.sampled_from([*GOOD, pickle.dumps(Bomb()), b'{"v":2}', b'{"v":1}'])
    | st.integers(0, 40).flatmap(lambda n: large if n == 0 else st.just(b""))
)


@pytest.fixture(scope="module")
def empty() -> Iterator[Etcd]:
    with MemoryEtcd() as etcd:
        yield etcd.client()


def policies(empty: Etcd) -> list[Any]:
    return [
        RendezvousPolicy(PREFIX, RoundOptions(30.0, 0.1, True), empty),
        QuorumPolicy(PREFIX, QuorumOptions(1, 60.0), seen=HighestSeen(), wall_clock=lambda: 0.0),
    ]


def view(decided: bytes | None, members: list[bytes]) -> View:
    keys = [
        KeyValue(f"{PREFIX}/members/{number:016x}", value, number, number, 1, number)
        for number, value in enumerate(members, 1)
    ]
    record = None if decided is None else KeyValue(f"{PREFIX}/decided", decided, 1, 99, 1, 5)
    seen = {kv.key: NOW - 60 for kv in keys}
    return View(tuple(keys), seen, NOW - 60, record, NOW - 60, NOW - 60)


def verdict_of(policy: Any, seen: View) -> Publish | Wait | StateError:
    try:
        return policy.decide(seen, "0000000000000001", NOW)  # type: ignore[no-any-return]
    except StateError as error:
        return error


def number_in(record: bytes) -> int:
    """Of a round, or of a quorum, which is compressed."""
    return int(json.loads(record if record.startswith(b"{") else zlib.decompress(record))["number"])


@settings(max_examples=CASES)
@given(st.none() | garbage, st.lists(garbage, max_size=4))
def test_a_decider_survives_whatever_it_reads(empty: Etcd, decided: bytes | None, members: list[bytes]) -> None:
    for policy in policies(empty):
        seen = view(decided, members)
        verdict = verdict_of(policy, seen)
        if isinstance(verdict, StateError):
            assert verdict.key == f"{PREFIX}/decided"
            assert verdict.key in str(verdict)
        elif isinstance(verdict, Publish):
            touched = [*(Span(key) for key, _ in verdict.puts), *verdict.deletes]
            assert all(
                span.start.startswith(tuple(f"{PREFIX}/{part}" for part in ("rounds/", "seats/", "store/")))
                for span in touched
            )
            assert number_in(verdict.record) >= (number_in(decided) if decided else 0)
