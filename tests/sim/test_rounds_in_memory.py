"""Rounds under accidents, with the real Participant on both sides. Every other seed's rolls lie in chunks of two seats.

Each node is a loop in a process of its own, as agents are. What all of them are told is checked against the invariants
of docs/protocol.md, whatever the seed did to them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import pytest
from helpers import rdzv_settings
from test_participants_in_memory import LEASE_TTL, Machine, end
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError, RendezvousStateError
from virtual import DELIVERED, LOST_REQUEST, Call, Fate, MemoryClient, flaky
from virtual.keyspace import Transaction
from worlds import World, long_simulated, simulated

from ftcoord import concurrency
from ftcoord.core.death_records import Death, encode
from ftcoord.core.layout import (
    Span,
    death_key,
    decided_key,
    member_id,
    member_of,
    members_span,
    roll_span,
    rolls_span,
    round_key,
)
from ftcoord.core.rendezvous_records import ROLLS, RollSizes, RoundHead, parse_decided
from ftcoord.core.round_situation import RETURN_FACTOR
from ftcoord.etcd.api import Delete, Get, Put
from ftcoord.primitives.group import decided_record
from ftcoord.rendezvous.node import Node
from ftcoord.rendezvous.run_record import RunRecord

IN_TWOS: Final = RollSizes(inline=0, chunk=2)
"""Each roll lies beside its head, two seats to a chunk."""
PREFIX: Final = "/ftcoord/v1/run"
DECIDED: Final = decided_key(PREFIX)


class Started(NamedTuple):
    """What a node was told of a round that it started."""

    number: int
    rank: int
    size: int
    address: str
    port: int
    roll: str


class Agent(Machine):
    """A node that takes part in every round that it is called back to."""

    def __init__(
        self,
        world: World,
        name: str,
        client: MemoryClient,
        nnodes: tuple[int, int],
        rolls: RollSizes | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(world, name, client)
        self.rounds: list[Started] = []
        self.ended: RendezvousError | None = None
        self.node: Node | None = None
        self.worker_fails = concurrency.event()
        self.looks_every = 0.1
        self._rolls = rolls or (IN_TWOS if world.seed % 2 else ROLLS)
        self.settings = rdzv_settings(
            nnodes, **{"last_call_timeout": 2.0, "lease_ttl": LEASE_TTL, "close_timeout": 1.0, **settings}
        )
        self._port = 10_000
        self.begin(self._work)

    def _work(self) -> None:
        node = self.node = Node(self.client, self.settings, self.name, self.name, self._rolls)
        while not self.stop.is_set():
            self._port += 1
            try:
                node.begin()
                found = node.ask(self._port)
            except RendezvousError as error:
                self.ended = error
                self.stop.wait(0.5)
                continue
            if found is not None:
                member = node.participant.member
                assert member is not None
                rank = found.rank_of(member.id)
                assert found.ready
                assert rank is not None
                assert rank != 0 or found.port == self._port, "the others find nobody at that port"
                self.rounds.append(Started(found.number, rank, found.size, found.address, found.port, found.roll))
                self.worker_fails.clear()
                while not (self.stop.wait(self.looks_every) or node.waiting()[0] or self.worker_fails.is_set()):
                    pass
        node.leave("the test is over")

    def lease(self) -> int:
        assert self.node is not None
        return self.node.participant.lease

    def die(self, cause: str) -> None:
        """As with a sentinel, which says why, of all members that this was, and gives the lease up."""
        assert self.node is not None
        ids, lease = self.node.participant.ids, self.lease()
        self.crash()
        death = encode(Death(cause, 0))
        self.world.observer.txn((), [Put(death_key(PREFIX, member), death) for member in ids])
        self.world.etcd.expire(lease)


def agents(
    world: World, count: int, nnodes: tuple[int, int], rolls: RollSizes | None = None, *, wild: bool = False
) -> list[Agent]:
    made = []
    for number in range(count):
        chances = {"lost_requests": 0.03, "lost_answers": 0.03, "late": 0.02, "delay": 0.01} if wild else {}
        fate = flaky(100 * world.seed + number, **chances)
        made.append(Agent(world, f"node{number}", world.etcd.client(fate), nnodes, rolls))
    return made


def work_together(world: World, agents: Iterable[Agent], after: int = 0) -> list[Started]:
    """Wait until these, and no others, are in one round that all of them have started, later than `after`."""
    there = list(agents)

    def last() -> list[Started]:
        return [agent.rounds[-1] for agent in there if agent.rounds]

    def is_round() -> bool:
        told = last()
        alike = len(told) == len(there) and len({(one.number, one.size) for one in told}) == 1
        return alike and told[0].size == len(there) and told[0].number > after

    world.until(is_round, f"a round of {[agent.name for agent in there]}")
    return last()


def check_rounds(agents: Iterable[Agent]) -> None:
    """Everybody is told the same of a number but for its rank, which nobody else has; it takes part in each round once,
    and numbers never go back."""
    by_number: dict[int, object] = {}
    ranks: dict[tuple[int, int], str] = {}
    for agent in agents:
        numbers = [one.number for one in agent.rounds]
        assert numbers == sorted(set(numbers)), (agent.name, numbers)
        for one in agent.rounds:
            assert ranks.setdefault((one.number, one.rank), agent.name) == agent.name
            assert by_number.setdefault(one.number, one._replace(rank=0)) == one._replace(rank=0)


def head(world: World) -> RoundHead:
    """The decided head."""
    (kv,) = world.observer.get(DECIDED).kvs
    record = parse_decided(kv.key, kv.value)
    assert isinstance(record, RoundHead)
    return record


def check_rolls(world: World) -> None:
    """The decided head's roll is all there, under its lease; a new round leaves no other."""
    (kv,) = world.observer.get(DECIDED).kvs
    now = head(world)
    kvs = world.observer.range(Get(roll_span(PREFIX, now.roll))).kvs
    assert len(kvs) == now.chunks
    assert {one.lease for one in kvs} == {kv.lease}


