"""Keys of a run and of its neighbours that hold anything at all: said with the key's name, and never touched."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import builders
import pytest
from helpers import DEADLINE, eventually
from rdzv_nodes import MakeNodes, all_signalled, join_all
from torch.distributed.elastic.rendezvous import RendezvousStateError

from ftcoord.coordination.address import Job
from ftcoord.coordination.replica import Replica
from ftcoord.core.layout import decided_key
from ftcoord.core.quorum_records import QuorumRecord
from ftcoord.errors import StateError
from ftcoord.etcd.api import Span
from ftcoord.etcd.client import EtcdClient

ROUNDS = int(os.environ.get("FTCOORD_TEST_GARBAGE", "200")) // 100
KINDS = ["random", "newer", "large"]


def anything(dice: random.Random, kind: str) -> bytes:
    return {
        "random": lambda: dice.randbytes(dice.randint(1, 200)),
        "newer": lambda: b'{"v":99,"number":9}',
        "large": lambda: dice.randbytes(1_400_000),
    }[kind]()


@pytest.fixture
def run_id(client: EtcdClient, request: pytest.FixtureRequest) -> Iterator[str]:
    name = "garbage"
    yield name
    client.delete(Span(f"/ftcoord/v2/{name}", is_prefix=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_among_garbage(make_nodes: MakeNodes, client: EtcdClient, run_id: str, kind: str) -> None:
    dice = random.Random(kind)
    nodes = make_nodes(2, 2, run_id=run_id).add(2)
    prefix = f"/ftcoord/v2/{run_id}"
    foreign = [f"{prefix}/members/x", f"{prefix}/members/zz/1", f"{prefix}s/decided", f"{prefix}-2", f"{prefix}/notes"]
    there = {key: anything(dice, kind) for key in foreign}
    for key, value in there.items():
        client.put(key, value)
    seats = join_all(nodes)
    for _ in range(ROUNDS):
        client.put(f"{prefix}/decided", anything(dice, kind))
        with pytest.raises(RendezvousStateError, match=f"{prefix}/decided"):
            nodes[0].handler.next_rendezvous()
        client.delete(Span(f"{prefix}/decided"))
        all_signalled(nodes)
        before, seats = seats, join_all(nodes)
        assert seats[0].round > before[0].round
    client.delete(Span(f"{prefix}/rounds/", is_prefix=True))  # in the middle of the round
    participant = nodes[1].handler._node.participant
    client.delete(Span(participant.member.group.own.key))  # type: ignore[union-attr]
    eventually(
        lambda: ((it := participant.member) and client.get(it.group.own.key).one) or nodes[0].signalled(),
        what="it is noticed",
    )
    for key, value in there.items():
        kv = client.get(key).one
        assert kv is not None
        assert (kv.value, kv.version) == (value, 1)


# -- quorums ----------------------------------------------------------------------------------------------------------

REQUEST = builders.request("x", address="addr", store_address="store")


class Pair:
    """Two replicas that ask together."""

    def __init__(self, client: EtcdClient, prefix: str) -> None:
        job = Job("etcd", "", prefix, min_replicas=2)
        self.prefix, self.key = job.prefix, decided_key(job.prefix)
        self._replicas = [Replica(client, job, name, keeps_lease=True) for name in "xy"]
        self._threads = ThreadPoolExecutor(2)

    def ask(self, step: int) -> QuorumRecord:
        """Their next quorum. Raises what either raises."""
        asked = [replace(REQUEST, replica_id=one.replica_id, step=step) for one in self._replicas]
        until = time.monotonic() + DEADLINE
        calls = [
            self._threads.submit(one.ask, request, until) for one, request in zip(self._replicas, asked, strict=True)
        ]
        told = [call.exception() or call.result() for call in calls]
        for one in told:
            if isinstance(one, BaseException):
                raise one
            assert list(one.requests) == asked
        return told[0]  # type: ignore[return-value]

    def may_ask(self) -> bool:
        """Whether neither of them knows of a record that it cannot read."""
        members = [one.participant.member for one in self._replicas]
        return all(member is not None and member.problem is None for member in members)

    def end(self) -> None:
        for one in self._replicas:
            one.leave(DEADLINE)
        self._threads.shutdown()


@pytest.fixture
def pair(client: EtcdClient, prefix: str) -> Iterator[Pair]:
    made = Pair(client, prefix)
    yield made
    made.end()


def test_a_quorum_among_garbage(pair: Pair, client: EtcdClient) -> None:
    """It is said with the key's name, and never decided over. Who knew the quorum goes on when the key is deleted. What
    garbage there may be is in tests/unit/test_garbage.py: whoever is told by a port alone finds it after 3 TTLs."""
    number = pair.ask(1).number
    client.put(pair.key, b"garbage")
    with pytest.raises(StateError, match=repr(pair.key)) as caught:
        pair.ask(2)
    assert caught.value.key == pair.key
    assert [kv.value for kv in client.get(pair.key).kvs] == [b"garbage"]
    client.delete(Span(pair.key))
    eventually(pair.may_ask, what="both hear that it is gone")
    assert pair.ask(2).number > number
