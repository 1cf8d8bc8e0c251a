"""Replica groups whose ranks are in several processes, which die, stop and come back, as etcd does."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import pytest
from helpers import DEADLINE, eventually, own_port
from rdzv_nodes import spawn
from replicas import ReplicaProcess, replica_processes

from ftcoord.coordination import LighthouseClient, ManagerClient, ManagerServer, manager
from ftcoord.coordination.address import parse_address
from ftcoord.coordination.ranks import RankGroup
from ftcoord.core.layout import kill_key, member_of, members_span
from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.api import Get

LONG = timedelta(seconds=DEADLINE)
SHORT = timedelta(seconds=0.5)
WAIT = threading.Event().wait
"""For the passing of time itself, never for a condition."""
GONE = r'status: Unknown, message: "transport error"'


class Group:
    """A replica group: its manager and rank 0 in the process `zero`, rank 1 in `one`."""

    def __init__(self, zero: ReplicaProcess, one: ReplicaProcess) -> None:
        self.zero, self.one = zero, one
        self.bind = f"[::]:{own_port()}"
        self.address = zero.manage("a", world_size=2, bind=self.bind)

    def train(self, step: int) -> int:
        """One step of all ranks; its quorum's id."""
        asked = [rank.quorum(self.address, number, step=step) for number, rank in enumerate((self.zero, self.one))]
        told = [future.result(DEADLINE) for future in asked]
        assert told[0] == told[1]
        assert told[0][1] == ["a"]
        votes = [rank.commit(self.address, number, step) for number, rank in enumerate((self.zero, self.one))]
        assert [vote.result(DEADLINE) for vote in votes] == [True, True]
        return told[0][0]

    def await_quorum_call(self) -> None:
        """Until rank 1 waits for rank 0."""
        eventually(lambda: self.zero.waiting(self.address) == 1, "rank 1 asks")


@pytest.fixture
def group(fragile: EtcdServer) -> Iterator[Group]:
    """On an etcd that the test may kill; a heartbeat time-out of 3 s."""
    job = f"etcd://{fragile.get_endpoint()}/ranks?min_replicas=1&heartbeat_timeout_ms=3000"
    with replica_processes(job, 2) as (zero, one):
        yield Group(zero, one)


class Here:
    """A manager in the test's own process, and rank 1 of its group in another one."""

    def __init__(self, job: str, one: ReplicaProcess) -> None:
        self.server = ManagerServer("a", job, "localhost", "[::]:0", "store", 2, timedelta(seconds=1), LONG, 0)
        self.one, self.address = one, self.server.address()
        self.zero = ManagerClient(self.address, LONG)
        ranks = RankGroup.at(self.address.partition("#")[0])
        assert ranks is not None
        self._ranks = ranks

    def await_votes(self, count: int) -> None:
        """Until so many ranks wait for the others' votes."""
        eventually(lambda: len(self._ranks._votes._waiting) == count, f"{count} ranks have voted")

    def await_requests(self, count: int) -> None:
        """Until so many calls, also of one rank, wait for other ranks that are to ask too."""
        eventually(lambda: len(self._ranks._requests._waiting) == count, f"{count} calls wait")


@pytest.fixture
def here(etcd: EtcdServer, prefix: str) -> Iterator[Here]:
    job = f"etcd://{etcd.get_endpoint()}{prefix}?min_replicas=1&heartbeat_timeout_ms=600000"
    with replica_processes(job, 1) as (one,):
        made = Here(job, one)
        try:
            yield made
        finally:
            made.server.shutdown()


def test_ranks_train_and_vote(group: Group) -> None:
    assert [group.train(step) for step in range(5)] == [1] * 5
    assert [group.one.metadata(group.address, rank) for rank in (0, 1)] == ["weights 0", "weights 1"]
    votes = [group.zero.commit(group.address, 0, 5), group.one.commit(group.address, 1, 5, yes=False)]
    assert [vote.result(DEADLINE) for vote in votes] == [False, False]


# -- kills ----------------------------------------------------------------------------------------------------------


