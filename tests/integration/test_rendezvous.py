"""Rounds while etcd is killed, paused and compacted, while the decider dies, and in a storm of all that at once."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import pytest
from helpers import DEADLINE, eventually
from rdzv_nodes import (
    MakeNodes,
    Node,
    NodeProcess,
    Nodes,
    Seat,
    all_join,
    all_signalled,
    check_round,
    join_all,
    join_as_agents,
    keys_under,
    processes,
    spawn,
)
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError

from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.client import EtcdClient


def kill(etcd: EtcdServer) -> None:
    etcd.kill()
    etcd.restart()


def pause(etcd: EtcdServer) -> None:
    """Longer than the leases."""
    etcd.pause()
    threading.Event().wait(3)
    etcd.resume()


def compact(etcd: EtcdServer) -> None:
    """Forget all history, and break every watch so that it has to go on from there."""
    with etcd.get_client() as client:
        for count in range(20):
            revision = client.put("/filler", b"%d" % count).revision
        client.compact(revision)
    kill(etcd)


Trouble = Callable[[EtcdServer], None]


@pytest.fixture(params=[kill, pause, compact])
def trouble(request: pytest.FixtureRequest) -> Trouble:
    made: Trouble = request.param
    return made


# -- an etcd in trouble -----------------------------------------------------------------------------------------------


def members(client: EtcdClient, run_id: str) -> int:
    """How many nodes take part or wait."""
    return len(keys_under(client, f"/ftcoord/v2/{run_id}/members/"))


def test_trouble_while_nodes_wait(make_nodes: MakeNodes, fragile: EtcdServer, trouble: Trouble) -> None:
    run = make_nodes(3, 3, on=fragile, run_id="run")
    nodes = run.add(2)
    joins = [node.join() for node in nodes]
    with fragile.get_client() as client:
        eventually(lambda: members(client, "run") == 2, what="two nodes wait")
    trouble(fragile)
    late = run.one()
    assert len(join_as_agents([*nodes, late], [*joins, late.join()])) == 3


def test_trouble_while_a_round_runs(make_nodes: MakeNodes, fragile: EtcdServer, trouble: Trouble) -> None:
    run = make_nodes(2, 3, on=fragile)
    nodes = run.add(3)
    join_all(nodes)
    trouble(fragile)
    assert not any(node.handler.is_closed() for node in nodes)
    nodes[0].crash()
    all_signalled(nodes[1:])
    now = [*nodes[1:], run.one()]
    seats = join_as_agents(now, [node.join() for node in now])
    assert {seat.world for seat in seats} == {3}


def test_trouble_while_a_round_forms(make_nodes: MakeNodes, fragile: EtcdServer, trouble: Trouble) -> None:
    """Each trouble comes at another moment of the joining."""
    nodes = make_nodes(4, 4, on=fragile).add(4)
    for delay in (0.0, 0.005, 0.02):
        joins = [node.join() for node in nodes]
        threading.Event().wait(delay)
        trouble(fragile)
        assert len(join_as_agents(nodes, joins)) == 4


# -- deciders that die or stall ---------------------------------------------------------------------------------------


def test_a_decider_that_is_killed_while_forming(etcd: EtcdServer, client: EtcdClient) -> None:
    started = [NodeProcess(etcd.get_endpoint(), "dead-decider", (3, 3)) for _ in range(4)]
    with processes(*started):
        decider, *others = started
        decider.send("join")
        eventually(lambda: members(client, "dead-decider") == 1, what="the decider waits")
        others[0].send("join")
        eventually(lambda: members(client, "dead-decider") == 2, what="another node waits")
        decider.kill()
        for node in others[1:]:
            node.send("join")
        check_round(sorted((node.seat() for node in others), key=lambda seat: seat.rank))


def test_a_decider_that_stalls_does_no_harm(etcd: EtcdServer, client: EtcdClient) -> None:
    """It wakes up with its lease lost and somebody else's round decided, and comes back as a spare."""
    started = [NodeProcess(etcd.get_endpoint(), "stalled-decider", (2, 2)) for _ in range(3)]
    with processes(*started):
        decider, *others = started
        decider.send("join")
        eventually(lambda: members(client, "stalled-decider") == 1, what="the decider waits")
        decider.pause()
        first = all_join(*others)
        decider.resume()
        eventually(lambda: members(client, "stalled-decider") == 3, what="it waits again")
        assert [node.ask("waiting") for node in others] == [0, 0]
        others[0].kill()
        eventually(lambda: others[1].ask("waiting"), what="the survivor is signalled")
        others[1].send("join")
        check_round(sorted((decider.seat(), others[1].seat()), key=lambda seat: seat.rank))
        assert first[0].round <= 2, "who waits forms round 1 with the decider, which does not take its seat"


