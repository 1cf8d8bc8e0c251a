"""What users of elections and barriers are promised, in every history; bad networks are in another file."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import TypeVar

import pytest
from worlds import World, simulated

import ftcoord
from ftcoord import concurrency
from ftcoord.core.layout import decided_key, election_prefix, run_prefix
from ftcoord.errors import ConfigError, EtcdError, FtcoordError
from ftcoord.etcd.api import Put, Span
from ftcoord.recipes.election import Leadership
from ftcoord.testing import MemoryClient, MemoryEtcd

T = TypeVar("T")
LEASE_TTL = 10
WRITTEN = "/written"
"""What leaders write, each its term."""


@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
def test_only_what_was_dropped_is_closed_by_a_thread(close: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector would start one for each that was closed, whenever it pleases."""
    gc.collect()  # closes what earlier tests have dropped
    begun: list[object] = []
    monkeypatch.setattr(concurrency._End, "dropped", lambda end: begun.append(end))
    with MemoryEtcd() as etcd:
        election = ftcoord.Election("run", "e", etcd=etcd.client())
        if close:
            election.close()
        del election
        gc.collect()
    assert len(begun) == (not close)


def on_host(world: World, name: str, work: Callable[[], T]) -> Callable[[], T]:
    """Have a host of its own do something; the call of what this returns waits for it."""
    done: list[T] = []
    with world.scheduler.process(name):
        concurrency.thread(lambda: done.append(work()), name).start()

    def result() -> T:
        world.until(lambda: done, f"{name} is done", timeout=600)
        return done[0]

    return result


def insist(call: Callable[[], T]) -> T:
    while True:
        try:
            return call()
        except EtcdError:
            continue


def wait_in_vain(barrier: ftcoord.Barrier) -> None:
    """Wait at a barrier that is closed meanwhile."""
    with contextlib.suppress(FtcoordError, TimeoutError):
        barrier.wait()


def write(client: MemoryClient, leadership: Leadership) -> bool:
    """Write as the leader; whether that took effect."""
    put = Put(WRITTEN, str(leadership.number).encode())
    return insist(lambda: client.txn([leadership.fence], [put]).succeeded)


@simulated
def test_candidates_lead_one_after_the_other(world: World) -> None:
    first, second = (ftcoord.Election("run", "e", name, etcd=world.etcd.client()) for name in ("first", "second"))
    with first, second:
        leadership = first.campaign(60)
        with pytest.raises(TimeoutError):
            second.campaign(20)
        assert first.leader() == second.leader()
        leadership.resign()
        assert leadership.lost
        after = second.campaign(60)
        assert after.number == leadership.number + 1
        assert not after.lost


@simulated
def test_a_leader_that_stood_still_beyond_its_lease_writes_nothing_more(world: World) -> None:
    client = world.etcd.client()
    led: list[Leadership] = []
    with world.scheduler.process("first"):
        first = ftcoord.Election("run", "e", "first", etcd=client, lease_ttl=LEASE_TTL)
        led.append(first.campaign(60))
    world.scheduler.pause("first")
    second = ftcoord.Election("run", "e", "second", etcd=world.etcd.client(), lease_ttl=LEASE_TTL)
    stopped = world.scheduler.time
    after = second.campaign(60)
    assert world.scheduler.time - stopped < LEASE_TTL + 2
    world.scheduler.resume("first")
    assert not write(client, led[0])
    assert write(client, after)
    assert led[0].wait_lost(60)
    first.close()
    second.close()


@simulated
def test_a_leader_writes_nothing_more_when_terms_began_anew(world: World) -> None:
    """Somebody deleted the record while no candidate lived. The new leader's term has a lower number than the old
    one's, who does not know yet that it was replaced."""
    client = world.etcd.client()
    led: list[Leadership] = []
    with world.scheduler.process("first"):
        first = ftcoord.Election("run", "e", "first", etcd=client, lease_ttl=LEASE_TTL)
        first.campaign(60).resign()
        led.append(first.campaign(60))
    world.scheduler.pause("first")
    world.sleep(LEASE_TTL + 2)
    with world.etcd.client() as observer:
        observer.delete(Span(decided_key(election_prefix(run_prefix("/ftcoord/v1", "run"), "e"))))
    with ftcoord.Election("run", "e", "second", etcd=world.etcd.client(), lease_ttl=LEASE_TTL) as second:
        after = second.campaign(60)
        assert after.number < led[0].number
        world.scheduler.resume("first")
        assert not write(client, led[0])
        assert write(client, after)
        first.close()


@simulated
def test_terms_grow_though_etcd_forgot_them(world: World) -> None:
    """The candidates that live remember the highest one."""
    empty = world.etcd.snapshot()
    with ftcoord.Election("run", "e", etcd=world.etcd.client(), lease_ttl=LEASE_TTL) as election:
        for _ in range(3):
            with election.campaign(60) as leadership:
                pass
        world.etcd.rewind(empty)
        assert insist(lambda: election.campaign(60)).number > leadership.number


@simulated
def test_who_leads_already_is_told_so(world: World) -> None:
    with ftcoord.Election("run", "e", etcd=world.etcd.client(), lease_ttl=LEASE_TTL) as election:
        first = election.campaign(60)
        assert election.campaign(60) == first


@simulated
def test_a_party_that_died_is_replaced(world: World) -> None:
    dead = world.etcd.client()
    with world.scheduler.process("dead"):
        barrier = ftcoord.Barrier("run", "b", 3, etcd=dead, lease_ttl=LEASE_TTL)
    ended = on_host(world, "dead", lambda: wait_in_vain(barrier))
    world.until(lambda: len(world.keys("/ftcoord/v1/run/barriers/b/members/")) == 1, "it arrived")
    dead.cut_off()
    world.scheduler.pause("dead")
    world.until(lambda: not world.keys("/ftcoord/v1/run/barriers/b/members/"), "its lease ends")

    def pass_one(name: str) -> int:
        with ftcoord.Barrier("run", "b", 3, etcd=world.etcd.client(), lease_ttl=LEASE_TTL) as mine:
            place = mine.wait(600)
            world.sleep(1)
            return place

    results = [on_host(world, name, lambda name=name: pass_one(name)) for name in "ab"]
    world.sleep(60)
    results.append(on_host(world, "c", lambda: pass_one("c")))
    assert sorted(result() for result in results) == [0, 1, 2]
    dead.reconnect()
    world.scheduler.resume("dead")
    barrier.close()
    ended()


@simulated
def test_another_number_of_parties_is_refused(world: World) -> None:
    with ftcoord.Barrier("run", "b", 2, etcd=world.etcd.client()) as mine:
        other = ftcoord.Barrier("run", "b", 3, etcd=world.etcd.client())
        ended = on_host(world, "other", lambda: wait_in_vain(other))
        world.until(lambda: world.keys("/ftcoord/v1/run/barriers/b/members/"), "the other one has arrived")
        with pytest.raises(ConfigError, match="others wait at this barrier for 3"):
            mine.wait(60)
        other.close()
        ended()