def test_a_kill_ends_the_manager_that_it_was_meant_for(etcd: EtcdServer, prefix: str) -> None:
    """Not its successor of the same name, though the order is still there."""
    job = f"etcd://{etcd.get_endpoint()}{prefix}?min_replicas=1&heartbeat_timeout_ms=600000"
    keys = parse_address(job).prefix
    lighthouse = LighthouseClient(job, LONG)
    with etcd.get_client() as client, replica_processes(job, 2) as (first, second):
        with pytest.raises(RuntimeError, match=r"status: NotFound, message.*replica a"):
            lighthouse.kill("a", "nobody is there", LONG)
        first.manage("a")
        (member,) = [member_of(kv.key) for kv in client.range(Get(members_span(keys))).kvs]
        lighthouse.kill("a", "now", LONG)
        assert first.code() == 1
        client.put(kill_key(keys, member), b"once more")
        address = second.manage("a")
        assert second.quorum(address).result(DEADLINE)[1] == ["a"]
        client.put(kill_key(keys, "another"), b"")  # what it hears after the one above
        assert second.quorum(address, step=1).result(DEADLINE)[1] == ["a"]
        lighthouse.kill("a", "now", LONG)
        assert second.code() == 1
    lighthouse.close()


def test_a_manager_under_a_new_lease_takes_its_kill(etcd: EtcdServer, prefix: str) -> None:
    job = f"etcd://{etcd.get_endpoint()}{prefix}?min_replicas=1&heartbeat_timeout_ms=600000"
    keys = parse_address(job).prefix
    lighthouse = LighthouseClient(job, LONG)
    with etcd.get_client() as client, replica_processes(job, 1) as (zero,):
        zero.manage("a")
        (before,) = client.range(Get(members_span(keys))).kvs
        client.revoke(before.lease)
        eventually(lambda: [kv for kv in client.range(Get(members_span(keys))).kvs if kv.key != before.key], "is back")
        lighthouse.kill("a", "now", LONG)
        assert zero.code() == 1
    lighthouse.close()


def test_nobody_obeys_a_kill_for_one_that_is_no_manager(etcd: EtcdServer, prefix: str) -> None:
    job = f"etcd://{etcd.get_endpoint()}{prefix}?min_replicas=1&heartbeat_timeout_ms=600000"
    lighthouse = LighthouseClient(job, LONG)
    lighthouse.heartbeat("a")
    with pytest.raises(TimeoutError, match="still a member"):
        lighthouse.kill("a", "now", timedelta(seconds=3))  # and not for want of time to order it
    lighthouse.close()


@pytest.mark.parametrize("in_its_process", [False, True])
def test_the_port_takes_no_kill_unless_that_is_switched_on(etcd: EtcdServer, prefix: str, in_its_process: bool) -> None:
    job = f"etcd://{etcd.get_endpoint()}{prefix}?min_replicas=1"
    server = ManagerServer("a", job, "localhost", "[::]:0", "store", 1, timedelta(seconds=1), LONG, 0)
    with replica_processes(f"{job}&allow_kill=1", 1) as (zero,):
        if in_its_process:
            with pytest.raises(RuntimeError, match=r"PermissionDenied.*allow_kill=1.*LighthouseClient.kill"):
                ManagerClient(server.address(), LONG).kill("no")
        else:
            ManagerClient(zero.manage("b"), LONG).kill("yes", LONG)
            assert zero.code() == 1
    server.shutdown()


# -- ranks and managers that die, stop or give up ---------------------------------------------------------------------


def test_a_vote_that_was_taken_back_does_not_count_for_a_manager_that_was_busy(group: Group) -> None:
    """It reads both when it goes on: the vote, and that it was taken back."""
    group.train(0)
    group.zero.stop()
    with pytest.raises(TimeoutError):
        group.one.commit(group.address, 1, 1, timeout=1).result(DEADLINE)
    vote = group.zero.commit(group.address, 0, 1, timeout=2)
    group.zero.resume()
    with pytest.raises(TimeoutError):
        vote.result(DEADLINE)


def test_what_a_rank_asked_before_it_was_killed_does_not_count(here: Here) -> None:
    here.one.quorum(here.address, 1)
    here.await_requests(1)
    here.one.kill()
    here.await_requests(0)
    with pytest.raises(TimeoutError):
        here.zero._quorum(0, 0, "", False, True, 0, SHORT)


