"""Rounds whose nodes lose their leases or read late. Two seats fill a chunk.

Each node is a loop in a process of its own, as agents are. What all of them are told is checked against the invariants
of docs/protocol.md, whatever the seed did to them.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final, NamedTuple

import pytest
from helpers import rdzv_settings
from test_participants_in_memory import LEASE_TTL, Machine, end
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError
from virtual import DELIVERED, Call, Fate, MemoryClient, flaky
from worlds import World, play, simulated

from ftcoord import concurrency
from ftcoord.core import rendezvous_records
from ftcoord.core.death_records import Death, encode
from ftcoord.core.layout import (
    all_seats_span,
    death_key,
    decided_key,
    decider_key,
    member_id,
    member_of,
    members_span,
    seats_span,
)
from ftcoord.core.office import parse_office
from ftcoord.core.rendezvous import RETURN_FACTOR
from ftcoord.core.rendezvous_records import (
    STOPPED,
    Round,
    RoundHead,
    Seat,
    chunks_for,
    encode as encode_head,
    encode_seats,
    parse_decided,
)
from ftcoord.etcd.api import Delete, Get, Put
from ftcoord.etcd.retry import TimeLimit
from ftcoord.rendezvous.node import Node
from ftcoord.rendezvous.run_record import RunRecord, change_record, draining

PREFIX: Final = "/ftcoord/v2/run"
DECIDED: Final = decided_key(PREFIX)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_records, "CHUNK", 2)


class Started(NamedTuple):
    """What a node was told of a round that it started."""

    number: int
    rank: int
    size: int
    address: str
    port: int
    name: str


class Agent(Machine):
    """A node that takes part in every round that it is called back to."""

    def __init__(self, world: World, name: str, client: MemoryClient, nnodes: tuple[int, int], **settings: Any) -> None:
        super().__init__(world, name, client)
        self.rounds: list[Started] = []
        self.ended: RendezvousError | None = None
        self.node: Node | None = None
        self.worker_fails = concurrency.event()
        self.looks_every = 0.1
        self.settings = rdzv_settings(
            nnodes, **{"last_call_timeout": 2.0, "lease_ttl": LEASE_TTL, "close_timeout": 1.0, **settings}
        )
        self._port = 10_000
        self.begin(self._work)

    def _work(self) -> None:
        node = self.node = Node(self.client, self.settings, self.name, self.name)
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
                self.rounds.append(Started(found.number, rank, found.size, found.address, found.port, found.name))
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
        office = self.world.observer.get(decider_key(PREFIX)).kvs[0]
        self.world.etcd.expire(lease)
        if parse_office(office.key, office.value).member in ids:
            self.world.etcd.expire(office.lease)

    def decides(self) -> bool:
        """Whether it has the office."""
        office = self.world.observer.get(decider_key(PREFIX)).kvs[0]
        return parse_office(office.key, office.value).member == member_id(self.lease())


def agents(world: World, count: int, nnodes: tuple[int, int], *, wild: bool = False) -> list[Agent]:
    made = []
    for number in range(count):
        chances = {"lost_requests": 0.03, "lost_answers": 0.03, "late": 0.02, "delay": 0.01} if wild else {}
        fate = flaky(100 * world.seed + number, **chances)
        made.append(Agent(world, f"node{number}", world.etcd.client(fate), nnodes))
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
    return parse_decided(kv.key, kv.value)


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
def test_a_host_that_is_lost_long_after_all_came_back_is_noticed_when_its_lease_ends(world: World) -> None:
    """Unless it is the decider's: the next decider cannot tell when they came back."""
    group = agents(world, 3, (1, 3))
    before = lose_leases(world, group)
    world.sleep(2 * LEASE_TTL)
    members = Get(members_span(PREFIX), keys_only=True)
    crashed = random.choice([agent for agent in group if not agent.decides()])
    others, lease = [agent for agent in group if agent is not crashed], crashed.lease()
    crashed.crash()
    world.until(lambda: all(kv.lease != lease for kv in world.observer.range(members).kvs), "its lease has ended")
    end_at_once(world, others, before, "is gone (its lease ended)")
    end(world, others)
    check_rounds(group)


