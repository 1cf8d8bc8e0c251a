"""Rounds while etcd is killed, paused and compacted, and while the decider dies or stalls."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from helpers import eventually
from rdzv_nodes import MakeNodes, all_signalled, join_all, join_as_agents, keys_under

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
