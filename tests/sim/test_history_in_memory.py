"""What a job's history says, against what was decided: by real participants, in memory and in virtual time."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final

import pytest
from doors import Door
from reports import seen
from test_asks_in_memory import PAIR, ask, in_background, replica_of
from test_participants_in_memory import LEASE_TTL, end
from test_rounds_in_memory import DECIDED, PREFIX, Agent, agents, work_together
from virtual import MemoryClient, MemoryEtcd
from worlds import World, long_simulated, play, simulated

from ftcoord import concurrency
from ftcoord.coordination.replica import Replica
from ftcoord.core.death_records import Death, encode
from ftcoord.core.history import HistoryEvent, PastEvent, read_history
from ftcoord.core.layout import KEY_PREFIX, Span, death_key, decided_key, events_span, member_id
from ftcoord.core.rendezvous_records import FAILED, Round, RoundHead, WorkerFailure, parse_decided
from ftcoord.core.verdict import Publish
from ftcoord.errors import EtcdAuthError, EtcdError, RequestRefused
from ftcoord.etcd.api import Compare, Etcd, Get, KeyValue, Op, Put, TxnResult
from ftcoord.operator.history import explain
from ftcoord.operator.reading import read_job
from ftcoord.operator.report import paragraph
from ftcoord.operator.status import Rules, status_of
from ftcoord.primitives.group.record import KEPT_EVENTS, MOST_OPERATIONS, DecidedRecord, EventLog
from ftcoord.rendezvous.run_record import RunRecord

DECISIONS: Final = {"round", "started", "recalled", "closed"}
OUT_OF_MEMORY: Final = WorkerFailure(7, 1, 0, -1, 9, "was killed by signal 9 (SIGKILL)")
RESET: Final = WorkerFailure(8, 0, 0, 1, 0, "exited with code 1", "RuntimeError: Connection reset by peer")


def history(world: World, prefix: str = PREFIX) -> list[PastEvent]:
    kvs = world.observer.range(Get(events_span(prefix))).kvs
    return read_history((kv.key, kv.value, kv.mod_revision) for kv in kvs)


def fail(agent: Agent, failure: WorkerFailure) -> None:
    """A worker of this agent's does, and its watch says so; the agent comes back a moment later."""
    assert agent.node is not None
    assert agent.node.round is not None
    agent.node.worker_failed(agent.node.round, failure)


def told(record: Round | RoundHead, before: Round | RoundHead | None) -> str:
    """The kind of event that goes with this record; empty for none."""
    if before is None or record.number != before.number:
        return "round" if record.size else "recalled"
    if record.closed and not before.closed:
        return "closed"
    if record.recalled:
        return "recalled"
    return "started" if record.ready and not before.ready else ""


def decisions(world: World) -> list[tuple[int, str, int]]:
    """Of each record that was decided: etcd's revision, the kind, and the round."""
    found, before = [], None
    for event in world.events(DECIDED):
        if event.kind == "put":
            record = parse_decided(event.kv.key, event.kv.value)
            if kind := told(record, before):
                found.append((event.kv.mod_revision, kind, record.number))
            before = record
    return found


def told_decisions(world: World) -> list[tuple[int, str, int]]:
    past = history(world)
    return [(one.revision, one.event.kind, one.event.number) for one in past if one.event.kind in DECISIONS]


def live_through(world: World, group: list[Agent]) -> None:
    """Nodes start, fail, die, are lost and join."""
    first = work_together(world, group)[0].number
    fail(group[0], OUT_OF_MEMORY)
    group[0].worker_fails.set()
    second = work_together(world, group, after=first)[0].number
    group[1].die("node1 was killed by signal 9 (SIGKILL)")
    del group[1]
    third = work_together(world, group, after=second)[0].number
    group.append(Agent(world, "node9", world.etcd.client(), (1, 4)))
    fourth = work_together(world, group, after=third)[0].number
    group[-1].crash()
    group.pop()
    work_together(world, group, after=fourth)


