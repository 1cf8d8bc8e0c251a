"""Nobody waits for a decider that is dead or frozen: whoever waits decides too, soon and seldom."""

from __future__ import annotations

from dataclasses import replace

from members import Counting
from test_participants_in_memory import JOB, Trainer, check_quorums, end, train_together, trainers
from virtual import MemoryClient
from worlds import World, long_simulated, simulated

from ftcoord import concurrency
from ftcoord.coordination.address import Job
from ftcoord.coordination.replica import Replica
from ftcoord.core.layout import members_span
from ftcoord.core.quorum_records import QuorumRequest
from ftcoord.core.takeover import SLOT, look_delay, stagger

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