# -- a storm ----------------------------------------------------------------------------------------------------------

LEAST, MOST, SLOTS = 2, 6, 8


class Storm:
    """Agents that join, run for a while, then fail, leave, crash or go on, all at random; and what they were told."""

    def __init__(self, run: Nodes, seed: int) -> None:
        self._run, self._seed = run, seed
        self.calm = threading.Event()
        self.over = threading.Event()
        self.told: list[list[Seat]] = []
        self.current: dict[int, Node | None] = {}

    def agent(self, slot: int) -> None:
        dice = random.Random(self._seed * 100 + slot)
        while not self.over.is_set():
            try:
                node = self._run.one()
            except RendezvousConnectionError:  # etcd is away: whoever started this agent starts it again
                continue
            try:
                self._incarnation(node, slot, dice)
            except (RendezvousClosedError, SystemExit):
                assert self.over.is_set()

    def _incarnation(self, node: Node, slot: int, dice: random.Random) -> None:
        self.told.append([])
        mine = self.told[-1]
        while True:
            self.current[slot] = None
            mine.append(node._join())
            self.current[slot] = node
            self._work(node, dice.uniform(0, 1.5))
            if self.over.is_set():
                node.fail()
                return
            fate = (
                "go on" if self.calm.is_set() or node.signalled() else dice.choice(["fail", "leave", "crash", "go on"])
            )
            if fate == "leave":
                node.fail()
                return
            if fate == "crash":
                node.crash()
                return

    def _work(self, node: Node, seconds: float) -> None:
        """Until something happens: in calm times, only until the node is called back."""
        end = time.monotonic() + seconds
        while not (node.signalled() or self.over.is_set() or (not self.calm.is_set() and time.monotonic() > end)):
            self.over.wait(0.02)

    def settled(self) -> bool:
        """Whether the last round is full and undisturbed, and the others wait as spares."""
        running = [node for node in self.current.values() if node is not None]
        rounds = {node.handler._node.round.number for node in running if node.handler._node.round}
        return len(running) == MOST and len(rounds) == 1 and not any(node.signalled() for node in running)

    def rounds(self) -> int:
        """How many there have been."""
        return len({seat.round for seats in [*self.told] for seat in [*seats]})

    def check(self) -> None:
        """Invariants S1 and S2 over all that the nodes were told."""
        by_round: dict[int, list[Seat]] = defaultdict(list)
        for seats in self.told:
            numbers = [seat.round for seat in seats]
            assert numbers == sorted(set(numbers)), "a node's rounds only grow"
            for seat in seats:
                by_round[seat.round].append(seat)
        for seats in by_round.values():
            assert len({(seat.world, seat.address, seat.port) for seat in seats}) == 1
            assert len({seat.rank for seat in seats}) == len(seats)
            assert all(0 <= seat.rank < seat.world and LEAST <= seat.world <= MOST for seat in seats)


def nothing(_: EtcdServer) -> None:
    """Only the nodes fail."""


@pytest.mark.parametrize("troubles", [[nothing] * 3, [kill, pause, compact]], ids=["nodes", "nodes and etcd"])
def test_storm(
    make_nodes: MakeNodes, fragile: EtcdServer, troubles: list[Trouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    run = make_nodes(LEAST, MOST, on=fragile, last_call_timeout=0.5, settle_timeout=0.1)
    storm = Storm(run, seed=2024)
    agents = [spawn(partial(storm.agent, slot)) for slot in range(SLOTS)]
    for trouble in troubles * 2:
        before = storm.rounds()
        trouble(fragile)
        eventually(lambda before=before: storm.rounds() > before, what="rounds go on")
    storm.calm.set()
    eventually(storm.settled, what="the storm has settled")
    storm.over.set()
    run.one().handler.set_closed()
    for agent in agents:
        agent.result(DEADLINE)
    storm.check()
