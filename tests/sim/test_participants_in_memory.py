"""Quorums under accidents, with the real Participant: torchft's replicas. Rounds are in test_rounds_in_memory.py.

Each replica is a loop in a process of its own, as trainers are. What all of them are told is checked
against the invariants of docs/protocol.md, whatever the seed did to them.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from virtual import DELIVERED, Call, Fate, MemoryClient, flaky
from virtual.keyspace import Transaction
from worlds import World, long_simulated, simulated

from ftcoord import concurrency
from ftcoord.coordination.address import Job
from ftcoord.coordination.replica import Replica
from ftcoord.core.layout import decided_key, decided_span, members_span
from ftcoord.core.quorum import QuorumRecord, QuorumRequest
from ftcoord.errors import ClientClosed, EtcdError, StateError
from ftcoord.etcd.api import Get, Put, unchanged

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
            request = QuorumRequest(self.replica_id, "", "", step, 1, False, "", 0, ())
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


def train_together(world: World, trainers: Iterable[Trainer], steps: int = 3) -> None:
    """Wait until these, and no others, are in so many quorums more."""
    there = list(trainers)
    names = frozenset(trainer.replica_id for trainer in there)
    before = {trainer.name: len(trainer.told) for trainer in there}
    world.until(
        lambda: all(len(trainer.told) >= before[trainer.name] + steps and trainer.names == names for trainer in there),
        f"quorums of {sorted(names)}",
    )


def end(world: World, machines: Iterable[Machine]) -> None:
    for machine in machines:
        machine.stop.set()
    for machine in machines:
        assert machine.thread is not None
        machine.thread.join(120)
        assert not machine.thread.is_alive()


def check_quorums(trainers: Iterable[Trainer]) -> None:
    """Everybody is told the same of a number, an id stands for one set of replicas, and neither ever goes back."""
    by_number: dict[int, QuorumRecord] = {}
    by_id: dict[int, frozenset[str]] = {}
    for trainer in trainers:
        numbers = [quorum.number for quorum in trainer.told]
        assert numbers == sorted(set(numbers)), (trainer.name, numbers)
        ids = [quorum.id for quorum in trainer.told]
        assert ids == sorted(ids), (trainer.name, ids)
        for quorum in trainer.told:
            assert trainer.replica_id in quorum.names
            assert by_number.setdefault(quorum.number, quorum) == quorum
            assert by_id.setdefault(quorum.id, quorum.names) == quorum.names


# -- quorums ----------------------------------------------------------------------------------------------------------


@simulated
def test_replicas_train_on_a_bad_network(world: World) -> None:
    group = trainers(world, 3, wild=True)
    train_together(world, group)
    end(world, group)
    check_quorums(group)


@simulated
def test_a_replica_that_dies_is_left_out_and_one_that_comes_is_taken_in(world: World) -> None:
    group = trainers(world, 3)
    train_together(world, group)
    died = world.scheduler.time
    group[0].crash()
    train_together(world, group[1:])
    assert world.scheduler.time - died < LEASE_TTL + JOB.join_timeout_ms / 1000 + 3
    late = Trainer(world, "replica9", world.etcd.client())
    train_together(world, [*group[1:], late])
    end(world, [*group[1:], late])
    check_quorums([*group, late])


@simulated
def test_a_replica_that_stood_still_comes_back_as_a_new_member(world: World) -> None:
    group = trainers(world, 3)
    train_together(world, group)
    slow = group[world.seed % 3]
    world.scheduler.pause(slow.name)
    train_together(world, [trainer for trainer in group if trainer is not slow])
    world.scheduler.resume(slow.name)
    train_together(world, group)
    end(world, group)
    check_quorums(group)


@long_simulated
def test_replicas_train_on_when_an_etcd_that_hung_has_ended_all_leases(world: World) -> None:
    """For 37 seconds, and for ten minutes. And when it was restored."""
    group = trainers(world, 3)
    train_together(world, group)
    old = world.etcd.snapshot()
    for seconds in (37, 600):
        with world.etcd.outage(hangs=True):
            world.sleep(seconds)
        train_together(world, group)
    world.etcd.rewind(old)
    train_together(world, group)
    end(world, group)
    check_quorums(group)


@simulated
def test_an_outage_of_etcd_costs_no_replica_its_lease(world: World) -> None:
    group = trainers(world, 3)
    train_together(world, group)
    with world.etcd.outage():
        world.sleep(60)
    train_together(world, group)
    end(world, group)
    check_quorums(group)
    of_all = [quorum.seated for trainer in group for quorum in trainer.told if len(quorum.seats) == 3]
    assert len({frozenset(seated) for seated in of_all}) == 1, "they are the same members: no lease was lost"


@simulated
def test_quorums_go_on_from_the_highest_number_when_etcd_was_wiped(world: World) -> None:
    empty = world.etcd.snapshot()
    group = trainers(world, 3)
    train_together(world, group)
    world.etcd.rewind(empty)
    train_together(world, group)
    end(world, group)
    check_quorums(group)


@simulated
def test_the_number_of_a_quorum_that_was_deleted_is_not_given_again(world: World) -> None:
    """Only its decider is told of it, and late: another replica has decided by then, and never heard of it."""
    group = trainers(world, 1)
    train_together(world, group)
    group.append(Trainer(world, "other", world.etcd.client()))
    train_together(world, group)
    decider, other = group
    late: list[Call] = []

    def fate(call: Call) -> Fate:
        if late or not _decides(call):
            return DELIVERED
        late.append(call)
        other.client.cut_off()
        return Fate(answers=1.0)

    decider.client.fate = fate
    world.until(lambda: late, "it decides")
    world.sleep(0.01)
    world.observer.delete(decided_span(JOB.prefix))
    other.client.reconnect()
    train_together(world, group)
    end(world, group)
    check_quorums(group)


class LateDecision:
    """The fate of a decider: its first decision that finds no record is under way for a second. Others decide in its
    place before that, and not once more."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.arrives_at = 0.0

    def __call__(self, call: Call) -> Fate:
        if self.arrives_at or not (_decides(call) and _finds_no_record(call)):
            return DELIVERED
        self.arrives_at = concurrency.now() + 1.0
        return Fate(arrives=1.0)

    def overtaken_by(self, other: Trainer) -> None:
        """Have others decide meanwhile, and then somebody delete that."""
        self._world.until(lambda: self.arrives_at, "the first one decides")
        told = len(other.told)
        self._world.until(lambda: len(other.told) > told, "the other one is told of a quorum")
        self._world.observer.delete(decided_span(JOB.prefix))
        assert concurrency.now() < self.arrives_at, "the first decision is still on its way"


