"""Elections and barriers under accidents, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable

from worlds import World, simulated

from ftcoord import concurrency
from ftcoord.errors import EtcdError
from ftcoord.etcd.api import Put
from ftcoord.recipes.barrier import Barrier
from ftcoord.recipes.election import Election
from ftcoord.testing import MemoryClient, flaky

LEASE_TTL = 5
TERMS = 3


def wild(world: World, number: int) -> MemoryClient:
    chances = {"refused": 0.02, "lost_requests": 0.03, "lost_answers": 0.03, "late": 0.03, "delay": 0.01}
    return world.etcd.client(flaky(100 * world.seed + number, **chances))


def start(world: World, works: list[Callable[[], None]]) -> list[concurrency.Thread]:
    threads = []
    for number, work in enumerate(works):
        with world.scheduler.process(f"host{number}"):
            threads.append(concurrency.thread(work, f"work {number}"))
    for thread in threads:
        thread.start()
    return threads


@simulated
def test_no_leader_writes_after_the_next_one_was_elected(world: World) -> None:
    """On a bad network, and though leaders stand still for longer than their leases live: the fence refuses them."""
    written: list[int] = []
    done = [0, 0, 0]

    def lead(number: int) -> None:
        client = wild(world, number)
        while done[number] < TERMS:
            try:
                with (
                    Election("run", "e", str(number), etcd=client, lease_ttl=LEASE_TTL) as election,
                    election.campaign(60) as leadership,
                ):
                    for _ in range(3):
                        value = b"%d" % leadership.number
                        if client.txn([leadership.fence], [Put("/term", value)]).succeeded:
                            written.append(leadership.number)
                        concurrency.sleep(random.uniform(0, 0.5))
                    done[number] += 1
            except (TimeoutError, EtcdError):
                continue

    threads = start(world, [lambda number=number: lead(number) for number in range(3)])
    for _ in range(3):
        world.sleep(random.uniform(0, 3))
        stalled = f"host{random.randrange(3)}"
        world.scheduler.pause(stalled)
        world.sleep(random.uniform(0, 3 * LEASE_TTL))
        world.scheduler.resume(stalled)
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive()
    terms = [int(event.kv.value) for event in world.events("/term")]
    assert terms == sorted(terms), "a leader of before wrote behind its successor"
    assert set(written) <= set(terms)
    assert done == [TERMS] * 3


@simulated
def test_nobody_passes_a_barrier_before_all_have_arrived(world: World) -> None:
    parties, generations = 3, 4
    arrived = [0] * parties
    passed: list[list[int]] = [[] for _ in range(parties)]

    def work(number: int) -> None:
        made: Barrier | None = None
        while made is None:
            try:
                made = Barrier("run", "b", parties, etcd=wild(world, number), lease_ttl=LEASE_TTL)
            except EtcdError:
                continue
        with made as barrier:
            for generation in range(generations):
                concurrency.sleep(random.uniform(0, 1))
                arrived[number] += 1
                passed[number].append(barrier.wait(300))
                assert min(arrived) > generation, "it passed before all had arrived"

    threads = start(world, [lambda number=number: work(number) for number in range(parties)])
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive()
    for places in zip(*passed, strict=True):
        assert sorted(places) == list(range(parties)), "each has a place of its own"
