"""The handler when leases end, etcd is away, processes are killed and clocks differ; and what a run leaves behind."""

from __future__ import annotations

import threading
import time

import pytest
from helpers import DEADLINE, eventually
from rdzv_nodes import (
    MakeNodes,
    NodeProcess,
    all_join,
    all_signalled,
    decider_first,
    join_all,
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
