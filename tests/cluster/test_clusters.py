"""What the scenarios do to a cluster is what they mean to do."""

from __future__ import annotations

import pytest
from clusters import SIZE, Cluster, client_of
from helpers import eventually
from lines import Lines
from rdzv_nodes import spawn

from ftcoord.config import EtcdConfig
from ftcoord.errors import EtcdError, OutcomeUnknown
from ftcoord.etcd.client import EtcdClient

pytestmark = pytest.mark.alone


def answers(cluster: Cluster, i: int, timeout: float = 1) -> bool:
    with client_of(cluster, i) as client:
        try:
            client.get("/", timeout=timeout)
        except EtcdError:
            return False
        return True


@pytest.mark.forms("local", "containers")
def test_kill_pause_cut_off_and_back(cluster: Cluster) -> None:
    for harm, undo in (
        (cluster.kill, cluster.restart),
        (cluster.pause, cluster.resume),
        (cluster.cut_off, cluster.heal),
    ):
        leader = cluster.leader()
        harm(leader)
        assert not answers(cluster, leader)
        others = [i for i in range(SIZE) if i != leader]
        eventually(lambda others=others: all(answers(cluster, i) for i in others), what="the others serve")
        undo(leader)
        eventually(lambda leader=leader: answers(cluster, leader), what="it serves again")


@pytest.mark.forms("local", "containers")
def test_a_wiped_cluster_is_empty_and_where_it_was(cluster: Cluster, prefix: str) -> None:
    with client_of(cluster) as client:
        client.put(prefix, b"")
    cluster.wipe()
    with client_of(cluster) as client:
        assert client.get(prefix, timeout=30).one is None


def test_a_line_that_is_held_and_released_delivers_late(cluster: Cluster, prefix: str) -> None:
    with client_of(cluster) as other, Lines(cluster.endpoints.split(",")[:1]) as line:
        with EtcdClient(EtcdConfig.load(line.endpoints)) as client:
            client.put(prefix, b"1")
            line.hold(answers=False)
            with pytest.raises(OutcomeUnknown):
                client.put(prefix, b"2", timeout=0.5)
            assert other.get(prefix).one.value == b"1"  # type: ignore[union-attr]
            line.release()
            client.put(f"{prefix}/after", b"", timeout=30)
        line.hold(requests=False)
        with EtcdClient(EtcdConfig.load(line.endpoints)) as client:
            put = spawn(lambda: client.put(prefix, b"3", timeout=30))
            line.release()
            assert put.result(30).succeeded


def test_a_line_that_loses_answers_has_done_what_was_asked(cluster: Cluster, prefix: str) -> None:
    first = cluster.endpoints.split(",")[:1]
    with client_of(cluster) as other, Lines(first) as line, EtcdClient(EtcdConfig.load(line.endpoints)) as client:
        client.put(prefix, b"1")
        line.hold(requests=False)
        put = spawn(lambda: client.put(prefix, b"2", timeout=30))
        eventually(lambda: other.get(prefix).one.value == b"2", what="it is done")  # type: ignore[union-attr]
        line.reset()
        with pytest.raises(OutcomeUnknown):
            put.result(30)
        assert client.get(prefix, timeout=30).one.value == b"2"  # type: ignore[union-attr]