@long_simulated
def test_each_decision_is_in_the_history_and_nothing_else_is(world: World) -> None:
    group = agents(world, 3, (1, 4))
    live_through(world, group)
    assert told_decisions(world) == decisions(world), "written in one transaction"
    ends = {(one.event.kind, one.event.who) for one in history(world) if one.event.is_end}
    assert ends == {("failed", "node0"), ("died", "node1"), ("lost", "node9")}
    world.sleep(30)
    before = world.etcd.revision
    world.sleep(600)
    quiet = [kv for kv in world.observer.range(Get(events_span(PREFIX))).kvs if kv.mod_revision > before]
    assert not quiet, "a round that runs writes nothing"
    (decided,) = world.observer.range(Get(Span(DECIDED))).kvs
    leases = {kv.lease for kv in world.observer.range(Get(events_span(PREFIX))).kvs}
    assert leases == {decided.lease}, "it is there as long as the record"
    end(world, group)


def give_up(agent: Agent, failure: WorkerFailure) -> str:
    """Its agent has used up its restarts: it closes the run, and leaves. What all others are told."""
    assert agent.node is not None
    run = RunRecord(agent.client, agent.settings)
    run.close(f"{agent.name} failed", FAILED, agent.node.speaker, failure, agent.name)
    record = run.read()
    assert record is not None
    end(agent.world, [agent])
    return record.closed


def why(world: World, job: str = "run") -> Any:
    """As `ftcoord why` tells it."""
    keys = read_job(world.observer, KEY_PREFIX, job, with_history=True)
    found = explain(status_of(keys, Rules()), keys)
    return seen({**found, "text": paragraph(found)})


@simulated
def test_a_run_that_ends_since_an_unknown_peer_was_lost_says_so_and_why_names_it_later(world: World) -> None:
    """With max_restarts=0 nobody is there any more when the lost host's lease ends: it alone has left no reason."""
    group = agents(world, 3, (3, 3))
    work_together(world, group)
    lost, peer, other = group
    world.sleep(1)
    lost.crash()
    fail(peer, RESET)
    closed = give_up(peer, RESET)
    assert closed.startswith("node1 failed; first cause: a peer was lost, and nobody knows yet which: node1: worker 8 ")
    assert other.node is not None
    heard = other.node.participant
    world.until(lambda: heard.record is not None and heard.record.closed == closed, "the last node knows why it ends")
    end(world, [other])
    found = why(world)
    assert "a peer was lost, and nobody knows yet which: node1: worker 8" in found.happened
    assert found.do.startswith("See which host of that round")
    world.sleep(2 * LEASE_TTL)
    found = why(world)
    assert found.first is not None
    assert (found.first.kind, found.first.who) == ("lost", lost.name)
    assert found.first.revision <= world.etcd.revision
    assert f"It began with this: {lost.name} is gone (its lease ended)." in found.happened


@simulated
def test_whoever_closes_a_run_names_what_nobody_has_written_yet(world: World) -> None:
    """The decider's host is lost, and would else have told of the worker that failed first."""
    group = agents(world, 3, (3, 3))
    work_together(world, group)
    decider, failing, peer = by_age(world, group)
    decider.crash()
    fail(failing, OUT_OF_MEMORY)
    world.sleep(0.5)
    fail(peer, RESET)
    closed = give_up(peer, RESET)
    first = f"{failing.name}: worker 7 (rank 1, local rank 0) was killed by signal 9 (SIGKILL)"
    assert closed.startswith(f"{peer.name} failed; first cause: {first}")
    end(world, [failing])
    found = why(world)
    assert found.first is not None
    assert (found.first.kind, found.first.who) == ("failed", failing.name)


@simulated
def test_a_decider_that_is_lost_with_its_host_is_in_the_history(world: World) -> None:
    """Its successor tells, also of a round that another one has recalled for what followed."""
    group = [
        Agent(world, f"node{at}", world.etcd.client(), (1, 3), last_call_timeout=4.0 * LEASE_TTL) for at in range(3)
    ]
    first = work_together(world, group)[0].number
    decider, *others = by_age(world, group)
    decider.crash()
    fail(others[0], RESET)
    others[0].worker_fails.set()
    work_together(world, others, after=first)
    (lost,) = [one.event for one in history(world) if one.event.kind == "lost"]
    assert (lost.who, lost.number) == (decider.name, first)
    assert lost.by in {member_id(agent.lease()) for agent in others}
    for agent in others:
        assert agent.node is not None
        assert agent.node.round is not None
        assert agent.node.round.before.startswith(f"{decider.name} is gone (its lease ended)")
    end(world, others)


def by_age(world: World, group: Sequence[Agent]) -> list[Agent]:
    """These, the one that decides first."""
    return sorted(group, key=Agent.decides, reverse=True)


