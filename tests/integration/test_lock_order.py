"""Locks are taken in the order that docs/architecture.md says, by all that a process can hold at once."""

from __future__ import annotations

import platform
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import locks
import pytest
from helpers import DEADLINE, eventually
from members import Node
from natives import Natives
from rdzv_nodes import MakeNodes, all_signalled, join_all, join_as_agents, waits

from ftcoord import concurrency
from ftcoord.coordination import Gateway
from ftcoord.coordination.address import parse_address
from ftcoord.coordination.lighthouse import LighthouseClient
from ftcoord.coordination.manager import ManagerServer
from ftcoord.coordination.manager_client import ManagerClient
from ftcoord.core.layout import members_span
from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.api import Get
from ftcoord.etcd.client import EtcdClient
from ftcoord.heartbeat import Heartbeat
from ftcoord.store import EtcdStore
from ftcoord.timer.etcd_timer import EtcdTimerClient, EtcdTimerServer

WAIT = timedelta(seconds=DEADLINE)


@pytest.fixture
def recorder() -> Iterator[locks.Recorder]:
    with locks.recorded() as recorder:
        yield recorder


@pytest.fixture
def own(etcd: EtcdServer, recorder: locks.Recorder) -> Iterator[EtcdClient]:
    """A client whose locks are recorded."""
    with EtcdClient(etcd.get_endpoint()) as client:
        yield client


def test_the_table_names_every_lock_and_no_other() -> None:
    assert locks.table().keys() == locks.in_source()


def test_the_table_has_an_order() -> None:
    names = locks.order(locks.table())
    assert set(names) >= locks.table().keys()
    assert all(names.index(held) < names.index(taken) for held, after in locks.table().items() for taken in after)


def test_what_is_not_in_the_table_is_found() -> None:
    """Also by a condition, in a wait for one, and where another thread releases."""
    recorder = locks.Recorder()
    with concurrency.use(recorder):
        first, second, third = concurrency.lock("First"), concurrency.condition("Second"), concurrency.rlock("Third")
    with first, second:
        assert not second.wait(0.01)
        with third, third:
            pass
        second.wait_for(lambda: third.acquire() and not third.release(), 0.01)
    first.acquire()
    thread = threading.Thread(target=first.release)
    thread.start()
    thread.join()
    with third:
        pass
    found = {(taken.held, taken.taken) for taken in recorder.seen}
    assert found == {("First", "Second"), ("First", "Third"), ("Second", "Third")}
    with pytest.raises(AssertionError, match="not in the table"):
        locks.check(recorder)


def test_members_of_a_group(recorder: locks.Recorder, own: EtcdClient, prefix: str) -> None:
    nodes = [Node(own, prefix) for _ in range(4)]
    for node in nodes[:2]:
        node.leave()
    left = {node.id for node in nodes[2:]}
    eventually(
        lambda: left == {one for node in nodes[2:] for roll in node.rolls[-1:] for one in roll["members"]},
        "those that are left see each other, and nobody else",
    )
    for node in nodes[2:]:
        node.ask("again")
        node.leave()
    assert {"MemberKey._writing", "WatchHub._lock", "Renewer._wake"} <= recorder.names


def test_replicas_and_their_managers(recorder: locks.Recorder, etcd: EtcdServer, prefix: str) -> None:
    job = f"etcd://{etcd.get_endpoint()}{prefix}?min_replicas=2"
    servers = [
        ManagerServer(name, job, "localhost", "[::]:0", "store:1", 2, timedelta(milliseconds=100), WAIT, 0)
        for name in ("a", "b")
    ]
    clients = [ManagerClient(server.address(), WAIT) for server in servers for _ in range(2)]
    with ThreadPoolExecutor(4) as threads:
        for step in range(3):
            asks = [
                threads.submit(one._quorum, at % 2, step, "", False, True, 0, WAIT) for at, one in enumerate(clients)
            ]
            assert len({ask.result(DEADLINE).quorum_id for ask in asks}) == 1
            votes = [threads.submit(one.should_commit, at % 2, step, True, WAIT) for at, one in enumerate(clients)]
            assert all(vote.result(DEADLINE) for vote in votes)
    for server in servers:
        server.shutdown()
    del clients
    assert {"Participant._writing", "Participant._changed", "RankBarrier._lock"} <= recorder.names