def test_what_a_rank_voted_before_it_was_killed_does_not_count(here: Here) -> None:
    here.one.commit(here.address, 1, 0)
    here.await_votes(1)
    here.one.kill()
    here.await_votes(0)
    with pytest.raises(TimeoutError):
        here.zero.should_commit(0, 0, True, SHORT)


def test_metadata_counts_once_a_quorum_has_answered_it(here: Here) -> None:
    """Peers load what it names: nobody may name it who takes no part."""
    asked = here.one.quorum(here.address, 1)
    here.await_requests(1)
    with pytest.raises(RuntimeError, match="rank not found"):
        here.zero._checkpoint_metadata(1, LONG)
    here.zero._quorum(0, 0, "weights 0", False, True, 0, LONG)
    assert here.zero._checkpoint_metadata(1, LONG) == "weights 1"
    asked.result(DEADLINE)
    with pytest.raises(TimeoutError):
        here.zero._quorum(1, 0, "forged", False, True, 0, SHORT)
    assert here.zero._checkpoint_metadata(1, LONG) == "weights 1"


@pytest.mark.parametrize("call", ["quorum", "commit"])
def test_a_manager_that_is_shut_down_ends_the_calls_of_its_ranks(here: Here, call: str) -> None:
    if call == "quorum":
        waiting = [here.one.quorum(here.address, 1), here.one.quorum(here.address, 1)]
        here.await_requests(2)
    else:
        mine = spawn(partial(here.zero.should_commit, 1, 0, True, LONG))
        waiting = [mine, here.one.commit(here.address, 1, 0)]  # type: ignore[list-item]
        here.await_votes(2)
    here.server.shutdown()
    for one in waiting:
        with pytest.raises(RuntimeError, match=r"status: Unavailable, message.*was shut down|transport error"):
            one.result(DEADLINE)
    with pytest.raises(RuntimeError, match=r"status: Unavailable, message.*tcp connect error"):
        here.one.commit(here.address, 1, 0).result(DEADLINE)


def test_what_the_manager_before_was_told_does_not_count(group: Group) -> None:
    """The rank that waits hears that it died, at once. The next one has the same port, and another token."""
    job, first = group.zero.job, group.zero
    assert group.train(0) == 1
    with replica_processes(job, 1) as (group.zero,):
        first.kill()
        group.address = group.zero.manage("a", world_size=2, bind=group.bind)
        with pytest.raises(TimeoutError):
            group.zero.commit(group.address, 0, 0, timeout=3).result(DEADLINE)
        assert group.train(0) == 1
        waiting, second = group.one.commit(group.address, 1, 1), group.zero
        with replica_processes(job, 1) as (group.zero,):
            second.kill()
            with pytest.raises(RuntimeError, match=f"{GONE}|Unavailable"):
                waiting.result(DEADLINE)
            group.address = group.zero.manage("a", world_size=2, bind=group.bind)
            votes = [group.one.commit(group.address, 1, 1), group.zero.commit(group.address, 0, 1)]
            assert [vote.result(DEADLINE) for vote in votes] == [True, True]