@simulated
def test_with_on_member_loss_ignore_a_death_is_in_the_history(world: World) -> None:
    group = [Agent(world, f"node{at}", world.etcd.client(), (1, 3), on_member_loss="ignore") for at in range(3)]
    first = work_together(world, group)[0].number
    died, lost, other = group
    died.die("node0 was killed by signal 9 (SIGKILL)")
    world.sleep(1)
    lost.crash()
    world.sleep(60)
    assert other.rounds[-1].number == first, "it goes on"
    fail(other, OUT_OF_MEMORY)
    other.worker_fails.set()
    work_together(world, [other], after=first)
    ends = {(one.event.kind, one.event.who, one.event.number) for one in history(world) if one.event.is_end}
    assert ends == {("died", "node0", first), ("lost", "node1", first), ("failed", "node2", first)}
    end(world, [other])


@simulated
def test_a_quorum_of_the_same_replicas_writes_no_event(world: World) -> None:
    with replica_of(world.etcd.client(), PAIR, "a") as one, replica_of(world.etcd.client(), PAIR, "b") as other:
        for step in range(3):
            join = in_background(lambda step=step: ask(one, step))
            ask(other, step)
            join()
        kinds = [(past.event.kind, past.event.number) for past in history(world, PAIR.prefix)]
        assert kinds == [("quorum", 1)]
        assert len([event for event in world.events(decided_key(PAIR.prefix)) if event.kind == "put"]) == 3


def until_both(replica: Replica, size: int = 2) -> None:
    """The first that asks may be answered before the others have come."""
    while len(ask(replica, 0).seats) < size:
        pass


def test_commits_that_fail_without_end_push_no_death_out_of_the_history(caplog: pytest.LogCaptureFixture) -> None:
    """The Manager wants two replicas, the job's address only one: the survivor is answered again and again."""
    caplog.set_level(logging.INFO, "ftcoord.coordination")

    def scenario(world: World) -> None:
        job = replace(PAIR, min_replicas=1)
        client = world.etcd.client()
        with replica_of(world.etcd.client(), job, "a") as one, replica_of(client, job, "b") as other:
            join = in_background(lambda: until_both(other))
            until_both(one)
            join()
            other.leave(5, "b was killed")
            world.until(lambda: len(ask(one, 1).seats) == 1, "it goes on alone")
            died = history(world, job.prefix)
            known = [(past.event.kind, past.event.node, past.event.reason) for past in died]
            assert known[1:] == [("died", "b", "b: b was killed"), ("quorum", "", "1 replica; without b")]
            for failures in range(1, 21):
                ask(one, 1, failures=failures)
            assert history(world, job.prefix) == died
            found = why(world, job.name)
            assert not found.healthy
            assert "20 commits in a row failed with 1 replica" in found.text
            lines = [one.getMessage() for one in caplog.records]
            assert sum("rank 0 of 1" in line for line in lines) == 1
            warned = [line for line in lines if "commits in a row failed" in line]
            assert len(warned) == 1
            assert "min_replica_size is larger than min_replicas=1" in warned[0]

    play(scenario, 0)


@simulated
def test_each_death_of_a_replica_is_told_though_the_quorum_keeps_its_id(world: World) -> None:
    """Each time it is back under its name, and the replicas are the same."""
    with ExitStack() as stack:
        one = stack.enter_context(replica_of(world.etcd.client(), PAIR, "a"))
        for life in range(3):
            client = world.etcd.client()
            other = stack.enter_context(replica_of(client, PAIR, "b"))
            join = in_background(lambda other=other: until_both(other))
            until_both(one)
            join()
            if life < 2:
                client.cut_off()
                death = encode(Death(f"killed in life {life}", 0))
                world.observer.put(death_key(PAIR.prefix, member_id(other.participant.lease)), death)
                world.etcd.expire(other.participant.lease)
        told = [past.event for past in history(world, PAIR.prefix)]
        assert [(one.kind, one.number) for one in told] == [("quorum", 1), ("died", 1), ("died", 1)]
        assert [one.reason for one in told[1:]] == ["b: killed in life 0", "b: killed in life 1"]
        found = why(world, PAIR.name).first
        assert found is not None
        assert found.reason == "b: killed in life 1"


# -- an etcd that takes no history -----------------------------------------------------------------------------


