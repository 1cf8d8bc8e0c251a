"""The measurement of many nodes: what it says of a few is right, so what it says of thousands may be believed."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from etcd_cluster import EtcdCluster

from benchmarks import agent_store, scale
from benchmarks.agents import AT_ONCE, Host
from benchmarks.metrics import Holdings
from ftcoord.config import EtcdConfig
from ftcoord.etcd.api import Get, RangeResult, Span
from ftcoord.etcd.client import EtcdClient, SharedClient

PATIENCE = 120.0


@pytest.mark.parametrize("members", [1, 3])
def test_rounds(members: int) -> None:
    """One process with one connection; but each node has watches and bytes of its own."""
    found = scale.measure_size(4, members, processes=1, patience=PATIENCE)
    assert not found.problem
    assert [cost.name for cost in found.rounds] == list(scale.ROUNDS)
    assert [cost.count for cost in found.rounds] == [4, 4, 3, 4]
    for cost in found.rounds:
        assert cost.phase.seconds > 0
        assert cost.load.writes >= cost.count
        assert cost.load.events >= cost.count  # each hears of its round
        assert cost.load.bytes_out >= cost.count * found.head
    assert found.held is not None
    assert found.held.streams == 1
    assert 0 < found.head <= found.record
    section = scale.rounds_section([found], members, 1, PATIENCE)
    assert all(f"| 4 | {name} |" in section or f"| 3 | {name} |" in section for name in scale.ROUNDS)


def test_what_does_not_come_about_is_told() -> None:
    """Nobody makes a handler in no time."""
    found = scale.measure_size(2, 1, processes=1, patience=0.001)
    assert "did not answer within 0.001 s" in found.problem
    assert found.rounds == ()
    assert f"- N = 2: {found.problem}." in scale.rounds_section([found], 1, 1, 0.001)


def test_the_store_of_a_round() -> None:
    found = agent_store.measure(agent_store.ROUND, 3, 1, 2, PATIENCE, 1)
    assert list(found) == list(agent_store.STEPS)
    for use in found.values():
        assert use.seconds > 0
        assert use.load.writes >= 2 * 3  # each agent writes once each time


def test_of_the_hosts_in_a_process_a_few_send_requests_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for its turn, and all have one."""
    under_way, most, done, lock, all_there = 0, 0, 0, threading.Lock(), threading.Event()

    def answer(*_: object, **__: object) -> RangeResult:
        nonlocal under_way, most, done
        with lock:
            under_way += 1
            most = max(most, under_way)
            if under_way >= AT_ONCE:
                all_there.set()
        assert all_there.wait(PATIENCE)
        with lock:
            under_way -= 1
            done += 1
        return RangeResult((), 0, 1)

    monkeypatch.setattr(SharedClient, "range", answer)
    count = 3 * AT_ONCE
    with contextlib.ExitStack() as ends, ThreadPoolExecutor(count) as pool:
        hosts = [ends.enter_context(Host(EtcdConfig.load("127.0.0.1:1"))) for _ in range(count)]
        list(pool.map(lambda host: host.range(Get(Span("a"))), hosts))
    assert (most, done) == (AT_ONCE, count)


def test_what_etcd_holds() -> None:
    with EtcdCluster(1) as cluster, EtcdClient(cluster.endpoints) as client:
        client.grant(60)
        held = Holdings.read(cluster.endpoints)
        assert (held.leases, held.watches, held.streams) == (1, 0, 0)
        assert min(held.memory, held.database) > 0
