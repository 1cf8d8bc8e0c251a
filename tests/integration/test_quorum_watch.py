"""Who is told, in time and by name, that a member of its quorum is lost, and who is not bothered."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta

import pytest
from helpers import DEADLINE, eventually
from rdzv_nodes import keys_under
from replicas import ReplicaProcess, agreed, managed, replica_processes

from ftcoord.coordination.address import parse_address
from ftcoord.coordination.lighthouse import QuorumWatch
from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.client import EtcdClient
from ftcoord.primitives.deaths import causes_of

LIMIT = timedelta(seconds=DEADLINE)
HOUR = 3_600_000
SHORT = 3_000

Told = tuple[int, str, str]


class World:
    """Replicas a, b and c, each a process with a manager, and a watch over their quorum."""

    def __init__(self, server: EtcdServer, name: str, heartbeat_ms: int, stack: ExitStack) -> None:
        self.job = f"etcd://{server.get_endpoint()}/{name}?min_replicas=2&heartbeat_timeout_ms={heartbeat_ms}"
        self.processes = stack.enter_context(replica_processes(self.job, 3))
        self.pairs = managed(self.processes)
        self.told: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self.watch = stack.enter_context(QuorumWatch(self.job, LIMIT, lambda *told: self.told.put(told), print))
        self.id, names = self.quorum()
        assert names == ["a", "b", "c"]

    def quorum(self, step: int = 0) -> tuple[int, list[str]]:
        return agreed([process.quorum(at, step=step) for process, at in self.pairs])

    def kill(self, number: int) -> ReplicaProcess:
        """With -9, once there is a sentinel that says so."""
        process, _ = self.pairs.pop(number)
        process.guarded()
        process.die()
        return process

    def next(self) -> Told:
        return self.told.get(timeout=DEADLINE)


MakeWorld = Callable[..., World]


@pytest.fixture
def make_world(etcd: EtcdServer, prefix: str) -> Iterator[MakeWorld]:
    with ExitStack() as stack:
        yield lambda heartbeat_ms=HOUR: World(etcd, prefix.strip("/"), heartbeat_ms, stack)


def test_a_death_is_told_by_name_and_cause_though_no_heartbeat_times_out(make_world: MakeWorld) -> None:
    world = make_world()
    world.watch.follow(world.id)
    dead = world.kill(1)
    number, replica, cause = world.next()
    assert (number, replica) == (world.id, "b")
    assert cause.endswith(f"(pid {dead.pid}) was killed by signal 9 (SIGKILL)")
    world.kill(0)
    assert world.next()[:2] == (world.id, "a")
    assert world.told.empty()


def test_only_the_quorum_that_is_followed_counts(make_world: MakeWorld) -> None:
    world = make_world()
    world.watch.follow(world.id)
    world.kill(2)
    assert world.next()[:2] == (world.id, "c")
    second, _ = world.quorum(step=1)
    world.watch.follow(second)
    world.kill(1)
    assert world.next()[:2] == (second, "b")
    assert world.told.empty()


def test_who_is_gone_without_a_word_is_lost_after_a_heartbeat_timeout(
    make_world: MakeWorld, client: EtcdClient
) -> None:
    world = make_world(SHORT)
    world.watch.follow(world.id)
    process, _ = world.pairs[0]
    process.stop()  # as if its host were gone: its lease ends, and nobody says why
    try:
        assert world.next() == (world.id, "a", "")
    finally:
        process.resume()


def test_who_lost_its_lease_and_comes_back_is_not_lost_and_its_death_is_told(
    make_world: MakeWorld, client: EtcdClient
) -> None:
    world = make_world(SHORT)
    world.watch.follow(world.id)
    before = members(world, client)
    (first, *_) = sorted(before)
    client.revoke(int(first, 16))  # the oldest: replica a's
    eventually(lambda: len(members(world, client) - before) == 1, "it comes back under another lease")
    assert world.quorum(step=1) == (world.id, ["a", "b", "c"])
    world.kill(0)
    *told, cause = world.next()
    assert told == [world.id, "a"]
    job = parse_address(world.job).prefix
    assert causes_of(client, job, [first]) == {first: cause}, "who knows it by its first lease is told too"


def test_what_happens_in_an_outage_of_etcd_is_told_afterwards(fragile: EtcdServer, prefix: str) -> None:
    with ExitStack() as stack:
        world = World(fragile, prefix.strip("/"), 5_000, stack)
        world.watch.follow(world.id)
        process, _ = world.pairs[1]
        process.guarded()
        fragile.kill()
        process.kill()
        fragile.restart()
        assert world.next()[:2] == (world.id, "b")


def members(world: World, client: EtcdClient) -> set[str]:
    """The ids of the job's members."""
    return {key.rpartition("/")[2] for key in keys_under(client, f"{parse_address(world.job).prefix}/members/")}