class Refuses(Door):
    """An etcd that refuses all that has to do with history, in one way or another."""

    def __init__(self, etcd: MemoryClient, how: str) -> None:
        super().__init__(etcd)
        self._how = how
        self.refused = 0

    def _refuse(self, error: EtcdError) -> None:
        self.refused += 1
        raise error

    def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Op],
        failure: Sequence[Op] = (),
        *,
        timeout: float | None = None,
    ) -> TxnResult:
        if any(isinstance(op, Put) and "/events/" in op.key for op in success):
            if self._how == "keys":
                self._refuse(EtcdAuthError("etcdserver: permission denied"))
            if self._how == "transactions":
                self._refuse(RequestRefused("etcdserver: too many operations in txn request"))
        return self.real.txn(compares, success, failure, timeout=timeout)


@pytest.mark.parametrize("how", ["keys", "transactions"])
def test_an_etcd_that_takes_no_history_delays_no_decision(how: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "ftcoord")
    doors: list[Refuses] = []

    def scenario(world: World) -> None:
        def door(client: MemoryClient) -> Any:
            doors.append(Refuses(client, how))
            return doors[-1]

        began = concurrency.now()
        group = [Agent(world, f"node{at}", door(world.etcd.client()), (2, 2)) for at in range(2)]
        first = work_together(world, group)[0].number
        fail(group[0], OUT_OF_MEMORY)
        group[0].worker_fails.set()
        work_together(world, group, after=first)
        assert concurrency.now() - began < 5, "it took longer"
        assert not history(world)
        end(world, group)

    play(scenario, 0)
    assert sum(door.refused for door in doors) > 0
    warnings = [one.message for one in caplog.records if "takes no history" in one.message]
    assert len(warnings) == len({*warnings}), "once"


# -- the log itself ----------------------------------------------------------------------------------------------


def happened(number: int) -> HistoryEvent:
    return HistoryEvent("round", number, reason="1 node")


def keys_of(client: Etcd) -> list[KeyValue]:
    return list(client.range(Get(events_span("/g"))).kvs)


def numbers_in(client: Etcd) -> list[int]:
    past = read_history((kv.key, kv.value, kv.mod_revision) for kv in keys_of(client))
    return [one.event.number for one in past]


@pytest.fixture
def client() -> Iterator[MemoryClient]:
    with MemoryEtcd() as etcd:
        yield etcd.client()


def test_the_oldest_events_go_first_and_garbage_is_left_alone(client: MemoryClient) -> None:
    garbage = {"/g/events/0", *(f"/g/events/zzz{at}" for at in range(KEPT_EVENTS))}
    for key in garbage:
        client.put(key, b"garbage")

    def write(log: EventLog, number: int) -> None:
        assert client.txn((), log.ops([happened(number)], 0, client.get("x").revision)).succeeded

    log = EventLog(client, "/g", "me")
    for number in range(KEPT_EVENTS + 40):
        write(log, number)
    assert numbers_in(client) == list(range(40, KEPT_EVENTS + 40))
    write(EventLog(client, "/g", "other"), 9000)
    assert numbers_in(client) == [*range(41, KEPT_EVENTS + 40), 9000], "whoever writes"
    assert {kv.key for kv in keys_of(client)} > garbage - {"/g/events/0"}


def decided_by(client: MemoryClient, decision: Publish[bytes]) -> list[list[Op]]:
    """The transactions in which this is decided."""
    sent: list[list[Op]] = []

    class Counting(Door):
        def txn(self, compares: Sequence[Compare], success: Sequence[Op], *more: Any, **rest: Any) -> TxnResult:
            assert len(success) <= MOST_OPERATIONS
            sent.append([*success])
            return super().txn(compares, success, *more, **rest)

    record = DecidedRecord(Counting(client), "/g", 60, post=lambda apply: None, listener=lambda kv: None, writer="me")
    record.mirror.begin(10)
    record.mirror.adopt(client.range(Get(Span("/g/decided"))))
    record.tell()
    assert record.publish(decision, ())
    record.close()
    return sent


def test_a_decision_that_fills_a_transaction_is_made_without_its_history(client: MemoryClient) -> None:
    events = [happened(number) for number in range(16)]
    puts = [(f"/g/more/{at}", b"") for at in range(MOST_OPERATIONS - 10)]
    (only,) = decided_by(client, Publish(b"1", "it is large", puts=puts, events=events))
    assert not keys_of(client)
    assert len(only) == len(puts) + 1
