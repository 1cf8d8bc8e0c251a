"""The handler when leases end, etcd is away, processes are killed and clocks differ; and what a run leaves behind."""

from __future__ import annotations

import threading
import time

import pytest
from helpers import DEADLINE, eventually
from rdzv_nodes import (
    MakeNodes,
    Node,
    NodeProcess,
    all_join,
    all_signalled,
    decider_first,
    join_all,
    join_as_agents,
    keys_under,
    processes,
    waits,
)
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.client import EtcdClient

LONG_TTL = 600
"""Seconds; a lease that outlives the test, so that only giving it up can end it."""


# -- leases -----------------------------------------------------------------------------------------------------------


def test_member_loss_can_be_left_to_the_workers(make_nodes: MakeNodes, client: EtcdClient) -> None:
    nodes = make_nodes(1, 3, on_member_loss="ignore").add(3)
    join_all(nodes)
    lost = nodes[1].lease()
    nodes[1].crash()
    key = f"/ftcoord/v2/{nodes[0].handler.get_run_id()}/members/{lost:016x}"
    eventually(lambda: client.get(key).one is None, what="the lease ends")
    threading.Event().wait(1)
    assert not nodes[0].signalled()
    assert not nodes[2].signalled()
    back = nodes[0].join()  # its workers crashed
    all_signalled(nodes[2:])
    assert nodes[2].join().result(DEADLINE).world == back.result(DEADLINE).world == 2


def test_a_node_that_lost_its_lease_comes_back(make_nodes: MakeNodes, client: EtcdClient) -> None:
    """It does not know that it has lost it: else it would be back in its seat before the others miss it."""
    nodes = make_nodes(3, 3, lease_ttl=LONG_TTL).add(3)
    join_all(nodes)
    nodes = decider_first(nodes)
    stores = [node.info.store for node in nodes if node.info is not None]
    stores[1].set("key", b"1")
    client.revoke(nodes[1].lease())
    assert stores[0].check(["key"])  # the others may still read it: a store lives under the run's lease
    all_signalled(nodes)
    ranks = [node.handler._node.rank for node in nodes]
    assert [seat.rank for seat in join_all(nodes)] == ranks
    assert not any(node.signalled() for node in nodes)


def test_a_lease_that_is_lost_while_waiting_is_replaced(make_nodes: MakeNodes, client: EtcdClient) -> None:
    run = make_nodes(2, 2)
    waiting = run.one()
    join = waiting.join()
    for _ in range(2):
        member = eventually(lambda: waiting.handler._node.participant.member, what="the node has a lease")
        eventually(lambda member=member: client.get(member.group.own.key).one, what="the node waits")
        client.revoke(waiting.lease())
        eventually(
            lambda member=member: waiting.handler._node.participant.member is not member,
            what="the node takes a new lease",
        )
    other = run.one()
    assert other.join().result(DEADLINE).world == join.result(DEADLINE).world == 2


# -- what others do to a run's keys -----------------------------------------------------------------------------------


def test_shutdown_ends_a_rendezvous_under_way(make_nodes: MakeNodes) -> None:
    node = make_nodes(2, 2).one()
    join = waits(node)
    node.handler.shutdown()
    with pytest.raises(RendezvousClosedError, match=r"shut down|is over"):
        join.result(DEADLINE)
    with pytest.raises(RendezvousClosedError, match="shut down"):
        node.handler.next_rendezvous()


# -- processes --------------------------------------------------------------------------------------------------------

TWO = (2, 2)


def test_wall_clocks_that_differ_and_jump_by_an_hour(etcd: EtcdServer) -> None:
    """In a round, and while one waits for the other."""
    ahead, behind = (
        NodeProcess(etcd.get_endpoint(), "clocks", (1, 2), clock_offset=offset, last_call_timeout=600)
        for offset in (1800.0, -1800.0)
    )
    with processes(ahead, behind):
        assert abs(ahead.ask("time") - behind.ask("time")) > 3000
        for number in (1, 2):
            assert {(seat.world, seat.round) for seat in all_join(ahead, behind)} == {(2, number)}
            assert ahead.ask("waiting") == behind.ask("waiting") == 0
        ahead.jump()
        eventually(lambda: behind.ask("time") > ahead.ask("time") - 10, what="the jump")
        threading.Event().wait(3)  # longer than a lease
        assert ahead.ask("waiting") == behind.ask("waiting") == 0
        ahead.send("join")
        eventually(lambda: behind.ask("waiting"), what="it waits")
        behind.jump()
        eventually(lambda: behind.ask("time") > time.time() + 1700, what="the jump")
        behind.send("join")
        assert {(seat.world, seat.round) for seat in (ahead.seat(), behind.seat())} == {(2, 3)}
        threading.Event().wait(3)
        assert ahead.ask("waiting") == behind.ask("waiting") == 0
        ahead.kill()
        eventually(lambda: behind.ask("waiting"), what="the survivor is signalled")


# -- an etcd that is away ---------------------------------------------------------------------------------------------


class AgentLoop:
    """Calls num_nodes_waiting() as often as an agent does, and notes the slowest call and all answers."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._stop = threading.Event()
        self.answers: set[int] = set()
        self.slowest = 0.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            start = time.thread_time()
            self.answers.add(self._node.handler.num_nodes_waiting())
            self.slowest = max(self.slowest, time.thread_time() - start)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize("trouble", ["kill", "pause"])
def test_an_outage_does_not_touch_running_workers(make_nodes: MakeNodes, fragile: EtcdServer, trouble: str) -> None:
    run = make_nodes(2, 3, on=fragile, last_call_timeout=0.5, lease_ttl=2)
    nodes = run.add(2)
    late = run.one()
    join_all(nodes)
    loops = [AgentLoop(node) for node in nodes]
    getattr(fragile, trouble)()
    threading.Event().wait(5)  # longer than the leases
    for loop in loops:
        loop.stop()
        assert loop.answers == {0}
        assert loop.slowest < 0.1  # of its own CPU time: it computes next to nothing and waits for nobody
    if trouble == "kill":
        fragile.restart()
    else:
        fragile.resume()
    everyone = [*nodes, late]
    assert {seat.world for seat in join_as_agents(everyone, [node.join() for node in everyone])} == {3}


# -- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run_id",
    ["a/b", "a/", "/", "..", "a b ", "l\u00e4uft \u4f60\u597d", "x" * 200, "\u4f60" * 200, "%2F", "decided", "'\"\n"],
)
def test_run_ids(make_nodes: MakeNodes, client: EtcdClient, run_id: str) -> None:
    nodes = make_nodes(2, 2, run_id=run_id, key_prefix="/ids").add(2)
    assert {seat.world for seat in join_all(nodes)} == {2}
    assert {node.handler.get_run_id() for node in nodes} == {run_id}
    for node in nodes:
        assert node.info is not None
        node.info.store.add("n", 1)
    assert nodes[0].finish()
    eventually(nodes[1].handler.is_closed, what="the run is closed")
    assert {key.split("/")[1] for key in keys_under(client, "/ids")} == {"ids"}
