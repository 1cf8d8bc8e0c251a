"""Quorums of replicas that are processes of their own, on a real etcd, while they and it are killed and stopped."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from helpers import DEADLINE, eventually
from rdzv_nodes import keys_under
from replicas import ReplicaProcess, agreed, managed, replica_processes, until_it_is_in

from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.client import EtcdClient

WAIT = threading.Event().wait
"""For the passing of time itself, never for a condition."""
HOUR = 3_600_000
MakeJob = Callable[..., list[ReplicaProcess]]


def make_job_on(server: EtcdServer, prefix: str, stack: ExitStack) -> MakeJob:
    def make(processes: int, min_replicas: int = 2, join: int = HOUR, heartbeat: int = 3_000) -> list[ReplicaProcess]:
        job = (
            f"etcd://{server.get_endpoint()}/{prefix.strip('/')}?min_replicas={min_replicas}"
            f"&join_timeout_ms={join}&heartbeat_timeout_ms={heartbeat}"
        )
        return stack.enter_context(replica_processes(job, processes))

    return make


@pytest.fixture
def make_job(etcd: EtcdServer, prefix: str) -> Iterator[MakeJob]:
    """`make_job(processes, ...)`: a job of this test's own, and processes for it."""
    with ExitStack() as stack:
        yield make_job_on(etcd, prefix, stack)


@pytest.fixture
def make_fragile_job(fragile: EtcdServer, prefix: str) -> Iterator[MakeJob]:
    """The same, on an etcd that the test may kill."""
    with ExitStack() as stack:
        yield make_job_on(fragile, prefix, stack)


# -- replicas that die ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 2], ids=["decider", "youngest"])
def test_a_replica_that_is_killed_is_not_in_the_next_quorum(make_job: MakeJob, victim: int) -> None:
    processes = make_job(3)
    pairs = managed(processes)
    assert agreed([process.quorum(at) for process, at in pairs]) == (1, ["a", "b", "c"])
    killed, _ = pairs.pop(victim)
    waiting = [process.quorum(at, step=1) for process, at in pairs]
    killed.kill()
    names = [name for number, name in enumerate("abc") if number != victim]
    assert agreed(waiting) == (2, names)
    assert agreed([process.quorum(at, step=2) for process, at in pairs]) == (2, names)


def test_the_decider_is_killed_while_all_ask(make_job: MakeJob) -> None:
    """It asks, too: its request must not be answered when it is dead, but for the moment that its lease lasts."""
    processes = make_job(4, min_replicas=3)
    pairs = managed(processes)
    agreed([process.quorum(at) for process, at in pairs])
    _, *waiting = [process.quorum(at, step=1) for process, at in pairs[:3]]
    processes[0].kill()
    waiting.append(pairs[3][0].quorum(pairs[3][1], step=1))
    assert agreed(waiting) in [(1, ["a", "b", "c", "d"]), (2, ["b", "c", "d"])]
    last = agreed([process.quorum(at, step=2) for process, at in pairs[1:]])
    assert last == (2, ["b", "c", "d"])


# -- replicas whose sentinels bury them: no heartbeat times out in these tests ----------------------------------


@pytest.mark.parametrize("asks", [False, True], ids=["between steps", "asks too"])
@pytest.mark.parametrize("victim", [0, 2], ids=["decider", "youngest"])
def test_the_dead_are_out_of_the_next_quorum_though_no_heartbeat_times_out(
    make_job: MakeJob, victim: int, asks: bool
) -> None:
    """The others wait in a quorum that cannot be decided while the dead one counts as alive."""
    processes = make_job(4, min_replicas=3, heartbeat=HOUR)
    pairs = managed(processes)
    assert agreed([process.quorum(at) for process, at in pairs]) == (1, ["a", "b", "c", "d"])
    killed, address = pairs.pop(victim)
    killed.guarded()
    waiting = [process.quorum(at, step=1) for process, at in pairs[:2]]
    if asks:
        killed.quorum(address, step=1)
    killed.kill()
    waiting.append(pairs[2][0].quorum(pairs[2][1], step=1))
    names = [name for number, name in enumerate("abcd") if number != victim]
    told = agreed(waiting)
    if told != (2, names):  # all four had asked before it died
        assert (asks, told) == (True, (1, ["a", "b", "c", "d"]))
    assert agreed([process.quorum(at, step=2) for process, at in pairs]) == (2, names)


