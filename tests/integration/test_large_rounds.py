"""Rounds of a hundred nodes on a real etcd: light agents, many to a process, whose seats lie in many chunks."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import pytest
from helpers import DEADLINE, eventually, rdzv_settings
from rdzv_nodes import spawn

from ftcoord.core.layout import all_seats_span, decided_key, seats_span
from ftcoord.core.rendezvous_records import RoundHead, parse_decided
from ftcoord.etcd.api import Get
from ftcoord.etcd.client import EtcdClient
from ftcoord.rendezvous.node import Node

NODES = 100


class LightAgents:
    """Nodes of one run over one client, each on a thread of its own while it asks."""

    def __init__(self, client: EtcdClient, run_id: str, nodes: int) -> None:
        self._client = client
        # With the time-outs of a crowded machine: this test is about seats, not about seconds.
        self.settings = rdzv_settings((nodes, nodes), run_id, lease_ttl=60, join_timeout=600)
        self.nodes: list[Node] = []

    def add(self, count: int) -> list[Node]:
        first = len(self.nodes)
        new = [Node(self._client, self.settings, "127.0.0.1", f"host{first + n}") for n in range(count)]
        self.nodes += new
        return new

    def ask(self, nodes: Sequence[Node]) -> list[Future[RoundHead]]:
        return [spawn(lambda node=node, port=port: _round_of(node, port)) for port, node in enumerate(nodes, 1000)]

    def end(self) -> None:
        for node in self.nodes:
            node.stop()
            node.participant.orphan()


def _round_of(node: Node, port: int) -> RoundHead:
    node.begin()
    while (found := node.ask(port)) is None:
        pass
    return found


@pytest.fixture
def agents(client: EtcdClient) -> Iterator[Callable[[int], LightAgents]]:
    made: list[LightAgents] = []

    def make(nodes: int) -> LightAgents:
        made.append(LightAgents(client, uuid.uuid4().hex, nodes))
        return made[-1]

    yield make
    for one in made:
        one.end()


def check_round(nodes: Sequence[Node], told: Sequence[RoundHead]) -> None:
    """One round, and each rank once; rank 0 serves the address."""
    assert len({(one.name, one.size, one.address, one.port) for one in told}) == 1
    assert told[0].size == len(nodes)
    ranks = [one.rank_of(node.participant.ids[-1]) for node, one in zip(nodes, told, strict=True)]
    assert sorted(rank for rank in ranks if rank is not None) == list(range(len(nodes)))
    assert told[0].port == 1000 + ranks.index(0)


def test_a_hundred_nodes_meet_and_go_on_without_one(client: EtcdClient, agents: Callable[[int], LightAgents]) -> None:
    run = agents(NODES)
    nodes = run.add(NODES)
    first = [join.result(4 * DEADLINE) for join in run.ask(nodes)]
    check_round(nodes, first)
    prefix = run.settings.prefix
    (kv,) = client.get(decided_key(prefix)).kvs
    head = parse_decided(kv.key, kv.value)
    assert len(kv.value) < 600
    chunks = client.range(Get(seats_span(prefix, head.name))).kvs
    assert len(chunks) == head.chunks
    assert {one.lease for one in chunks} == {kv.lease}

    nodes[0].leave("it was told to")  # the decider: another one reads the seats, and recalls the round
    left = nodes[1:]
    eventually(lambda: all(node.waiting()[0] for node in left), "all are called back")
    left = [*left, *run.add(1)]
    second = [join.result(4 * DEADLINE) for join in run.ask(left)]
    check_round(left, second)
    assert second[0].number > first[0].number
    kept = sum(
        one.rank_of(node.participant.ids[-1]) == before.rank_of(node.participant.ids[-1])
        for node, before, one in zip(nodes[1:], first[1:], second[:-1], strict=True)
    )
    assert kept >= NODES - 2, "but for one that may have to take rank 0"
    there = client.range(Get(all_seats_span(prefix), keys_only=True)).kvs
    assert len(there) == head.chunks, "the first round's seats are gone"
    assert not any(one.key in seats_span(prefix, head.name) for one in there)
