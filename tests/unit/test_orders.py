"""What operators order at the same moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import builders
import pytest
from doors import Door
from virtual import MemoryEtcd
from virtual.etcd import MemoryClient

from ftcoord.coordination.replica import order_stop
from ftcoord.core.elastic import FINISHED, Place
from ftcoord.core.layout import (
    decided_key,
    elastic_end_key,
    elastic_stop_key,
    member_id,
    member_key,
    quorum_prefix,
    run_prefix,
)
from ftcoord.core.quorum_records import QuorumSeat, encode_quorum
from ftcoord.core.rendezvous_records import Seat, encode, parse_decided
from ftcoord.errors import EtcdUnavailable
from ftcoord.etcd.api import Etcd, Get, Put, Span, TxnResult
from ftcoord.operator.orders import NothingThere, Order, planned

KEYS, JOB = "/ftcoord/v2", "job"
PREFIX = run_prefix(KEYS, JOB)
RECORD = decided_key(PREFIX)


class Overtaken(Door):
    """Somebody else does something just before its first transaction."""

    def __init__(self, real: Etcd, before: Callable[[], object]) -> None:
        super().__init__(real)
        self._before: Callable[[], object] | None = before

    def txn(self, *args: Any, **kwargs: Any) -> TxnResult:
        before, self._before = self._before, None
        if before is not None:
            before()
        return super().txn(*args, **kwargs)


@pytest.fixture
def etcd() -> Iterator[MemoryClient]:
    """With a running round of three nodes, which needs two."""
    with MemoryEtcd() as server:
        client, seats = server.client(), list[Seat]()
        for node in "ABC":
            lease = client.grant(60).id
            seats.append(Seat(member_id(lease), node, f"host{node}"))
            ask = builders.ask(node, address=node, nonce=node, seated=1, limits=(2, 3))
            client.txn([], [Put(member_key(PREFIX, member_id(lease)), encode(ask), lease)])
        running = builders.round_(1, tuple(seats), address="A", port=1, ready=True, limits=(2, 3))
        client.txn([], [Put(RECORD, encode(running), client.grant(60).id)])
        yield client


def test_a_lease_that_is_not_granted_in_time_closes_nothing(etcd: MemoryClient) -> None:
    """What an operator allows a request bounds that of the record's lease too, which a run without a record needs."""
    etcd.delete(Span(RECORD))
    asked: list[object] = []

    class Stalled(Door):
        def grant(self, ttl: int, *, timeout: float | None = None) -> Any:
            asked.append(timeout)
            raise EtcdUnavailable("no answer in time")

    with pytest.raises(EtcdUnavailable):
        planned(Stalled(etcd), KEYS, Order("close", JOB, "", "ann", ""), 0.5)[1]()
    assert asked == [0.5]
    assert etcd.range(Get(Span(RECORD))).one is None


def drained(etcd: MemoryClient) -> tuple[str, ...]:
    kv = etcd.range(Get(Span(RECORD))).one
    assert kv is not None
    return parse_decided(kv.key, kv.value).drained


def test_of_two_who_drain_at_once_the_second_sees_what_the_first_did(etcd: MemoryClient) -> None:
    """Each alone leaves two nodes, which are enough; both leave one."""
    _, first = planned(etcd, KEYS, Order("drain", JOB, "A", "ann", ""), 5.0)
    with pytest.raises(NothingThere, match="1 of at least 2 nodes would be left"):
        planned(Overtaken(etcd, first), KEYS, Order("drain", JOB, "B", "bob", ""), 5.0)[1]()
    assert drained(etcd) == ("A",)


def test_a_stop_that_comes_as_an_elastic_run_ends_is_not_for_the_next_one(etcd: MemoryClient) -> None:
    """The last member to finish deletes what was asked; what is asked after that would stay."""
    prefix = quorum_prefix(KEYS, JOB)
    key, end = elastic_stop_key(prefix), elastic_end_key(prefix, 4)
    assert "no group" in order_stop(etcd, prefix, "why", by="ann", timeout=5)
    group = builders.quorum(4, (QuorumSeat("m", 1, Place(0).request("x")),), id=1)
    etcd.put(decided_key(prefix), encode_quorum(group), etcd.grant(60).id)
    ends = Overtaken(etcd, lambda: etcd.put(end, FINISHED))
    assert "over" in order_stop(ends, prefix, "why", by="ann", timeout=5)
    assert etcd.get(key).one is None
    etcd.delete(Span(end))
    done = planned(etcd, KEYS, Order("stop", JOB, "", "ann", "a fan"), 5.0)[1]()
    assert done["did"] == ["asked all ranks of 'job' to stop at one agreed step: stop asked by ann: a fan"]
    kv = etcd.get(key).one
    assert kv is not None
    assert (kv.value, kv.lease) == (b"stop asked by ann: a fan", etcd.get(decided_key(prefix)).kvs[0].lease)
    assert planned(etcd, KEYS, Order("stop", JOB, "", "bob", ""), 5.0)[1]()["left"] == [
        "it is to stop already: stop asked by ann: a fan"
    ]
