"""Quorums of replicas that leave their profiles out, when etcd or somebody else loses the roster that has them."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from test_asks_in_memory import ask, in_background
from test_participants_in_memory import JOB, Trainer, check_quorums, end, train_together, trainers
from worlds import World, simulated

from ftcoord.coordination.replica import Replica
from ftcoord.core.layout import Span, decided_key, decided_span, era_key, members_span, roster_key
from ftcoord.core.quorum_records import QuorumRecord, parse_replica
from ftcoord.errors import ClientClosed
from ftcoord.etcd.api import Event, Get, KeyValue

SOON = 20.0
"""Virtual seconds: less than a request of a trainer waits, so nobody is helped by giving up and asking once more."""
DECIDED = decided_key(JOB.prefix)
ROSTER = roster_key(DECIDED)
ERA = era_key(JOB.prefix)


def train_soon(world: World, group: list[Trainer]) -> None:
    """Some steps of all of them together, before anybody's request is over."""
    began = world.scheduler.time
    train_together(world, group)
    assert world.scheduler.time - began < SOON


def record(world: World) -> dict[str, KeyValue]:
    """The decided quorum's two keys."""
    return {kv.key: kv for kv in world.observer.range(Get(decided_span(JOB.prefix))).kvs}


@simulated
def test_a_step_writes_no_profile(world: World) -> None:
    group = trainers(world, 3)
    train_together(world, group)
    before = record(world)[ROSTER]
    train_together(world, group, steps=10)
    end(world, group[:2])
    members = world.observer.range(Get(members_span(JOB.prefix))).kvs
    (last,) = [parse_replica(kv.key, kv.value) for kv in members]
    assert last.profile, "it is named, and not written"
    end(world, group[2:])
    check_quorums(group)
    sizes = [len(quorum.seats) for quorum in group[2].told]
    changes = sum(before != after for before, after in zip([0, *sizes], sizes, strict=False))
    assert before.version <= len(world.events(ROSTER)) <= changes + 2
    assert len(world.events(DECIDED)) >= 13


@simulated
def test_a_replica_that_a_quorum_was_decided_without_is_in_again(world: World) -> None:
    group = trainers(world, 3)
    train_together(world, group)
    late, others = group[world.seed % 3], [one for one in group if one is not group[world.seed % 3]]
    late.client.cut_off()
    names = frozenset(one.name for one in others)
    world.until(lambda: all(one.names == names for one in others), "a quorum without it")
    late.client.reconnect()
    train_soon(world, group)
    end(world, group)
    check_quorums(group)


@simulated
def test_two_calls_of_a_replica_that_a_quorum_was_decided_without_are_both_answered(world: World) -> None:
    """Both write their request whole, in any order: the last call's request must not be overwritten by the first's."""
    (other,) = trainers(world, 1)
    client = world.etcd.client()
    twice = Replica(client, JOB, "twice", keeps_lease=True)
    ask(twice, 0)
    client.cut_off()
    world.until(lambda: other.names == {other.name}, "a quorum without it")
    told: list[QuorumRecord] = []

    def call(step: int) -> None:
        with suppress(ClientClosed):  # where this test fails, its etcd ends before the calls do
            told.append(ask(twice, step, 100))

    joins = []
    for step in (1, 2):
        joins.append(in_background(partial(call, step)))
        world.sleep(0.01)
    client.reconnect()
    world.until(lambda: len(told) == 2, "both calls are answered", SOON)
    assert told[0] == told[1]
    assert told[0].requests[1].step == 2, "the last call's request counts for both"
    for join in joins:
        join()
    twice.leave(5)
    end(world, [other])


@simulated
def test_a_roster_that_is_deleted_is_put_back(world: World) -> None:
    group = trainers(world, 3)
    train_together(world, group)
    world.observer.delete(Span(ROSTER))
    train_soon(world, group)
    assert record(world)[ROSTER].lease == record(world)[DECIDED].lease
    end(world, group)
    check_quorums(group)


@simulated
def test_a_quorum_that_is_deleted_as_a_whole_is_decided_again(world: World) -> None:
    group = trainers(world, 3)
    train_together(world, group)
    world.observer.delete(decided_span(JOB.prefix))
    train_soon(world, group)
    end(world, group)
    check_quorums(group)


@simulated
def test_a_roster_lives_as_long_as_its_head(world: World) -> None:
    """Whatever lease it came under: the next decision takes it along."""
    group = trainers(world, 2)
    train_together(world, group)
    now = record(world)[ROSTER]
    other = world.observer.grant(3600).id
    world.observer.put(ROSTER, now.value, other)
    train_soon(world, group)
    there = record(world)
    assert there[ROSTER].lease == there[DECIDED].lease != other
    assert there[ROSTER].value == now.value
    end(world, group)
    check_quorums(group)


@simulated
def test_an_era_lives_as_long_as_its_record(world: World) -> None:
    """Whatever lease it came under, or if somebody deletes it. A step does not write it otherwise."""
    group = trainers(world, 2)
    train_together(world, group)
    (began,) = world.events(ERA)
    world.observer.put(ERA, b"", world.observer.grant(3600).id)
    train_soon(world, group)
    world.observer.delete(Span(ERA))
    train_soon(world, group)
    (era,) = world.observer.range(Get(Span(ERA))).kvs
    assert era.lease == began.kv.lease == record(world)[DECIDED].lease
    assert [event.kind for event in world.events(ERA)] == ["put", "put", "put", "delete", "put"]
    world.observer.delete(decided_span(JOB.prefix))
    train_soon(world, group)
    assert [event.kind for event in world.events(ERA)][5:] == ["put"]
    end(world, group)
    check_quorums(group)


@simulated
def test_a_decider_that_missed_the_head_of_a_new_roster_asks_etcd_for_it(world: World) -> None:
    """It can read neither, and the other one alone is no majority: no decision follows that would tell it."""
    deaf = Trainer(world, "deaf", world.etcd.client())
    train_together(world, [deaf])
    group = [deaf, *trainers(world, 3)]
    train_together(world, group)
    lost: list[Event] = []

    def loses(event: Event) -> bool:
        if not lost and event.kv.key == DECIDED:
            lost.append(event)
        return event in lost

    world.scheduler.pause(deaf.name)
    deaf.client.loses = loses
    names = frozenset(one.name for one in group[1:])
    world.until(lambda: all(one.names == names for one in group[1:]), "a quorum without it, and with a new roster")
    end(world, group[2:])
    world.scheduler.resume(deaf.name)
    train_together(world, group[:2])
    end(world, group[:2])
    check_quorums(group)


@simulated
def test_a_newcomer_decides_though_it_knows_no_profile(world: World) -> None:
    """etcd was wiped while replicas asked without their profiles: only they know what they named."""
    empty = world.etcd.snapshot()
    group = trainers(world, 3)
    train_together(world, group)
    for one in group:
        one.client.cut_off()
    world.etcd.rewind(empty)
    newcomer = Trainer(world, "replica9", world.etcd.client())
    world.until(lambda: newcomer.told, "it is alone, and decides")
    for one in group:
        one.client.reconnect()
    group.append(newcomer)
    train_soon(world, group)
    end(world, group)
    for one in group:
        ids = [quorum.id for quorum in one.told]
        assert ids == sorted(ids), one.name
