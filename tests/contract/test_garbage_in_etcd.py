"""Keys of a run and of its neighbours that hold anything at all: said with the key's name, and never touched."""

from __future__ import annotations

import os
import pickle
import random
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import builders
import pytest
from helpers import DEADLINE, eventually
from rdzv_nodes import MakeNodes, all_signalled, join_all
from torch.distributed.elastic.rendezvous import RendezvousStateError

from ftcoord.coordination.address import Job
from ftcoord.coordination.replica import Replica
from ftcoord.core.layout import decided_key, member_id, member_key
from ftcoord.core.quorum_records import QuorumRecord, encode
from ftcoord.core.strict import LARGEST_COUNT, LARGEST_STEP
from ftcoord.errors import StateError
from ftcoord.etcd.api import Span
from ftcoord.etcd.client import EtcdClient

ROUNDS = int(os.environ.get("FTCOORD_TEST_GARBAGE", "200")) // 100
KINDS = ["random", "pickle", "newer", "other", "large", "empty"]


def anything(dice: random.Random, kind: str) -> bytes:
    return {
        "random": lambda: dice.randbytes(dice.randint(1, 200)),
        "pickle": lambda: pickle.dumps(["a", {"state": 1}]),
        "newer": lambda: b'{"v":99,"number":9}',
        "other": lambda: b'{"round":%d,"complete":true}' % dice.randint(0, 99),
        "large": lambda: dice.randbytes(1_400_000),
        "empty": lambda: b"",
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
    client.delete(Span(participant.member.group.key))  # type: ignore[union-attr]
    eventually(
        lambda: ((it := participant.member) and client.get(it.group.key).one) or nodes[0].signalled(),
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

    def decider_sees(self) -> Iterable[str]:
        """The members that the decider sees."""
        members = [one._participant.member for one in self._replicas]
        views = [member.group._members.mirror for member in members if member is not None]
        return [key for view in views if view is not None for key in view.kvs]

    def may_ask(self) -> bool:
        """Whether neither of them knows of a record that it cannot read."""
        members = [one._participant.member for one in self._replicas]
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_quorum_among_garbage(pair: Pair, client: EtcdClient, kind: str) -> None:
    """It is said with the key's name, and never decided over. Who knew the quorum goes on when the key is deleted."""
    dice = random.Random(kind)
    beside = [f"{pair.key}s", f"{pair.key}/other"]
    there = {key: anything(dice, kind) for key in beside}
    for key, value in there.items():
        client.put(key, value)
    number = pair.ask(1).number
    for step, key in enumerate((pair.key,) * ROUNDS, 2):
        garbage = anything(dice, kind)
        client.put(key, garbage)
        with pytest.raises(StateError, match=repr(key)) as caught:
            pair.ask(step)
        assert caught.value.key == key
        left = client.get(key).one
        assert left is not None
        assert left.value == garbage
        client.delete(Span(key))
        eventually(pair.may_ask, what="both hear that it is gone")
        quorum = pair.ask(step)
        assert quorum.number > number
        number = quorum.number
    for key, value in there.items():
        kv = client.get(key).one
        assert kv is not None
        assert (kv.value, kv.version) == (value, 1)


@pytest.mark.parametrize("beyond", [0, 10**6, 10**18 - 10**15])
def test_a_member_that_names_a_number_to_which_nobody_has_counted(pair: Pair, client: EtcdClient, beyond: int) -> None:
    """The first one is as far as a decider counts on. All go on while that member lives, and when it is gone."""
    before = pair.ask(1).number
    number = min(before + LARGEST_STEP + beyond, LARGEST_COUNT)
    lease = client.grant(60).id
    rogue = builders.replica(replace(REQUEST, replica_id="rogue"), after=number, beat=1, heard=number)
    client.put(member_key(pair.prefix, member_id(lease)), encode(rogue), lease)
    eventually(lambda: pair.ask(2) and len(pair.decider_sees()) == 3, what="the decider sees it")
    numbers = [pair.ask(step).number for step in range(3, 6)]
    client.revoke(lease)
    numbers += [pair.ask(step).number for step in range(6, 9)]
    assert before < numbers[0]
    assert numbers == sorted(set(numbers))
    assert (numbers[-1] > number) is (beyond == 0)