def test_a_manager_is_looked_for_until_it_is_there(
    etcd: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = f"etcd://{etcd.get_endpoint()}{prefix}?min_replicas=1"
    port, token = own_port(), "0123456789abcdef" * 2
    monkeypatch.setattr(manager, "token_hex", lambda _size: token)
    looking = spawn(partial(ManagerClient, f"http://localhost:{port}#{token}", LONG))
    server = ManagerServer("a", job, "localhost", f"[::]:{port}", "store", 1, timedelta(seconds=1), LONG, 0)
    assert looking.result(DEADLINE)._quorum(0, 0, "", False, True, 0, LONG).replica_ids == ["a"]
    server.shutdown()


def test_a_failed_call_of_the_group_reaches_all_ranks_at_once(etcd: EtcdServer, prefix: str) -> None:
    job = f"etcd://{etcd.get_endpoint()}{prefix}?min_replicas=2"
    with replica_processes(job, 2) as (zero, one):
        group = Group(zero, one)
        early = one.quorum(group.address, 1, timeout=DEADLINE * 10)
        group.await_quorum_call()
        late = zero.quorum(group.address, 0, timeout=1)  # the last rank's time-out counts for the group
        for future in (late, early):
            with pytest.raises(TimeoutError, match=r"status: Cancelled, message.*Timeout expired"):
                future.result(DEADLINE)


def test_a_rank_that_dies_while_it_asks_may_be_replaced(group: Group) -> None:
    group.one.quorum(group.address, 1)
    group.await_quorum_call()
    group.one.kill()
    with replica_processes(group.zero.job, 1) as (group.one,):
        assert group.train(1) == 1


def test_a_rank_whose_time_is_over_is_forgotten(group: Group) -> None:
    with pytest.raises(TimeoutError):
        group.one.quorum(group.address, 1, timeout=0.5).result(DEADLINE)
    with pytest.raises(TimeoutError):
        group.one.commit(group.address, 1, 0, timeout=0.5).result(DEADLINE)
    with pytest.raises(TimeoutError):
        group.zero.quorum(group.address, 0, timeout=0.5).result(DEADLINE)
    assert group.train(1) == 1


def test_ranks_learn_at_once_that_their_manager_died(group: Group) -> None:
    waiting = group.one.quorum(group.address, 1, timeout=DEADLINE * 10)
    group.await_quorum_call()
    group.zero.kill()
    with pytest.raises(RuntimeError, match=GONE):
        waiting.result(DEADLINE)
    with pytest.raises(RuntimeError, match=r"status: Unavailable, message.*tcp connect error"):
        group.one.commit(group.address, 1, 0).result(DEADLINE)


def test_a_manager_that_was_stopped_for_longer_than_its_lease_comes_back(group: Group) -> None:
    group.train(0)
    group.zero.stop()
    WAIT(6)
    group.zero.resume()
    assert group.train(1) == 1


# -- etcd -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outage", [0, 7])
def test_etcd_is_killed_while_ranks_call(group: Group, fragile: EtcdServer, outage: float) -> None:
    """Votes do not need it."""
    group.train(0)
    vote = group.one.commit(group.address, 1, 0)
    fragile.kill()
    asked = [group.zero.commit(group.address, 0, 0), vote]
    assert [future.result(DEADLINE) for future in asked] == [True, True]
    quorums = [rank.quorum(group.address, number, step=1) for number, rank in enumerate((group.zero, group.one))]
    WAIT(outage)
    fragile.restart()
    assert [future.result(DEADLINE) for future in quorums] == [(1, ["a"])] * 2
    assert group.train(2) == 1


def test_a_quorum_that_is_asked_for_while_etcd_is_away_times_out(group: Group, fragile: EtcdServer) -> None:
    group.train(0)
    fragile.kill()
    asked = [rank.quorum(group.address, number, timeout=1) for number, rank in enumerate((group.zero, group.one))]
    for one in asked:
        with pytest.raises(TimeoutError, match=r"status: Cancelled, message.*Timeout expired"):
            one.result(DEADLINE)
    fragile.restart()
    assert group.train(1) == 1


# -- one that is dropped ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_a_manager_that_nobody_holds_leaves_at_once(etcd: EtcdServer, prefix: str, in_a_cycle: bool) -> None:
    """Its threads, its port, its lease and its key are gone."""
    job = f"etcd://{etcd.get_endpoint()}{prefix}?min_replicas=1&heartbeat_timeout_ms=600000"
    before = {thread.name for thread in threading.enumerate()}

    def use() -> str:
        holder: dict[str, object] = {}
        server = ManagerServer("a", job, "localhost", "[::]:0", "store", 1, timedelta(seconds=1), LONG, 0)
        assert ManagerClient(server.address(), LONG)._quorum(0, 0, "", False, True, 0, LONG).replica_ids == ["a"]
        if in_a_cycle:
            holder |= {"server": server, "self": holder}
        return server.address()

    address = use()
    with etcd.get_client() as client:
        keys = members_span(parse_address(job).prefix)

        def is_gone() -> bool:
            gc.collect()
            return not client.range(Get(keys)).kvs

        eventually(is_gone, "its key is gone")
    with pytest.raises(RuntimeError, match=r"failed to connect to .* within timeout of"):
        ManagerClient(address, SHORT)
    mine = {"ftcoord-beats", "ftcoord-ranks", "ftcoord-kills", "ftcoord-group"}
    eventually(lambda: not mine & {thread.name for thread in threading.enumerate()} - before, "its threads end")