def test_direct_replicas(recorder: locks.Recorder, etcd: EtcdServer, prefix: str) -> None:
    job = f"etcd://{etcd.get_endpoint()}{prefix}?min_replicas=3"
    client = LighthouseClient(job, WAIT)
    with ThreadPoolExecutor(3) as threads:
        for step in range(3):
            asks = [threads.submit(client.quorum, name, WAIT, step=step) for name in "abc"]
            assert len({ask.result(DEADLINE).quorum_id for ask in asks}) == 1
    client.close()
    assert "LighthouseClient._lock" in recorder.names


@pytest.mark.skipif(
    sys.version_info >= (3, 14) or (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="torchft 0.2.0 has wheels for Linux on x86_64 and Python up to 3.13 only; see setup.cfg",
)
def test_a_gateway(recorder: locks.Recorder, etcd: EtcdServer, client: EtcdClient, prefix: str) -> None:
    """Its replicas ask, beat and vote through it, and one of them is killed."""
    job = f"etcd://{etcd.get_endpoint()}{prefix}?min_replicas=3"
    with Gateway(job) as gateway, Natives() as natives, Natives() as killed:
        natives.manage(gateway.address(), "a", "b")
        killed.manage(gateway.address(), "c")
        for step in range(3):
            others = [natives.do("quorum", name=name, step=step) for name in "ab"]
            (found,) = killed.ask("c", step=step)
            assert {one.result(DEADLINE)["quorum_id"] for one in others} == {found["quorum_id"]}
        killed.kill()
        members = Get(members_span(parse_address(job).prefix), keys_only=True)
        eventually(lambda: len(client.range(members).kvs) == 2, "the one that was killed is a member no longer")
    assert {"GatewaySessions._lock", "DaemonPool._lock", "Participant._writing"} <= recorder.names


def test_a_round_of_three_handlers(recorder: locks.Recorder, make_nodes: MakeNodes) -> None:
    """Then one dies, and another one comes and closes the run."""
    made = make_nodes(2, 3)
    nodes = made.add(3)
    assert {seat.world for seat in join_all(nodes)} == {3}
    nodes[0].crash()
    left = [*nodes[1:], made.one()]
    joins = [waits(left[-1])]
    all_signalled(left[:2])
    assert {seat.world for seat in join_as_agents(left, [*(node.join() for node in left[:2]), *joins])} == {3}
    assert left[0].finish()
    assert {"Node._changed", "Participant._writing", "MemberKey._writing"} <= recorder.names


def test_a_store_timers_and_heartbeats(
    recorder: locks.Recorder, own: EtcdClient, etcd: EtcdServer, prefix: str
) -> None:
    run = prefix.strip("/")
    store = EtcdStore(own, f"{prefix}/store/")
    with ThreadPoolExecutor(4) as threads:
        waiting = threads.submit(store.get, "late")
        assert [*threads.map(lambda at: store.add("count", 1), range(20))][-1] <= 20
        store.set("late", b"here")
        assert waiting.result(DEADLINE) == b"here"
    store.close()
    reaped = list[object]()
    server = EtcdTimerServer(run, etcd.get_endpoint(), reap=lambda info: bool(reaped.append(info)) or True)
    server.start()
    client = EtcdTimerClient(run, etcd.get_endpoint(), timeout=DEADLINE)
    with Heartbeat(run, "me", 10, etcd=own) as heartbeat:
        heartbeat.update({"step": 1})
        client.acquire("scope", concurrency.wall() + 0.1)
        eventually(lambda: reaped, "the timer expires")
        client.release("scope")
    client.close()
    server.stop()
    assert {"ExactlyOnceWriter._lock", "EtcdTimerClient._lock", "LeasedKey._changed"} <= recorder.names