@simulated
def test_a_jobs_first_quorum_does_not_count_late_once_another_one_was_deleted(world: World) -> None:
    """To its decider it looks as if nobody had decided meanwhile."""
    fate = LateDecision(world)
    group = [Trainer(world, "decider", world.etcd.client(fate))]
    world.until(lambda: fate.arrives_at, "it decides")
    group.append(Trainer(world, "other", world.etcd.client()))
    fate.overtaken_by(group[1])
    train_together(world, group)
    end(world, group)
    check_quorums(group)


@simulated
def test_two_replicas_that_replace_a_deleted_record_give_no_number_twice(world: World) -> None:
    """Somebody deletes the first one's record too, before the other one's decision arrives."""
    fate = LateDecision(world)
    group = [Trainer(world, "decider", world.etcd.client())]
    train_together(world, group)
    group += trainers(world, 3)
    train_together(world, group)
    silent = group[3]
    world.scheduler.pause(silent.name)
    world.sleep(0.5)  # all others have asked by then, and wait for that one
    group[0].client.fate = fate
    world.observer.delete(decided_span(JOB.prefix))
    fate.overtaken_by(group[1])
    world.scheduler.resume(silent.name)
    train_together(world, group)
    end(world, group)
    check_quorums(group)


@simulated
def test_numbers_go_on_where_the_record_was_deleted_and_nobody_is_left_who_knew_it(world: World) -> None:
    before = trainers(world, 2)
    train_together(world, before)
    end(world, before)
    world.observer.delete(decided_span(JOB.prefix))
    (after,) = trainers(world, 1)
    train_together(world, [after])
    end(world, [after])
    last, first = before[0].told[-1], after.told[0]
    assert first.number > last.number
    assert first.id > last.id


def _decides(call: Call) -> bool:
    asked, key = call.asked, decided_key(JOB.prefix)
    return isinstance(asked, Transaction) and any(isinstance(op, Put) and op.key == key for op in asked.success)


def _finds_no_record(call: Call) -> bool:
    return isinstance(call.asked, Transaction) and unchanged(decided_key(JOB.prefix), 0) in call.asked.compares


@simulated
def test_quorums_while_leaders_change_and_history_is_compacted(world: World) -> None:
    group = trainers(world, 3)
    for _ in range(4):
        train_together(world, group, steps=1)
        world.etcd.change_leader()
        cut = random.choice(group)
        cut.client.cut_off()
        world.sleep(random.uniform(0, 2))
        if world.etcd.revision > 20:
            world.observer.put("/elsewhere", b"")
            world.etcd.compact()
        cut.client.reconnect()
    train_together(world, group)
    end(world, group)
    check_quorums(group)


class Waiter(Machine):
    """A replica of a job that asks for one quorum, and does not beat meanwhile."""

    def __init__(self, world: World, name: str, job: Job, step: int = 0, client: MemoryClient | None = None) -> None:
        super().__init__(world, f"{name} at step {step}", client or world.etcd.client())
        self.told: QuorumRecord | None = None
        self._request = QuorumRequest(name, "", "", step, 1, False, "", 0, ())
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


@simulated
def test_a_beat_that_finds_the_lease_lost_does_not_end_the_call(world: World) -> None:
    """It writes its request again, and etcd is slow: the call joins again."""
    job, slow = replace(JOB, min_replicas=2, heartbeat_timeout_ms=3000), [True]
    client = world.etcd.client(lambda call: Fate(answers=0.3) if slow[0] else DELIVERED)
    first = Waiter(world, "a", job, client=client)
    world.until(lambda: members(world, job), "it has joined")
    world.sleep(random.uniform(2.0, 4.0))
    for member in members(world, job):
        world.observer.revoke(member)
    world.sleep(4)
    slow[0] = False
    second = Waiter(world, "b", job)
    world.until(lambda: first.told and second.told, "both are answered")
    end(world, [first, second])


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