@simulated
def test_nodes_meet_on_a_bad_network(world: World) -> None:
    group = agents(world, 3, (3, 3), wild=True)
    work_together(world, group)
    end(world, group)
    check_rounds(group)


@simulated
def test_a_node_that_dies_is_replaced_by_a_spare(world: World) -> None:
    group = agents(world, 3, (2, 2))
    world.until(lambda: sum(bool(agent.rounds) for agent in group) == 2, "a round of two")
    spare = next(agent for agent in group if not agent.rounds)
    seated = [agent for agent in group if agent is not spare]
    victim = seated[world.seed % 4 // 2]
    first = seated[0].rounds[-1]
    victim.crash()
    survivor = next(agent for agent in seated if agent is not victim)
    work_together(world, [survivor, spare], after=first.number)
    assert survivor.rounds[-1].rank == 0, "rank 0 goes to one that has been there"
    end(world, [survivor, spare])
    check_rounds(group)


@simulated
def test_a_round_shrinks_and_grows(world: World) -> None:
    group = agents(world, 3, (1, 4))
    work_together(world, group)
    group[0].crash()
    work_together(world, group[1:])
    group.append(Agent(world, "node9", world.etcd.client(), (1, 4)))
    work_together(world, group[1:])
    end(world, group[1:])
    check_rounds(group)


@simulated
def test_an_outage_longer_than_the_lease_ends_no_round(world: World) -> None:
    group = agents(world, 3, (3, 3))
    before = work_together(world, group)
    with world.etcd.outage():
        world.sleep(10 * LEASE_TTL)
    world.sleep(3 * LEASE_TTL)
    assert [agent.rounds[-1] for agent in group] == before, "nobody was called back"
    end(world, group)
    check_rounds(group)


@long_simulated
def test_an_etcd_that_hung_ends_no_round(world: World) -> None:
    """For 37 seconds, and for ten minutes. It ends all leases when it goes on."""
    group = agents(world, 3, (1, 3))
    before = work_together(world, group)
    for seconds in (37, 600):
        leases = {agent.lease() for agent in group}
        with world.etcd.outage(hangs=True):
            world.sleep(seconds)
        world.until(lambda leases=leases: not leases & {agent.lease() for agent in group}, "all have others")
        world.sleep(3 * LEASE_TTL)
        assert [agent.rounds[-1] for agent in group] == before, "somebody was called back"
    crashed, *others = random.sample(group, 3)
    crashed.crash()
    work_together(world, others, before[0].number)
    end(world, others)
    check_rounds(group)


@simulated
def test_nodes_return_to_their_seats_though_their_agents_seldom_look(world: World) -> None:
    """`--monitor-interval` may be longer than a lease."""
    group = agents(world, 3, (1, 3))
    before = work_together(world, group)
    for agent in group:
        agent.looks_every = 3.0 * LEASE_TTL
    world.sleep(1)
    for lease in {agent.lease() for agent in group}:
        world.etcd.expire(lease)
    world.sleep(10 * LEASE_TTL)
    assert [agent.rounds[-1] for agent in group] == before, "somebody was called back"
    end(world, group)
    check_rounds(group)


@long_simulated
def test_a_lost_lease_is_no_lost_node(world: World) -> None:
    """An etcd that hung and went on may have ended the leases of all, or of most. Nobody's workers are stopped."""
    group = agents(world, 4, (1, 4))
    before = work_together(world, group)
    for _ in range(3):
        some = random.sample(group, random.choice((3, 4)))
        for agent in some:
            world.etcd.expire(agent.lease())
        world.sleep(3 * LEASE_TTL)
        assert [agent.rounds[-1] for agent in group] == before, "somebody was called back"
    crashed, *others = random.sample(group, 4)
    crashed.crash()
    work_together(world, others, before[0].number)
    end(world, others)
    check_rounds(group)


def lose_leases(world: World, group: list[Agent]) -> list[Started]:
    """Have all lose their leases, and come back to their seats; the round that they are in."""
    before = work_together(world, group)
    for lease in {agent.lease() for agent in group}:
        world.etcd.expire(lease)
    members = Get(members_span(PREFIX), keys_only=True)
    world.until(
        lambda: (
            {member_of(kv.key) for kv in world.observer.range(members).kvs}
            == {member_id(agent.lease()) for agent in group}
        ),
        "all are back",
    )
    world.sleep(1)
    assert [agent.rounds[-1] for agent in group] == before, "somebody was called back"
    return before


def end_at_once(world: World, others: list[Agent], before: list[Started], *why: str) -> None:
    """Wait until the others are in another round, since the one before was recalled for one of these reasons, and at
    once."""
    began = concurrency.now()
    world.until(lambda: all(agent.rounds[-1].number > before[0].number for agent in others), "another round")
    settings = others[0].settings
    assert concurrency.now() - began < settings.rounds.last_call_timeout * RETURN_FACTOR + 1, (
        "nobody waited for a lease's time"
    )
    told = parse_decided(DECIDED, world.keys(DECIDED)[DECIDED]).before
    assert any(one in told for one in why), told


@simulated
def test_who_dies_in_a_seat_that_it_came_back_to_is_dead_at_once_and_by_name(world: World) -> None:
    group = agents(world, 3, (1, 3))
    before = lose_leases(world, group)
    dead, *others = random.sample(group, 3)
    dead.die("host7 (pid 4711) was killed by signal 9 (SIGKILL)")
    end_at_once(world, others, before, "host7 (pid 4711) was killed by signal 9 (SIGKILL)")
    end(world, others)
    check_rounds(group)


@simulated
def test_who_leaves_a_seat_that_it_came_back_to_is_gone_at_once(world: World) -> None:
    group = agents(world, 3, (1, 3))
    before = lose_leases(world, group)
    left, *others = random.sample(group, 3)
    left.stop.set()
    end_at_once(world, others, before, "left (the test is over)")
    end(world, others)
    check_rounds(group)


@simulated
def test_whose_worker_fails_after_it_came_back_to_its_seat_has_the_round_recalled_at_once(world: World) -> None:
    group = agents(world, 3, (1, 3))
    before = lose_leases(world, group)
    random.choice(group).worker_fails.set()
    end_at_once(world, group, before, "came back for a new round")
    end(world, group)
    check_rounds(group)


@simulated
def test_a_host_that_is_lost_long_after_all_came_back_is_noticed_when_its_lease_ends(world: World) -> None:
    """Unless it is the decider's: the next decider cannot tell when they came back."""
    group = agents(world, 3, (1, 3))
    before = lose_leases(world, group)
    world.sleep(2 * LEASE_TTL)
    members = Get(members_span(PREFIX), keys_only=True)
    oldest = min(world.observer.range(members).kvs, key=lambda kv: kv.create_revision)
    crashed = random.choice([agent for agent in group if agent.lease() != oldest.lease])
    others, lease = [agent for agent in group if agent is not crashed], crashed.lease()
    crashed.crash()
    world.until(lambda: all(kv.lease != lease for kv in world.observer.range(members).kvs), "its lease has ended")
    end_at_once(world, others, before, "is gone (its lease ended)")
    end(world, others)
    check_rounds(group)


@simulated
def test_one_that_came_back_dies_while_another_has_still_to_come(world: World) -> None:
    """What was known of it while it was gone for the first time is known no longer."""
    group = agents(world, 4, (1, 4))
    before = work_together(world, group)
    late, dead, *others = random.sample(group, 4)
    lease = dead.lease()
    late.client.cut_off()
    for agent in (late, dead):
        world.etcd.expire(agent.lease())
    world.etcd.expire(others[0].lease())  # so that most have gone in one moment
    world.until(lambda: dead.node is not None and dead.node.participant.joined and dead.lease() != lease, "it is back")
    world.sleep(0.5)
    dead.die("host7 was killed")
    # Whoever knows what the late one said last, which decided before, knows that it was the first to go.
    end_at_once(
        world, others, before, "host7 was killed", f"{late.name} is gone (its lease ended); 1 more node followed"
    )
    late.stop.set()
    late.client.reconnect()
    end(world, [late, *others])
    check_rounds(group)


@simulated
def test_a_node_that_etcd_does_not_answer_on_its_way_back_is_not_forgotten(world: World) -> None:
    """It has another lease, and no key under it: nobody else knows of it, and no event would reach it."""
    blocked_until = -1.0

    def lost(call: Call) -> Fate:
        return LOST_REQUEST if call.method == "txn" and concurrency.now() < blocked_until else DELIVERED

    unlucky, *others = group = [Agent(world, "unlucky", world.etcd.client(lost), (1, 3)), *agents(world, 2, (1, 3))]
    before = work_together(world, group)
    world.sleep(1)
    blocked_until = concurrency.now() + 2 * unlucky.settings.times.request_timeout
    world.etcd.expire(unlucky.lease())
    after = work_together(world, others, before[0].number)
    work_together(world, group, after[0].number)
    end(world, group)
    check_rounds(group)


@simulated
def test_of_those_that_lost_their_leases_one_does_not_come_back(world: World) -> None:
    group = agents(world, 4, (1, 4))
    before = work_together(world, group)
    leases = [agent.lease() for agent in group]
    crashed, *others = random.sample(group, 4)
    crashed.crash()
    for lease in leases:
        world.etcd.expire(lease)
    began = concurrency.now()
    work_together(world, others, before[0].number)
    assert concurrency.now() - began < 3 * LEASE_TTL + 3 * others[0].settings.rounds.last_call_timeout
    end(world, others)
    check_rounds(group)


@simulated
def test_a_node_that_was_replaced_does_not_come_back_into_its_old_round(world: World) -> None:
    group = agents(world, 4, (1, 4))
    before = work_together(world, group)
    late, *others = random.sample(group, 4)
    late.client.cut_off()
    world.etcd.expire(late.lease())
    after = work_together(world, others, before[0].number)
    late.client.reconnect()
    work_together(world, group, after[0].number)
    end(world, group)
    check_rounds(group)


@simulated
def test_an_etcd_that_was_wiped_disturbs_nobody_and_rounds_go_on_from_the_highest_number(world: World) -> None:
    empty = world.etcd.snapshot()
    group = agents(world, 3, (3, 3))
    before = work_together(world, group)
    world.etcd.rewind(empty)
    world.sleep(5 * LEASE_TTL)
    assert [agent.rounds[-1] for agent in group] == before, "somebody was called back"
    random.choice(group).worker_fails.set()
    work_together(world, group, before[0].number)
    end(world, group)
    check_rounds(group)


@simulated
def test_a_host_that_is_lost_while_etcd_is_wiped_or_restored_is_replaced(world: World) -> None:
    """No decider has read the round in which it was: nobody sees its seat vacant."""
    empty = world.etcd.snapshot()
    group = agents(world, 3, (1, 3))
    work_together(world, group)
    old = world.etcd.snapshot()
    group[0].worker_fails.set()
    before = work_together(world, group, group[1].rounds[-1].number)
    crashed, *others = random.sample(group, 3)
    crashed.crash()
    world.etcd.rewind(random.choice((empty, old)))
    began = concurrency.now()
    work_together(world, others, before[0].number)
    assert concurrency.now() - began < 3 * LEASE_TTL + 3 * others[0].settings.rounds.last_call_timeout
    end(world, others)
    check_rounds(others)


@simulated
def test_an_etcd_that_was_restored_disturbs_nobody(world: World) -> None:
    """Its record is of an earlier round, with seats that nobody has."""
    group = agents(world, 3, (1, 3))
    work_together(world, group)
    old = world.etcd.snapshot()
    group[0].worker_fails.set()
    before = work_together(world, group, group[1].rounds[-1].number)
    world.etcd.rewind(old)
    world.sleep(5 * LEASE_TTL)
    assert [agent.rounds[-1] for agent in group] == before, "somebody was called back"
    random.choice(group).worker_fails.set()
    work_together(world, group, before[0].number)
    end(world, group)
    check_rounds(group)


@simulated
def test_a_number_is_not_given_again_that_nodes_took_their_seats_in_before_etcd_was_restored(world: World) -> None:
    """Nor where nobody has started that round, and its decider is dead."""

    def decider() -> Agent:
        oldest = min(world.observer.range(Get(members_span(PREFIX))).kvs, key=lambda kv: kv.create_revision)
        return next(agent for agent in group if agent.lease() == oldest.lease)

    group = agents(world, 3, (2, 3))
    (number, *_) = work_together(world, group)[0]
    old = world.etcd.snapshot()
    dead = decider()
    dead.client.fate = lambda call: LOST_REQUEST if f'"seated":{number + 1}' in repr(call.asked) else DELIVERED
    others = [agent for agent in group if agent is not dead]
    for agent in group:
        agent.worker_fails.set()
    taken = f'"seated":{number + 1}'.encode()
    span = members_span(PREFIX)
    world.until(lambda: sum(taken in kv.value for kv in world.observer.range(Get(span)).kvs) == 2, "two are seated")
    dead.crash()
    world.etcd.expire(dead.lease())
    world.etcd.rewind(old)
    world.etcd.expire(dead.lease())
    assert work_together(world, others, number)[0].number > number + 1
    end(world, others)
    check_rounds(group)


@simulated
def test_the_number_of_a_round_whose_record_was_deleted_is_not_given_again(world: World) -> None:
    """It was decided after all of these had looked for what earlier rounds left, so only its fence tells of it."""
    first = Agent(world, "first", world.etcd.client(), (2, 2))
    span = members_span(PREFIX)
    world.until(lambda: world.observer.range(Get(span)).kvs, "it has joined, and waits")
    planted: list[Call] = []

    def fate(call: Call) -> Fate:
        if not planted and _puts_below(call, span):
            planted.append(call)
            world.observer.put(round_key(PREFIX, 1), b"")
        return DELIVERED

    group = [first, Agent(world, "second", world.etcd.client(fate), (2, 2))]
    assert work_together(world, group)[0].number == 2
    end(world, group)
    check_rounds(group)


@simulated
def test_a_run_that_was_started_again_goes_on_though_etcd_is_restored_to_its_end(world: World) -> None:
    """The end that etcd shows is one that the nodes have left behind. It also shows none of the old run's nodes."""
    ended = agents(world, 2, (2, 3))
    first = work_together(world, ended)
    assert ended[0].node is not None
    RunRecord(world.observer, ended[0].settings).close("it failed", "failed", ended[0].node.speaker)
    world.until(lambda: all(isinstance(one.ended, RendezvousClosedError) for one in ended), "both hear of the end")
    end(world, ended)
    old = world.etcd.snapshot()
    group = agents(world, 2, (2, 3))
    before = work_together(world, group, after=first[0].number)
    world.etcd.rewind(old)
    if random.random() < 0.5:
        group.append(Agent(world, "newcomer", world.etcd.client(), (2, 3)))
    else:
        world.sleep(random.uniform(0, 3 * LEASE_TTL))
        random.choice(group).worker_fails.set()
    work_together(world, group, before[0].number)
    end(world, group)
    check_rounds(group)


# -- rolls in chunks --------------------------------------------------------------------------------------------------


@simulated
def test_a_rounds_ranks_are_those_of_its_roll(world: World) -> None:
    group = agents(world, 5, (5, 5), IN_TWOS)
    told = work_together(world, group)
    assert head(world).chunks == 3
    check_rolls(world)
    group[world.seed % 5].crash()
    left = [agent for agent in group if agent is not group[world.seed % 5]]
    left.append(Agent(world, "node9", world.etcd.client(), (5, 5), IN_TWOS))
    again = work_together(world, left, after=told[0].number)
    check_rolls(world)
    assert len(world.keys(rolls_span(PREFIX).start)) == head(world).chunks, "the old roll is gone"
    kept = dict(zip([agent.name for agent in group], [one.rank for one in told], strict=True))
    same = [kept.get(agent.name) == one.rank for agent, one in zip(left, again, strict=True)]
    assert sum(same) >= 3, "survivors keep their ranks, but for one that may have to take rank 0"
    end(world, left)
    check_rounds([*group, *left])


def in_small_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A roll is written in several transactions before its head, a chunk each."""
    monkeypatch.setattr(decided_record, "MOST_OPERATIONS", 1)


def test_deciders_die_while_they_write_a_roll(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of it is there, and no head names it: the next decider decides, and deletes what is left."""
    in_small_transactions(monkeypatch)

    @simulated
    def scenario(world: World) -> None:
        written: list[int] = []

        def dies(call: Call) -> Fate:
            """The host with this fate crashes when it has written a chunk."""
            chunks = _puts_below(call, rolls_span(PREFIX))
            if chunks:
                written.append(chunks)
            return Fate(arrives=10_000) if len(written) > 1 else DELIVERED

        first = Agent(world, "first", world.etcd.client(dies), (4, 4), IN_TWOS)
        world.until(lambda: world.keys(members_span(PREFIX).start), "it is the decider")
        group = [Agent(world, f"node{n}", world.etcd.client(), (4, 4), IN_TWOS) for n in range(3)]
        world.until(lambda: len(written) > 1, "it has written a part of the roll")
        first.crash()
        group.append(Agent(world, "node3", world.etcd.client(), (4, 4), IN_TWOS))
        work_together(world, group)
        check_rolls(world)
        assert len(world.keys(rolls_span(PREFIX).start)) == 2, "what the dead decider left is gone"
        end(world, group)
        check_rounds(group)

    scenario()


def test_answers_about_a_roll_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests too, and others arrive late, when somebody else has decided."""
    in_small_transactions(monkeypatch)

    @simulated
    def scenario(world: World) -> None:
        group = agents(world, 4, (2, 4), IN_TWOS, wild=True)
        told = work_together(world, group)
        group[world.seed % 4].crash()
        left = [agent for agent in group if agent is not group[world.seed % 4]]
        work_together(world, left, after=told[0].number)
        check_rolls(world)
        end(world, left)
        check_rounds(group)

    scenario()


def reads_chunk(call: Call) -> bool:
    """Whether a member looks for its seat."""
    rolls = rolls_span(PREFIX).start
    return isinstance(call.asked, Get) and not call.asked.span.is_prefix and call.asked.span.start.startswith(rolls)


@simulated
def test_a_member_that_reads_late_finds_its_roll_gone_and_joins_the_next_round(world: World) -> None:
    late: list[float] = []

    def slow(call: Call) -> Fate:
        """The first read of a chunk takes until another round was decided."""
        if reads_chunk(call) and not late:
            late.append(concurrency.now())
            return Fate(arrives=1.4)  # less than the time-out of a call
        return DELIVERED

    others = agents(world, 1, (1, 3), IN_TWOS)
    work_together(world, others)
    reader = Agent(world, "reader", world.etcd.client(slow), (1, 3), IN_TWOS)
    world.until(lambda: bool(late), "it reads")
    number = head(world).number
    run = Settler(world)
    run.replace_round()
    told = work_together(world, [*others, reader], after=number)
    assert told[0].number > number
    assert reader.ended is None
    end(world, [*others, reader])
    check_rounds([*others, reader])


@simulated
def test_a_member_that_reads_its_seat_when_its_time_is_nearly_over_takes_it(world: World) -> None:
    """The others count on it by then, and all of them read at this moment."""
    waits = 10.0
    client = world.etcd.client(lambda call: Fate(answers=0.5) if reads_chunk(call) else DELIVERED)
    first = Agent(world, "first", client, (2, 2), IN_TWOS, join_timeout=waits)
    world.sleep(waits - 0.2)
    other = Agent(world, "other", world.etcd.client(), (2, 2), IN_TWOS)
    work_together(world, [first, other])
    assert first.ended is None
    end(world, [first, other])
    check_rounds([first, other])


class Settler:
    """Decides as an older member might: another round in place of the present one."""

    def __init__(self, world: World) -> None:
        self._world = world

    def replace_round(self) -> None:
        """The same head under the next number, recalled; its roll is that of nobody, and the old one is deleted."""
        (kv,) = self._world.observer.get(DECIDED).kvs
        raw = json.loads(kv.value)
        raw |= {"number": raw["number"] + 1, "roll": "nobody", "chunks": 1, "recalled": "so", "ready": False, "by": "x"}
        chunk = {"v": 4, "members": [], "nodes": [], "hosts": [], "ranks": [], "away": [], "rounds": []}
        raw["size"] = 1
        chunk |= {"members": ["00"], "nodes": ["00"], "hosts": ["00"], "ranks": [0]}
        key = f"{roll_span(PREFIX, 'nobody').start}0"
        ops = [
            Delete(roll_span(PREFIX, json.loads(kv.value)["roll"])),
            Put(DECIDED, json.dumps(raw).encode(), kv.lease),
            Put(key, json.dumps(chunk).encode(), kv.lease),
        ]
        self._world.observer.txn((), ops)


@simulated
def test_a_deleted_record_comes_back_with_its_roll(world: World) -> None:
    group = agents(world, 3, (3, 3), IN_TWOS)
    first = work_together(world, group)
    world.observer.txn((), [Delete(Span(DECIDED)), Delete(rolls_span(PREFIX))])
    work_together(world, group, after=first[0].number)
    check_rolls(world)
    end(world, group)
    check_rounds(group)


@simulated
def test_a_roll_that_somebody_deleted_is_named_until_the_record_is_deleted_too(world: World) -> None:
    group = agents(world, 2, (1, 3), IN_TWOS)
    first = work_together(world, group)
    world.observer.delete(rolls_span(PREFIX))
    reader = Agent(world, "reader", world.etcd.client(), (1, 3), IN_TWOS)
    world.until(lambda: reader.ended is not None or len(reader.rounds) > 0, "it is in, or knows why not")
    if not reader.rounds:
        assert isinstance(reader.ended, RendezvousStateError)
        assert DECIDED in str(reader.ended)
        world.observer.delete(Span(DECIDED))
    work_together(world, [*group, reader], after=first[0].number)
    check_rolls(world)
    end(world, [*group, reader])
    check_rounds([*group, reader])


@simulated
def test_a_run_with_rolls_is_closed_by_those_that_have_a_seat(world: World) -> None:
    group = agents(world, 3, (2, 2), IN_TWOS)
    world.until(lambda: sum(bool(agent.rounds) for agent in group) == 2, "a round of two")
    spare = next(agent for agent in group if not agent.rounds)
    seated = [agent for agent in group if agent is not spare]
    assert spare.node is not None
    assert seated[0].node is not None
    run = RunRecord(world.observer, spare.settings)
    run.close("a spare failed", "failed", spare.node.speaker)
    assert not head(world).closed
    run.close("a participant failed", "failed", seated[0].node.speaker)
    assert head(world).closed == "a participant failed"
    world.until(lambda: all(isinstance(one.ended, RendezvousClosedError) for one in seated), "both hear of the end")
    end(world, group)


@simulated
def test_a_run_with_rolls_that_failed_is_started_again(world: World) -> None:
    """A new node that hears of the closed head waits for nothing, though it has to read its chunk."""
    group = agents(world, 2, (2, 2), IN_TWOS)
    first = work_together(world, group)
    assert group[0].node is not None
    RunRecord(world.observer, group[0].settings).close("it failed", "failed", group[0].node.speaker)
    world.until(lambda: all(isinstance(one.ended, RendezvousClosedError) for one in group), "both hear of the end")
    end(world, group)
    again = agents(world, 2, (2, 2), IN_TWOS)
    work_together(world, again, after=first[0].number)
    check_rolls(world)
    end(world, again)
    check_rounds(again)


def _puts_below(call: Call, span: Span) -> int:
    asked = call.asked
    return sum(isinstance(op, Put) and op.key in span for op in asked.success) if isinstance(asked, Transaction) else 0