@simulated
def test_a_node_that_leaves_while_it_takes_another_lease_leaves_nothing(world: World) -> None:
    slow, taken = list[float](), list[Call]()

    def fate(call: Call) -> Fate:
        if slow and call.method == "grant":
            taken.append(call)
            return Fate(arrives=slow[0])
        return DELIVERED

    agent = Agent(world, "node", world.etcd.client(fate), (1, 1))
    work_together(world, [agent])
    slow.append(random.uniform(0.1, 1.0))
    world.etcd.expire(agent.lease())
    world.until(lambda: bool(taken), "it takes another lease")
    end(world, [agent])
    world.sleep(2)
    assert not world.observer.range(Get(members_span(PREFIX))).kvs


# -- seats in chunks --------------------------------------------------------------------------------------------------


def reads_chunk(call: Call) -> bool:
    """Whether a member looks for its seat."""
    is_one = isinstance(call.asked, Get) and not call.asked.span.is_prefix
    return is_one and call.asked.span.start.startswith(all_seats_span(PREFIX).start)


@simulated
def test_a_member_that_reads_late_finds_its_seat_gone_and_joins_the_next_round(world: World) -> None:
    late: list[float] = []

    def slow(call: Call) -> Fate:
        """The first read of a chunk takes until another round was decided."""
        if reads_chunk(call) and not late:
            late.append(concurrency.now())
            return Fate(arrives=1.4)  # less than the time-out of a call
        return DELIVERED

    others = agents(world, 1, (1, 3))
    work_together(world, others)
    reader = Agent(world, "reader", world.etcd.client(slow), (1, 3))
    world.until(lambda: bool(late), "it reads")
    number = head(world).number
    run = Settler(world)
    run.replace_round()
    told = work_together(world, [*others, reader], after=number)
    assert told[0].number > number
    assert reader.ended is None
    end(world, [*others, reader])
    check_rounds([*others, reader])


class Settler:
    """Decides as an older member might: another round in place of the present one."""

    def __init__(self, world: World) -> None:
        self._world = world

    def replace_round(self) -> None:
        """The same head under the next number, recalled; its seat is a stranger's, and the old seats are deleted."""
        (kv,) = self._world.observer.get(DECIDED).kvs
        last = parse_decided(kv.key, kv.value)
        seats = (Seat("00", "00", "00"),)
        new = replace(last, number=last.number + 1, size=1, chunks=chunks_for(1), recalled="so", ready=False, by="x")
        puts = [Put(key, value, kv.lease) for key, value in encode_seats(PREFIX, Round.of(new, seats))]
        self._world.observer.txn(
            (), [Delete(seats_span(PREFIX, last.name)), Put(DECIDED, encode_head(new), kv.lease), *puts]
        )


@simulated
def test_a_run_is_closed_by_those_that_have_a_seat(world: World) -> None:
    group = agents(world, 3, (2, 2))
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


@pytest.mark.parametrize("is_drained", [False, True])
def test_who_leaves_while_all_are_to_stop_ends_the_run_unless_its_round_is_recalled(is_drained: bool) -> None:
    """With the run the others' workers may save; a recall has stopped them, and the others go on without it."""

    def leaves(world: World) -> None:
        nodes = agents(world, 3, (1, 3))
        for one in nodes:
            one.looks_every = 1000  # its agent is busy: it stops its workers
        work_together(world, nodes)
        leaver, drained = nodes[0].node, nodes[1].node
        assert leaver is not None
        assert drained is not None
        leaver.run.stop("a test", by="somebody")
        if is_drained:
            drain = functools.partial(draining, leavers=[drained._new_ask(0)], reason="was drained")
            change_record(world.observer, PREFIX, 60, drain, by="somebody", within=TimeLimit(5))
        world.sleep(1)
        leaver.leave("a signal", 5)
        now = head(world)
        assert (now.outcome, bool(now.recalled)) == (("", True) if is_drained else (STOPPED, False))

    for seed in range(5):
        play(leaves, seed)
