"""Nobody waits for a decider that is dead or frozen: whoever waits decides too, soon and seldom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from members import Counting, Door
from test_participants_in_memory import JOB, LEASE_TTL, Trainer, check_quorums, end, train_together, trainers
from test_rounds_in_memory import Agent, check_rounds, work_together
from virtual import MemoryClient
from worlds import World, long_simulated, simulated

from ftcoord import concurrency
from ftcoord.coordination.address import Job
from ftcoord.coordination.replica import Replica
from ftcoord.core.layout import members_span
from ftcoord.core.quorum_records import QuorumRequest
from ftcoord.core.rendezvous_records import parse_decided
from ftcoord.core.takeover import SLOT, look_delay, stagger
from ftcoord.etcd.api import Compare, Get, Op, Put, Span, TxnResult

JOIN = JOB.join_timeout_ms / 1000
STEP = 0.2
"""Seconds that a trainer takes for a step at most."""
SELDOM = 2.0
"""Seconds between two steps of trainers that only have to be there."""
DECISION = 0.1
"""Seconds that the rest of a decision takes, and the looks of this test at whether it was made."""


def soon(waiters: int) -> float:
    """Seconds for which nobody decides at most, where a decision is due: of several waiters the first one does."""
    return look_delay(0) + stagger(waiters) + DECISION


def restarted(world: World, dead: Trainer, name: str) -> Trainer:
    """A new process of the same replica id, while the lease of the dead one lives."""
    return Trainer(world, name, world.etcd.client(), replica_id=dead.replica_id)


@simulated
def test_a_decider_that_is_killed_and_restarted_costs_nobody_its_lease_time(world: World) -> None:
    group = trainers(world, 3)
    train_together(world, group)
    group[0].crash()
    died = world.scheduler.time
    group[0] = restarted(world, group[0], "replica0 again")
    train_together(world, group, steps=1)
    assert world.scheduler.time - died < STEP + soon(3)
    end(world, group)
    check_quorums(group)


@simulated
def test_who_decided_in_place_of_the_decider_goes_on_without_a_pause(world: World) -> None:
    group = trainers(world, 3)
    train_together(world, group)
    group[0].crash()
    group[0] = restarted(world, group[0], "replica0 again")
    train_together(world, group, steps=1)
    began = world.scheduler.time
    train_together(world, group, steps=10)
    assert world.scheduler.time - began < 10 * (STEP + DECISION)
    end(world, group)
    check_quorums(group)


@simulated
def test_deciders_that_die_one_after_the_other(world: World) -> None:
    group = trainers(world, 4)
    train_together(world, group)
    for number in range(2):
        last = group[-1].told[-1]
        names = {seat.member: seat.request.replica_id for seat in last.seats}
        decider = next(one for one in group if one.replica_id == names[last.by])
        group.remove(decider)
        decider.crash()
        died = world.scheduler.time
        group.append(restarted(world, decider, f"{decider.name} again {number}"))
        train_together(world, group, steps=1)
        assert world.scheduler.time - died < STEP + soon(4)
    end(world, group)
    check_quorums(group)


@long_simulated
def test_a_decider_that_is_frozen_for_ten_seconds(world: World) -> None:
    """The others have a quorum when the rules let them, not when its lease is over. Then it comes back."""
    group = trainers(world, 4)
    train_together(world, group)
    world.scheduler.pause("replica0")
    frozen = world.scheduler.time
    train_together(world, group[1:], steps=1)
    assert world.scheduler.time - frozen < STEP + soon(4) + JOIN + look_delay(0)
    for trainer in group:  # ten seconds of full steps would show no more, and take a minute for all seeds
        trainer.rest = SELDOM
    world.sleep(10)
    world.scheduler.resume("replica0")
    train_together(world, group)
    end(world, group)
    check_quorums(group)


class Waiter:
    """A replica whose request nobody can answer."""

    def __init__(self, world: World, number: int, job: Job, client: MemoryClient) -> None:
        self.door = Counting(client)
        self.gone = concurrency.event()
        self.replica = Replica(self.door, job, f"replica{number}", keeps_lease=True)
        self.thread = concurrency.thread(self._ask, f"waiter{number}")
        self.thread.start()

    def _ask(self) -> None:
        request = QuorumRequest(self.replica.replica_id, "", "", 0, 1, False, "", 0, ())
        try:
            self.replica.ask(request, concurrency.now() + 600, self.gone)
        except TimeoutError:
            self.replica.leave(1)


@long_simulated
def test_waiters_with_nothing_to_decide_look_seldom(world: World) -> None:
    """However many there are, one looks at a time, and each less and less often."""
    count, seconds = (64, 60) if world.seed == 0 else (8, 60)
    job = replace(JOB, name="wait", min_replicas=count + 1)
    waiters = [Waiter(world, number, job, world.etcd.client()) for number in range(count)]
    world.sleep(seconds)
    span = members_span(job.prefix)
    looks = [waiter.door.begun.count(span) for waiter in waiters]
    assert min(looks) >= 1, "everybody looks"
    most = seconds / look_delay(99) + 5  # the first looks come faster than that
    assert max(looks) <= most
    assert sum(looks) <= min(count * most, 1.1 * seconds / (SLOT * (1 + count / 200)) + count)
    watching = sum(waiter.door.watched.count(span) for waiter in waiters)
    assert watching <= 3, "the decider, and whoever looks in this moment"
    for waiter in waiters:
        waiter.gone.set()
        waiter.replica.nudge()
    for waiter in waiters:
        waiter.thread.join(60)
        assert not waiter.thread.is_alive()


@simulated
def test_a_replica_that_rests_is_not_put_back(world: World) -> None:
    """It showed once that it lives, through a client that keeps no lease. Then its key is gone."""
    span = members_span(JOB.prefix)
    idle = [Replica(world.etcd.client(), JOB, f"idle{number}", keeps_lease=False) for number in range(3)]
    for replica in idle:
        replica.beat(concurrency.now() + 5)
    keys = [kv.key for kv in world.observer.range(Get(span)).kvs]
    assert len(keys) == len(idle)
    rested = world.etcd.revision
    if world.seed % 2:  # else their leases end by themselves
        for key in keys:
            world.observer.delete(Span(key))
    group = trainers(world, 2)
    for trainer in group:
        trainer.rest = SELDOM
    world.sleep(2 * LEASE_TTL)
    train_together(world, group)
    late = [event for key in keys for event in world.events(key) if event.kv.mod_revision > rested]
    assert {event.kind for event in late} == {"delete"}
    end(world, group)
    request = QuorumRequest("idle0", "", "", 0, 1, False, "", 0, ())
    assert idle[0].ask(request, concurrency.now() + 30).names == {"idle0"}, "it joins again"


class Freezes(Door):
    """Freezes its process in the moment in which it would say that a round is ready."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world.etcd.client())
        self.frozen_at = 0.0
        self._world, self._name = world, name

    def txn(self, compares: Sequence[Compare], success: Sequence[Op], *more: Any, **how: Any) -> TxnResult:
        records = [op for op in success if isinstance(op, Put) and op.key.endswith("/decided")]
        if not self.frozen_at and any(parse_decided(op.key, op.value).ready for op in records):
            self.frozen_at = self._world.scheduler.time
            self._world.scheduler.pause(self._name)
            concurrency.event().wait(STEP)
        return super().txn(compares, success, *more, **how)


@simulated
def test_a_decider_that_freezes_before_it_says_that_a_round_is_ready(world: World) -> None:
    door = Freezes(world, "node0")
    first = Agent(world, "node0", cast(MemoryClient, door), (3, 3))
    world.sleep(1)
    others = [Agent(world, f"node{number}", world.etcd.client(), (3, 3)) for number in (1, 2)]
    world.until(lambda: door.frozen_at, "it is frozen")
    world.sleep(5)
    assert not any(agent.rounds for agent in (first, *others)), "nobody knows how old the seats are"
    world.scheduler.resume("node0")
    work_together(world, [first, *others])
    end(world, [first, *others])
    check_rounds([first, *others])
