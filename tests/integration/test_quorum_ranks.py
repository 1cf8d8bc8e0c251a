"""Replica groups of two ranks in two processes: the ranks reach their manager through etcd, which may go away."""

from __future__ import annotations

import contextlib
import gc
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial

import pytest
from helpers import DEADLINE, eventually
from late import Late
from rdzv_nodes import spawn
from replicas import ReplicaProcess, replica_processes

from ftcoord.config import EtcdConfig
from ftcoord.coordination import ManagerClient, ManagerServer
from ftcoord.coordination.address import parse_address
from ftcoord.core.layout import mailbox_prefix
from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd import shared
from ftcoord.etcd.api import Batch, Get, Span, WatchItem

LONG = timedelta(seconds=DEADLINE)
WAIT = threading.Event().wait
"""For the passing of time itself, never for a condition."""


class Group:
    """A replica group: its manager and rank 0 in the process `zero`, rank 1 in `one`."""

    def __init__(self, server: EtcdServer, job: str, zero: ReplicaProcess, one: ReplicaProcess) -> None:
        self.zero, self.one, self._server = zero, one, server
        self.address = zero.manage("a", world_size=2)
        address = parse_address(self.address)
        self._prefix = mailbox_prefix(address.prefix, address.manager)

    def train(self, step: int) -> int:
        """One step of all ranks; its quorum's id."""
        asked = [rank.quorum(self.address, number, step=step) for number, rank in enumerate((self.zero, self.one))]
        told = [future.result(DEADLINE) for future in asked]
        assert told[0] == told[1]
        assert told[0][1] == ["a"]
        votes = [rank.commit(self.address, number, step) for number, rank in enumerate((self.zero, self.one))]
        assert [vote.result(DEADLINE) for vote in votes] == [True, True]
        return told[0][0]

    def await_call(self, channel: str, there: bool = True) -> None:
        """Until a rank has called its manager through etcd; or until its call is gone."""
        key = Get(Span(f"{self._prefix}/in/{channel}"))
        with self._server.get_client() as client:
            eventually(lambda: bool(client.range(key).kvs) is there, f"call on {channel}: {there}")


@pytest.fixture
def group(fragile: EtcdServer) -> Iterator[Group]:
    """On an etcd that the test may kill; a heartbeat time-out of 3 s."""
    job = f"etcd://{fragile.get_endpoint()}/ranks?min_replicas=1&heartbeat_timeout_ms=3000"
    with replica_processes(job, 2) as (zero, one):
        yield Group(fragile, job, zero, one)


def test_ranks_train_and_vote(group: Group) -> None:
    assert [group.train(step) for step in range(5)] == [1] * 5
    assert [group.one.metadata(group.address, rank) for rank in (0, 1)] == ["weights 0", "weights 1"]
    votes = [group.zero.commit(group.address, 0, 5), group.one.commit(group.address, 1, 5, yes=False)]
    assert [vote.result(DEADLINE) for vote in votes] == [False, False]


def test_a_kill_ends_the_manager_that_it_was_meant_for(fragile: EtcdServer) -> None:
    """Its successor of the same name finds the call in etcd, and lives; a call of its own ends it."""
    job = f"etcd://{fragile.get_endpoint()}/ranks?min_replicas=1"
    prefix = mailbox_prefix(parse_address(job).prefix, "a")
    with fragile.get_client() as client, replica_processes(job, 2) as (zero, one):
        client.put(f"{prefix}/in/kill-0", json.dumps({"id": "1", "timeout": DEADLINE, "message": "before"}).encode())
        group = Group(fragile, job, zero, one)
        assert group.train(0) == 1
        ManagerClient(group.address, LONG).kill("now", LONG)
        assert zero.code() == 1


def is_call(item: WatchItem) -> bool:
    """Whether a watch tells with this of a rank's call, or of its end."""
    return isinstance(item, Batch) and any("/in/" in event.kv.key for event in item.events)


