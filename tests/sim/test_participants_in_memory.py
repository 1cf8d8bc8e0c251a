"""Quorums of replicas with one name, on the real Participant. Accidents are in the simulator.

Each replica is a loop in a process of its own, as trainers are. What all of them are told is checked
against the invariants of docs/protocol.md, whatever the seed did to them.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import builders
import pytest
from virtual import Call, Fate, MemoryClient, flaky
from worlds import World, play, simulated

from ftcoord import concurrency
from ftcoord.coordination.address import Job
from ftcoord.coordination.replica import Replica
from ftcoord.core.layout import KEY_PREFIX, OLDER_KEY_PREFIX, member_key, members_span
from ftcoord.core.quorum import QuorumRecord
from ftcoord.errors import ClientClosed, EtcdError, StateError
from ftcoord.etcd.api import Get, Put

JOB = Job("etcd", "", "job", min_replicas=1, join_timeout_ms=2000, heartbeat_timeout_ms=5000)
LEASE_TTL = 5


@dataclass
class Machine:
    """A process with a loop in it: it stops when it is told, when it crashes, or at the end."""

    world: World
    name: str
    client: MemoryClient
    stop: concurrency.Event = field(default_factory=concurrency.event)
    thread: concurrency.Thread | None = None

    def begin(self, loop: Callable[[], None]) -> None:
        with self.world.scheduler.process(self.name):
            self.thread = concurrency.thread(loop, f"{self.name}'s loop")
        self.thread.start()

    def crash(self) -> None:
        self.client.cut_off()
        self.world.scheduler.pause(self.name)


class Trainer(Machine):
    """A replica group that asks for a quorum in every step."""

    def __init__(self, world: World, name: str, client: MemoryClient, replica_id: str = "") -> None:
        super().__init__(world, name, client)
        self.replica_id = replica_id or name
        self.told: list[QuorumRecord] = []
        self.rest = 0.2
        """Seconds between two steps at most."""
        self.begin(self._train)

    @property
    def names(self) -> frozenset[str]:
        """The replicas of its last quorum."""
        return self.told[-1].names if self.told else frozenset()

    def _train(self) -> None:
        replica = Replica(self.client, JOB, self.replica_id, keeps_lease=True)
        step = 0
        while not self.stop.is_set():
            request = builders.request(self.replica_id, step=step)
            try:
                self.told.append(replica.ask(request, concurrency.now() + 30))
            except (TimeoutError, EtcdError):
                continue
            except StateError:  # as for a user who tries again
                self.stop.wait(0.5)
                continue
            step += 1
            self.stop.wait(random.uniform(0, self.rest))
        replica.leave(1)


def trainers(world: World, count: int, wild: bool = False) -> list[Trainer]:
    def client(number: int) -> MemoryClient:
        if not wild:
            return world.etcd.client()
        chances = {"refused": 0.02, "lost_requests": 0.03, "lost_answers": 0.03, "late": 0.02, "delay": 0.01}
        return world.etcd.client(flaky(100 * world.seed + number, **chances))

    return [Trainer(world, f"replica{number}", client(number)) for number in range(count)]


def end(world: World, machines: Iterable[Machine]) -> None:
    for machine in machines:
        machine.stop.set()
    for machine in machines:
        assert machine.thread is not None
        machine.thread.join(120)
        assert not machine.thread.is_alive()


# -- quorums ----------------------------------------------------------------------------------------------------------


class Waiter(Machine):
    """A replica of a job that asks for one quorum, and does not beat meanwhile."""

    def __init__(self, world: World, name: str, job: Job, step: int = 0, client: MemoryClient | None = None) -> None:
        super().__init__(world, f"{name} at step {step}", client or world.etcd.client())
        self.told: QuorumRecord | None = None
        self._request = builders.request(name, step=step)
        self._job = job
        self.begin(self._wait)

    def _wait(self) -> None:
        replica = Replica(self.client, self._job, self._request.replica_id, keeps_lease=False)
        with contextlib.suppress(ClientClosed):  # the world of one that was killed has ended
            self.told = replica.ask(self._request, concurrency.now() + 100)


class Beater(Machine):
    """Beats for a replica, whoever asks for it."""

    def __init__(self, world: World, name: str, job: Job) -> None:
        super().__init__(world, f"{name}'s beats", world.etcd.client())
        self._replica = Replica(self.client, job, name, keeps_lease=False)
        self.beat_at = 0.0
        self.begin(self._beat)

    def _beat(self) -> None:
        while not self.stop.is_set():
            self._replica.beat(concurrency.now() + 5)
            self.beat_at = concurrency.now()
            self.stop.wait(0.1)


@simulated
def test_two_clients_with_one_replica_id_are_both_answered(world: World) -> None:
    """In whatever order they asked: the last request counts, for both."""
    job = replace(JOB, min_replicas=2, heartbeat_timeout_ms=60_000)  # nobody writes again what it asked
    clients = []
    for step in (3, 9, 5):
        clients.append(Waiter(world, "twin", job, step))
        world.sleep(world.seed % 3)
    world.sleep(3)
    other = Waiter(world, "other", job)
    world.until(lambda: all(one.told for one in (*clients, other)), "all are answered")
    assert other.told is not None
    assert [one.told for one in clients] == [other.told] * 3
    assert other.told.names == {"other", "twin"}
    assert world.seed % 3 == 0 or other.told.requests[1].step == 5
    end(world, [*clients, other])


@simulated
def test_what_a_killed_process_asked_is_hidden_by_its_successor(world: World) -> None:
    """And what a living one asked is not, for long."""
    job = replace(JOB, min_replicas=2, heartbeat_timeout_ms=20_000)
    killed = Waiter(world, "a", job)
    world.sleep(1)
    killed.crash()
    successor = Beater(world, "a", job)
    world.until(lambda: successor.beat_at, "its successor is there")
    other = Waiter(world, "b", job)
    world.sleep(5)
    assert other.told is None, "the killed one does not count, though its lease lives"
    twin, asks = Beater(world, "b", job), Waiter(world, "a", job, step=1)
    world.until(lambda: other.told and asks.told, "another client of b beats, and yet b asks", 25)
    end(world, [other, asks, twin, successor])


def members(world: World, job: Job) -> list[int]:
    """Their leases."""
    return [kv.lease for kv in world.observer.range(Get(members_span(job.prefix))).kvs]


@simulated
def test_survivors_whose_beats_come_from_another_client_get_their_quorum(world: World) -> None:
    job = replace(JOB, join_timeout_ms=3_600_000, heartbeat_timeout_ms=3000)
    dies = Beater(world, "c", job)
    world.until(lambda: dies.beat_at, "c beats")
    asks_first = world.seed % 2
    survivors = [Waiter(world, name, job) for name in "ab" if asks_first]
    beats = [Beater(world, name, job) for name in "ab"]
    world.until(lambda: all(one.beat_at for one in beats), "all beat")
    survivors = survivors or [Waiter(world, name, job) for name in "ab"]
    world.sleep(1)
    assert not any(one.told for one in survivors), "c lives"
    end(world, [dies])
    world.until(lambda: all(one.told for one in survivors), "the survivors have their quorum", 3.5)
    end(world, [*survivors, *beats])


@pytest.mark.parametrize("may_read", [True, False])
def test_members_of_an_older_release_are_named_once(may_read: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Also a user who may not read there takes part."""
    older = member_key(JOB.prefix.replace(KEY_PREFIX, OLDER_KEY_PREFIX), "0123456789abcdef")

    def refused(call: Call) -> Fate:
        is_there = isinstance(call.asked, Get) and call.asked.span.start.startswith(OLDER_KEY_PREFIX)
        return Fate(refused=is_there and not may_read)

    def run(world: World) -> None:
        world.observer.txn((), [Put(older, b"{}")])
        trainer = Trainer(world, "replica0", world.etcd.client(refused))
        world.until(lambda: len(trainer.told) > 2, "three quorums")
        end(world, [trainer])

    play(run, 0)
    assert [older in one.message for one in caplog.records if "older release" in one.message] == [True] * may_read
