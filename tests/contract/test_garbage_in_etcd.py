"""Keys of a run and of its neighbours that hold anything at all: said with the key's name, and never touched."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Iterator

import pytest
from helpers import eventually
from rdzv_nodes import MakeNodes, all_signalled, join_all
from torch.distributed.elastic.rendezvous import RendezvousStateError

from ftcoord.etcd.api import Span
from ftcoord.etcd.client import EtcdClient

ROUNDS = int(os.environ.get("FTCOORD_TEST_GARBAGE", "200")) // 100
KINDS = ["random", "pickle", "newer", "other", "large", "empty"]


def anything(dice: random.Random, kind: str) -> bytes:
    return {
        "random": lambda: dice.randbytes(dice.randint(1, 200)),
        "pickle": lambda: pickle.dumps(["a", {"state": 1}]),
        "newer": lambda: b'{"v":2,"number":9}',
        "other": lambda: b'{"round":%d,"complete":true}' % dice.randint(0, 99),
        "large": lambda: dice.randbytes(1_400_000),
        "empty": lambda: b"",
    }[kind]()


@pytest.fixture
def run_id(client: EtcdClient, request: pytest.FixtureRequest) -> Iterator[str]:
    name = "garbage"
    yield name
    client.delete(Span(f"/ftcoord/v1/{name}", is_prefix=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_among_garbage(make_nodes: MakeNodes, client: EtcdClient, run_id: str, kind: str) -> None:
    dice = random.Random(kind)
    nodes = make_nodes(2, 2, run_id=run_id).add(2)
    prefix = f"/ftcoord/v1/{run_id}"
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
    client.delete(Span(nodes[1].handler._node.participant.member.group.key))  # type: ignore[union-attr]
    eventually(
        lambda: client.get(nodes[1].handler._node.participant.member.group.key).one or nodes[0].signalled(),
        what="it is noticed",
    )  # type: ignore[union-attr]
    for key, value in there.items():
        kv = client.get(key).one
        assert kv is not None
        assert (kv.value, kv.version) == (value, 1)