@pytest.mark.xfail(
    strict=True, reason="votes go through etcd until issue 15: they and their withdrawal may arrive late"
)
def test_a_vote_that_was_taken_back_does_not_count_for_a_manager_that_was_busy(
    fragile: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = f"etcd://{fragile.get_endpoint()}/ranks?min_replicas=1&heartbeat_timeout_ms=600000"
    made: list[Late] = []

    def late_client(config: EtcdConfig) -> Late:
        made.append(Late(config))
        return made[-1]

    monkeypatch.setattr(shared, "EtcdClient", late_client)
    second = timedelta(seconds=1)
    with ExitStack() as stack:
        server = ManagerServer("a", job, "", "", "store", 2, second, LONG, 0)
        stack.callback(server.shutdown)
        (one,) = stack.enter_context(replica_processes(job, 1))
        (late,) = made
        zero = ManagerClient(server.address(), LONG)
        before = one.commit(server.address(), 1, 0)
        zero.should_commit(0, 0, True, LONG)
        before.result(DEADLINE)  # so the manager listens
        late.hold()
        with pytest.raises(TimeoutError):
            one.commit(server.address(), 1, 1, timeout=1).result(DEADLINE)
        assert late.await_held(is_call, 2, DEADLINE)  # the vote, and that it was taken back
        vote = spawn(partial(zero.should_commit, 0, 1, True, 5 * second))
        late.release_first(is_call)
        with contextlib.suppress(TimeoutError):
            assert not vote.result(DEADLINE)
        late.release()


def test_who_kills_a_manager_hears_of_it_before_its_lease_ends(fragile: EtcdServer) -> None:
    job = f"etcd://{fragile.get_endpoint()}/ranks?min_replicas=1&heartbeat_timeout_ms=600000"
    with replica_processes(job, 1) as (zero,):
        ManagerClient(zero.manage("a"), LONG).kill("now", LONG)
        assert zero.code() == 1


def test_what_the_manager_before_was_told_does_not_count(group: Group) -> None:
    """A vote that was answered, one that was not, and a kill: all of them were for the one that died."""
    job = group.address.partition("&manager")[0]
    assert group.train(0) == 1
    first = group.zero
    with replica_processes(job, 1) as (group.zero,):
        first.kill()
        assert group.zero.manage("a", world_size=2) == group.address
        with pytest.raises(TimeoutError):
            group.zero.commit(group.address, 0, 0, timeout=3).result(DEADLINE)
        assert group.train(0) == 1
        waiting = group.one.commit(group.address, 1, 1)
        group.await_call("commit-1")
        second = group.zero
        with replica_processes(job, 1) as (group.zero,):
            second.kill()
            assert group.zero.manage("a", world_size=2) == group.address
            votes = [waiting, group.zero.commit(group.address, 0, 1)]
            assert [vote.result(DEADLINE) for vote in votes] == [True, True]


def test_a_manager_is_looked_for_through_an_outage(fragile: EtcdServer) -> None:
    job = f"etcd://{fragile.get_endpoint()}/ranks?min_replicas=1&heartbeat_timeout_ms=3000"
    with replica_processes(job, 1) as (zero,):
        looking = spawn(partial(ManagerClient, f"{job}&manager=a", LONG))
        WAIT(1)
        fragile.kill()
        WAIT(8)
        fragile.restart()
        zero.manage("a")
        result = looking.result(DEADLINE)._quorum(0, 0, "", False, True, 0, LONG)
        assert result.replica_ids == ["a"]


def test_a_failed_call_of_the_group_reaches_all_ranks_at_once(fragile: EtcdServer) -> None:
    job = f"etcd://{fragile.get_endpoint()}/ranks?min_replicas=2"
    with replica_processes(job, 2) as (zero, one):
        group = Group(fragile, job, zero, one)
        early = one.quorum(group.address, 1, timeout=DEADLINE * 10)
        group.await_call("quorum-1")
        late = zero.quorum(group.address, 0, timeout=1)  # the last rank's time-out counts for the group
        for future in (late, early):
            with pytest.raises(TimeoutError, match=r"status: Cancelled, message.*Timeout expired"):
                future.result(DEADLINE)


def test_a_rank_that_dies_while_it_asks_is_forgotten(group: Group) -> None:
    group.one.quorum(group.address, 1)
    group.await_call("quorum-1")
    group.one.kill()
    group.await_call("quorum-1", there=False)
    with replica_processes(group.address.partition("&manager")[0], 1) as (group.one,):
        assert group.train(1) == 1


def test_a_rank_whose_time_is_over_is_forgotten(group: Group) -> None:
    with pytest.raises(TimeoutError):
        group.one.quorum(group.address, 1, timeout=0.5).result(DEADLINE)
    with pytest.raises(TimeoutError):
        group.one.commit(group.address, 1, 0, timeout=0.5).result(DEADLINE)
    with pytest.raises(TimeoutError):
        group.zero.quorum(group.address, 0, timeout=0.5).result(DEADLINE)
    assert group.train(1) == 1


def test_ranks_learn_that_their_manager_died(group: Group) -> None:
    group.train(0)
    waiting = group.one.quorum(group.address, 1, timeout=DEADLINE * 10)
    group.await_call("quorum-1")
    group.zero.kill()
    with pytest.raises(RuntimeError, match=r"status: Unavailable, message.*is gone"):
        waiting.result(DEADLINE)


@pytest.mark.parametrize("outage", [0, 3, 12])
def test_etcd_is_killed_while_ranks_call(group: Group, fragile: EtcdServer, outage: float) -> None:
    group.train(0)
    vote = group.one.commit(group.address, 1, 0)
    group.await_call("commit-1")
    fragile.kill()
    asked = [group.zero.commit(group.address, 0, 0), vote]
    WAIT(outage)
    fragile.restart()
    assert [future.result(DEADLINE) for future in asked] == [True, True]
    fragile.kill()
    asked = [rank.quorum(group.address, number, step=1) for number, rank in enumerate((group.zero, group.one))]
    WAIT(outage)
    fragile.restart()
    assert [future.result(DEADLINE) for future in asked] == [(1, ["a"])] * 2
    assert group.train(2) == 1


def test_a_first_call_while_etcd_is_away(group: Group, fragile: EtcdServer) -> None:
    client = ManagerClient(group.address, LONG)
    fragile.kill()
    with pytest.raises(TimeoutError, match=r"status: Cancelled, message.*Timeout expired"):
        client.should_commit(1, 0, True, timedelta(seconds=1))
    with pytest.raises(TimeoutError, match=r"status: Cancelled, message.*Timeout expired"):
        client._quorum(1, 0, "", False, True, 0, timedelta(seconds=1))
    votes = [spawn(partial(client.should_commit, 1, 0, True, LONG)), group.zero.commit(group.address, 0, 0)]
    WAIT(1)
    fragile.restart()
    assert [vote.result(DEADLINE) for vote in votes] == [True, True]
    del client, votes
    gc.collect()  # it renews its lease no more, which is checked after every test


def test_a_manager_that_was_stopped_for_longer_than_its_lease_comes_back(group: Group) -> None:
    group.train(0)
    group.zero.stop()
    WAIT(6)
    group.zero.resume()
    ManagerClient(group.address, LONG)  # waits until the manager is there
    assert group.train(1) == 1