def test_all_but_two_die_at_once(make_job: MakeJob) -> None:
    pairs = managed(make_job(5, heartbeat=HOUR))
    agreed([process.quorum(at) for process, at in pairs])
    for process, _ in pairs[:3]:
        process.guarded()
    waiting = [process.quorum(at, step=1) for process, at in pairs[3:]]
    for process, _ in pairs[:3]:
        process.kill()
    assert agreed(waiting) == (2, ["d", "e"])


def test_where_the_managers_process_dies_and_its_rank_lives_the_group_is_out(make_job: MakeJob) -> None:
    """The manager is in a process of its own, its rank in another one."""
    manager, rank, other = make_job(3, min_replicas=1, heartbeat=HOUR)
    one, two = manager.manage("a"), other.manage("b")
    agreed([rank.quorum(one), other.quorum(two)])
    manager.guarded()
    manager.kill()
    assert other.quorum(two, step=1).result(DEADLINE) == (2, ["b"])
    with pytest.raises(RuntimeError):
        rank.quorum(one, step=1).result(DEADLINE)


def test_where_the_sentinel_dies_first_the_heartbeat_times_out(make_job: MakeJob) -> None:
    """The one that dies is stopped before, so that it cannot start another sentinel."""
    a, b = make_job(2, min_replicas=1)
    pairs = managed([a, b])
    agreed([process.quorum(at) for process, at in pairs])
    sentinel = a.guarded()
    a.stop()
    os.kill(sentinel, signal.SIGKILL)
    a.kill()
    assert b.quorum(pairs[1][1], step=1).result(DEADLINE) == (2, ["b"])


# -- replicas that hang and give up -----------------------------------------------------------------------------


@pytest.mark.parametrize("asks", [False, True])
def test_a_replica_that_was_stopped_comes_back(make_job: MakeJob, client: EtcdClient, prefix: str, asks: bool) -> None:
    """Stopped for longer than its heartbeat time-out, the decider among them; `asks`: while it waited."""
    processes = make_job(3, join=3_000)
    (stopped, address), *others = managed(processes)
    agreed([process.quorum(at) for process, at in [(stopped, address), *others]])
    waiting = stopped.quorum(address, step=1) if asks else None
    stopped.stop()
    eventually(lambda: len(keys_under(client, f"/ftcoord/v2{prefix}/quorum/members/")) == 2, "its lease is over")
    for step in (1, 2):
        last = agreed([process.quorum(at, step=step) for process, at in others])
    assert last == (2, ["b", "c"])
    stopped.resume()
    number, names = until_it_is_in(waiting or stopped.quorum(address, step=1), others)
    assert (number, names) in [(3, ["a", "b", "c"]), (1, ["a", "b", "c"])][: 1 + asks]
    assert until_it_is_in(stopped.quorum(address, step=2), others)[0] >= 3


def test_a_decider_that_is_stuck_is_overtaken(make_job: MakeJob) -> None:
    """It holds its lease for long, and goes on as if nothing had been when it wakes up: two deciders at once."""
    processes = make_job(3, join=3_000, heartbeat=60_000)
    (stuck, address), *others = managed(processes)
    agreed([process.quorum(at) for process, at in [(stuck, address), *others]])
    late = stuck.quorum(address, step=1)
    stuck.stop()
    assert agreed([process.quorum(at, step=1) for process, at in others])[1][-2:] == ["b", "c"]
    stuck.resume()
    for step in range(2, 10):
        last = until_it_is_in(late, others)
        assert last[1] == ["a", "b", "c"]
        late = stuck.quorum(address, step=step)
    assert until_it_is_in(late, others)[0] >= last[0]


# -- etcd that dies ---------------------------------------------------------------------------------------------


def test_etcd_is_killed_and_nobody_notices_but_for_the_time(make_fragile_job: MakeJob, fragile: EtcdServer) -> None:
    processes = make_fragile_job(3)
    pairs = managed(processes)
    numbers = []
    for step in range(3):
        waiting = [process.quorum(at, step=step) for process, at in pairs[:-1]]  # these before, the last one meanwhile
        fragile.kill()
        waiting.append(pairs[-1][0].quorum(pairs[-1][1], step=step))
        WAIT(step)
        fragile.restart()
        numbers.append(agreed(waiting)[0])
        numbers.append(agreed([process.quorum(at, step=step, failures=1) for process, at in pairs])[0])
    assert numbers == [1, 2, 2, 3, 3, 4]
