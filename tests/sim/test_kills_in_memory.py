"""Orders to end a manager's process: what whoever gave one is told is what became of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from replicas_in_memory import PREFIX, join
from virtual import DELIVERED, LOST_ANSWER, Call, Fate, MemoryClient
from worlds import World, simulated

from ftcoord import concurrency
from ftcoord.coordination.kills import LEASE_MARGIN, OrderedKill, order_kill, watch_kills
from ftcoord.core.layout import kill_key, member_id
from ftcoord.errors import NotInQuorum
from ftcoord.etcd.api import Delete, Span
from ftcoord.operator.orders import NothingThere, kill_replica

WAIT = 3.0
"""Seconds that an order is waited for."""


def soon(call: Callable[[], object]) -> None:
    """Make a call on a thread of its own."""
    concurrency.thread(call, "another").start()


def kill(client: MemoryClient, name: str = "a") -> bool:
    return order_kill(client, PREFIX, name, "why", concurrency.now() + WAIT)


def loses_the_first_answer(arrives: float) -> Callable[[Call], Fate]:
    """The answer to the first transaction is lost. The second one, which repeats it, is under way for so long."""
    fates = iter([LOST_ANSWER, Fate(arrives=arrives)])
    return lambda call: next(fates, DELIVERED) if call.method == "txn" else DELIVERED


@simulated
def test_who_is_told_that_a_manager_was_killed_is_told_the_truth(world: World) -> None:
    """Its lease ends, or it takes the order, or neither, before and after the giver's time is over."""
    chance = random.Random(world.seed)
    giver = world.etcd.client(lambda _call: Fate(chance.uniform(0, 0.2), chance.uniform(0, 0.2)))
    manager = world.etcd.client()
    lease, ended = join(manager, "a"), list[str]()

    def obey(orders: Sequence[OrderedKill]) -> None:
        for order in orders:
            world.sleep(chance.choice([0.0, 1.0, chance.uniform(WAIT - 0.5, WAIT + 0.2), WAIT + 1]))
            if order.take():
                ended.append(order.message)
                manager.revoke(lease)

    def lose() -> None:
        world.sleep(chance.choice([0.0, 0.1, 0.3, 1.0, WAIT]))
        world.observer.revoke(lease)

    if chance.random() < 0.5:
        soon(lose)
    with watch_kills(manager, PREFIX, obey, world.scheduler.fail):
        try:
            is_taken = kill(giver)
        except (TimeoutError, NotInQuorum):
            is_taken = False
        assert is_taken == bool(ended)
        world.sleep(2 * WAIT)
        assert is_taken == bool(ended), "nor is it taken later"
    assert not world.keys(f"{PREFIX}/kill/")


@simulated
def test_a_replica_whose_lease_ends_is_not_said_to_be_killed(world: World) -> None:
    client = world.etcd.client()
    lease = join(client, "a")

    def lose() -> None:
        world.sleep(1)
        world.observer.revoke(lease)

    soon(lose)
    done = kill_replica(client, "/f", "job", "a", "why", WAIT, "me")
    assert not done.did
    assert done.left == ("'a': its lease ended before it took the order; its process may live",)


@simulated
def test_a_replica_whose_lease_ends_before_it_is_ordered_is_not_said_to_be_killed(world: World) -> None:
    client = world.etcd.client()
    lease = join(client, "a")

    def lose(call: Call) -> Fate:
        if call.method == "grant":
            world.observer.revoke(lease)
        return DELIVERED

    client.fate = lose
    assert not kill(client)


@simulated
def test_an_order_that_nobody_took_is_withdrawn(world: World) -> None:
    client = world.etcd.client()
    join(client, "a")
    with pytest.raises(NothingThere, match="'a' was not killed in time: the order was not taken"):
        kill_replica(client, "/f", "job", "a", "why", WAIT, "me")
    assert not world.keys(f"{PREFIX}/kill/")


