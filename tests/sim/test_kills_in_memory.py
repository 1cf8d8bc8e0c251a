"""Orders to end a manager's process: who gave one returns when its member is gone."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from replicas_in_memory import PREFIX, join
from virtual import DELIVERED, LOST_ANSWER, Call, Fate, MemoryClient
from worlds import World, simulated

from ftcoord import concurrency
from ftcoord.coordination.replica import ORDER_TTL, order_kill, watch_kills
from ftcoord.core.layout import kill_key, member_id, member_of
from ftcoord.errors import NotInQuorum
from ftcoord.etcd.api import KeyValue
from ftcoord.operator.orders import NothingThere, Order, planned

WAIT = 3.0
"""Seconds that an order is waited for."""


def soon(call: Callable[[], object]) -> None:
    """Make a call on a thread of its own."""
    concurrency.thread(call, "another").start()


def kill(client: MemoryClient, name: str = "a") -> None:
    order_kill(client, PREFIX, name, "why", concurrency.now() + WAIT)


@simulated
def test_a_kill_returns_when_the_member_is_gone(world: World) -> None:
    """Its manager reads the order and exits, or its lease ends, or neither in time; requests take their time."""
    chance = random.Random(world.seed)
    giver = world.etcd.client(lambda _call: Fate(chance.uniform(0, 0.2), chance.uniform(0, 0.2)))
    manager = world.etcd.client()
    lease = join(manager, "a")
    there = f"{PREFIX}/members/{member_id(lease)}"
    assert world.keys(there)

    def obey(order: KeyValue) -> None:
        assert (member_of(order.key), order.value) == (member_id(lease), b"why")
        world.sleep(chance.choice([0.0, 1.0, chance.uniform(WAIT - 0.5, WAIT + 0.2), WAIT + 1]))
        manager.revoke(lease)

    def lose() -> None:
        world.sleep(chance.choice([0.0, 0.1, 0.3, 1.0, WAIT]))
        world.observer.revoke(lease)

    if chance.random() < 0.5:
        soon(lose)
    with watch_kills(manager, PREFIX, obey, world.scheduler.fail):
        try:
            kill(giver)
        except (TimeoutError, NotInQuorum):
            pass
        else:
            assert not world.keys(there)
    world.sleep(ORDER_TTL + 1)
    assert not world.keys(f"{PREFIX}/kill/"), "the order goes by itself"


@simulated
def test_an_order_that_nobody_obeys_stands_for_a_minute(world: World) -> None:
    """A manager that etcd cannot reach for a while obeys it then."""
    client = world.etcd.client()
    join(client, "a")
    with pytest.raises(NothingThere, match="'a' was not killed in time: it is still a member, and may end yet"):
        planned(client, "/f", Order("kill", "job", "a", "me", "", wait=WAIT), 5.0)[1]()
    assert world.keys(f"{PREFIX}/kill/")
    world.sleep(ORDER_TTL + 1)
    assert not world.keys(f"{PREFIX}/kill/")


@simulated
def test_no_order_is_written_for_a_member_that_is_gone(world: World) -> None:
    client = world.etcd.client()
    lease = join(client, "a")

    def lose(call: Call) -> Fate:
        if call.method == "grant":
            world.observer.revoke(lease)
        return DELIVERED

    client.fate = lose
    kill(client)
    assert not world.keys(f"{PREFIX}/kill/")


@simulated
def test_the_newest_of_a_name_is_meant(world: World) -> None:
    """An older one may be a predecessor whose lease has not ended yet."""
    client = world.etcd.client()
    join(client, "a")
    newest = join(client, "a")
    with pytest.raises(TimeoutError):
        kill(client)
    (order,) = world.keys(f"{PREFIX}/kill/")
    assert order == kill_key(PREFIX, member_id(newest))
    with pytest.raises(NotInQuorum):
        kill(client, "b")


@simulated
def test_an_order_whose_answer_was_lost_is_written_again(world: World) -> None:
    fates = iter([LOST_ANSWER, Fate(arrives=0.5)])
    giver = world.etcd.client(lambda call: next(fates, DELIVERED) if call.method == "txn" else DELIVERED)
    lease, orders = join(world.observer, "a"), set[int]()

    def obey(order: KeyValue) -> None:
        orders.add(order.lease)
        world.observer.revoke(lease)

    with watch_kills(world.observer, PREFIX, obey, world.scheduler.fail):
        kill(giver)
        world.sleep(WAIT)
    assert len(orders) == 1


@simulated
def test_who_is_cut_off_from_etcd_is_not_told_that_nothing_was_ordered(world: World) -> None:
    client = world.etcd.client()
    join(client, "a")
    client.fate = lambda call: LOST_ANSWER if call.method == "txn" else DELIVERED
    with pytest.raises(TimeoutError, match="may have the order"):
        kill(client)
    assert world.keys(f"{PREFIX}/kill/")