@simulated
def test_an_order_replaces_no_other(world: World) -> None:
    """Neither is told that its order was taken when the other's was withdrawn."""
    first, second = world.etcd.client(), world.etcd.client()
    join(first, "a")
    told: list[str] = []

    def give() -> None:
        with pytest.raises(TimeoutError, match="not taken") as error:
            kill(first)
        told.append(str(error.value))

    soon(give)
    world.until(lambda: world.keys(f"{PREFIX}/kill/"), "the first one lies there")
    with pytest.raises(TimeoutError, match="another order to end it is under way"):
        kill(second)
    assert world.keys(f"{PREFIX}/kill/"), "it is not withdrawn for the other"
    world.until(lambda: told, "the first one is told what became of its own")


@simulated
def test_an_order_whose_answer_was_lost_is_given_once(world: World) -> None:
    client, lost, seen = world.etcd.client(), list[Call](), set[int]()
    join(client, "a")

    def lose_first(call: Call) -> Fate:
        if call.method == "txn" and not lost:
            lost.append(call)
            return LOST_ANSWER
        return DELIVERED

    client.fate = lose_first
    with (
        watch_kills(
            world.observer,
            PREFIX,
            lambda orders: seen.update(one.kv.mod_revision for one in orders),
            world.scheduler.fail,
        ),
        pytest.raises(TimeoutError, match="not taken"),
    ):
        kill(client)
    assert len(seen) == 1
    assert not world.keys(f"{PREFIX}/kill/")


@simulated
def test_an_order_that_was_taken_before_it_was_repeated_is_not_given_again(world: World) -> None:
    """Its member ends with it, as a manager of ours does, or lives on for a while, as a gateway's replica does."""
    giver = world.etcd.client(loses_the_first_answer(arrives=0.5))
    lease, ended = join(world.observer, "a"), list[str]()

    def obey(orders: Sequence[OrderedKill]) -> None:
        for order in orders:
            if order.take():
                ended.append(order.message)
                if world.seed % 2:
                    world.observer.revoke(lease)

    with watch_kills(world.observer, PREFIX, obey, world.scheduler.fail):
        assert kill(giver)
        world.sleep(2 * WAIT)
    assert ended == ["why"]
    assert not world.keys(f"{PREFIX}/kill/")
    assert not world.keys(f"{PREFIX}/ordered/")


@simulated
def test_anothers_order_is_not_taken_for_ones_own(world: World) -> None:
    """One's own was taken before, and its member is still there."""
    giver = world.etcd.client(loses_the_first_answer(arrives=0.5))
    order = kill_key(PREFIX, member_id(join(world.observer, "a")))
    told: list[bool] = []
    soon(lambda: told.append(kill(giver)))
    world.until(lambda: world.keys(order), "it is ordered")
    world.observer.txn((), [Delete(Span(order))])
    world.observer.put(order, b"another's", world.observer.grant(60).id)
    world.until(lambda: told, "the first one is told", WAIT - 1)
    assert told == [True]


@simulated
def test_the_mark_of_an_order_goes_with_its_lease(world: World) -> None:
    """Its giver dies before it could revoke that."""
    client = world.etcd.client()
    join(client, "a")
    soon(lambda: (world.sleep(1), client.cut_off()))
    with pytest.raises(TimeoutError, match="may be taken yet"):
        kill(client)
    assert world.keys(f"{PREFIX}/ordered/")
    world.sleep(WAIT + LEASE_MARGIN + 1)
    assert not world.keys(f"{PREFIX}/ordered/")


@simulated
def test_an_order_that_cannot_be_withdrawn_is_not_said_to_be(world: World) -> None:
    client = world.etcd.client()
    join(client, "a")
    soon(lambda: (world.sleep(1), client.cut_off()))
    with pytest.raises(TimeoutError, match="may be taken yet"):
        kill(client)


@simulated
def test_a_giver_that_could_not_run_does_not_take_the_end_of_its_lease_for_obedience(world: World) -> None:
    told: list[str] = []
    with world.scheduler.process("giver"):
        client = world.etcd.client()
        join(client, "a")

        def give() -> None:
            with pytest.raises(TimeoutError) as error:
                kill(client)
            told.append(str(error.value))

        soon(give)
    world.until(lambda: world.keys(f"{PREFIX}/kill/"), "it is ordered")
    world.scheduler.pause("giver")
    world.sleep(WAIT + LEASE_MARGIN + 1)
    assert not world.keys(kill_key(PREFIX, ""))
    world.scheduler.resume("giver")
    world.until(lambda: told, "it is told")
    assert "could not run" in told[0]
