"""What a job's history says, against what was decided: by real participants, in memory and in virtual time."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from typing import Any, Final

import pytest
from members import Door
from test_asks_in_memory import PAIR, ask, in_background, replica_of
from test_participants_in_memory import LEASE_TTL, end
from test_rounds_in_memory import DECIDED, PREFIX, Agent, agents, work_together
from virtual import DELIVERED, Call, Fate, MemoryClient, MemoryEtcd
from worlds import World, long_simulated, play, simulated

from ftcoord import concurrency
from ftcoord.coordination.address import Job
from ftcoord.coordination.replica import Replica
from ftcoord.core.death_records import Death, encode
from ftcoord.core.event_records import HISTORY_TTL, KEPT_EVENTS, HistoryEvent, PastEvent, WorkerFailure, read_history
from ftcoord.core.layout import (
    KEY_PREFIX,
    Span,
    death_key,
    decided_key,
    event_revision,
    events_span,
    member_id,
    member_key,
    members_span,
)
from ftcoord.core.rendezvous_records import FAILED, ROLLS, Round, RoundHead, parse_decided, parse_join_request
from ftcoord.core.verdict import Publish
from ftcoord.errors import EtcdAuthError, EtcdError, EtcdNoSpace, EtcdUnavailable, LeaseLost, RequestRefused
from ftcoord.etcd.api import Compare, Delete, Etcd, Get, KeyValue, Lease, Op, Put, TxnResult
from ftcoord.operator.acting import close_run
from ftcoord.operator.orders import evict_members, find_members
from ftcoord.operator.past import explain
from ftcoord.operator.reading import read_events, read_job
from ftcoord.operator.status import Rules, tell_job
from ftcoord.operator.told import Explanation
from ftcoord.primitives.group.decided_record import MOST_OPERATIONS, DecidedRecord
from ftcoord.primitives.group.event_log import OFF, EventLog
from ftcoord.primitives.write_once import WriteOutcome, write_once
from ftcoord.rendezvous.policy import LEASE_GRACE
from ftcoord.rendezvous.run_record import RunRecord

DECISIONS: Final = {"round", "started", "recalled", "limits", "closed"}
OUT_OF_MEMORY: Final = WorkerFailure(7, 1, 0, -1, 9, "was killed by signal 9 (SIGKILL)")
EXITED: Final = WorkerFailure(9, 1, 0, 3, 0, "exited with code 3")
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
    """The kind of event that goes with this record."""
    if before is None or record.number != before.number:
        return "round" if record.size else "recalled"
    if record.closed and not before.closed:
        return "closed"
    if record.recalled:
        return "recalled"
    return "started" if record.ready and not before.ready else "limits"


def decisions(world: World) -> list[tuple[int, str, int]]:
    """Of each record that was decided: etcd's revision, the kind, and the round."""
    found, before = [], None
    for event in world.events(DECIDED):
        if event.kind == "put":
            record = parse_decided(event.kv.key, event.kv.value)
            found.append((event.kv.mod_revision, told(record, before), record.number))
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
    (lost,) = (one.event for one in history(world) if one.event.kind == "lost")
    assert lost.wall_ms - lost.since_ms == 1000 * (LEASE_TTL + LEASE_GRACE)
    world.sleep(30)
    before = world.etcd.revision
    world.sleep(600)
    quiet = [kv for kv in world.observer.range(Get(events_span(PREFIX))).kvs if kv.mod_revision > before]
    assert not quiet, "a round that runs writes nothing"
    leases = {kv.lease for kv in world.observer.range(Get(events_span(PREFIX))).kvs}
    assert len(leases) == 1, "each decider goes on with the lease of the one before"
    end(world, group)


@simulated
def test_outages_of_etcd_that_a_process_noticed_are_told(world: World) -> None:
    group = agents(world, 3, (1, 4))
    first = work_together(world, group)[0].number
    with world.etcd.outage():
        world.sleep(40)
    world.sleep(LEASE_TTL)
    (outage,) = (one.event for one in history(world) if one.event.kind == "outage")
    assert outage.reason.startswith(f"etcd did not answer {outage.who} for 4")
    leader = next(one for one in group if one.name == outage.who)
    leader.die("it was killed")
    group.remove(leader)
    work_together(world, group, after=first)
    told = Counter(one.event.who for one in history(world) if one.event.kind == "outage")
    assert max(told.values()) == 1
    assert len(told) == 2, "the next decider was away too"
    end(world, group)


@simulated
def test_on_a_bad_network_nothing_is_told_that_was_not_decided(world: World) -> None:
    """What was decided while etcd did not answer about the history is told with the next decision."""
    group = agents(world, 3, (1, 4), wild=True)
    live_through(world, group)
    decided = Counter((kind, number) for _, kind, number in decisions(world))
    past = Counter((kind, number) for _, kind, number in told_decisions(world))
    assert past <= decided
    assert past, "nothing was told at all"
    end(world, group)


@simulated
def test_why_a_round_ended_is_told_to_all_that_go_on(world: World) -> None:
    """A peer is told of first, since its connection was reset; a host was lost."""
    group = agents(world, 3, (1, 3))
    first = work_together(world, group)[0].number
    lost, peer, other = group
    lost.crash()
    world.sleep(LEASE_TTL - 1)
    fail(peer, RESET)
    world.sleep(0.5)
    peer.worker_fails.set()
    work_together(world, [peer, other], after=first)
    for agent in (peer, other):
        assert agent.node is not None
        assert agent.node.round is not None
        assert agent.node.round.before == "node0 is gone (its lease ended); 1 more node followed"
    end(world, [peer, other])


@simulated
def test_a_worker_s_failure_is_no_failure_of_the_next_round(world: World) -> None:
    group = agents(world, 2, (2, 2))
    first = work_together(world, group)[0].number
    fail(group[0], OUT_OF_MEMORY)
    group[0].worker_fails.set()
    second = work_together(world, group, after=first)[0].number
    world.sleep(60)
    assert [agent.rounds[-1].number for agent in group] == [second, second], "it was recalled for what was before"
    failed = [one.event.number for one in history(world) if one.event.is_end]
    assert failed == [first]
    end(world, group)


@simulated
def test_a_node_that_asks_again_says_since_when_it_is_known_that_its_worker_failed(world: World) -> None:
    """A decider that takes over compares that with what its victims said."""
    group = agents(world, 2, (1, 2))
    first = work_together(world, group)[0].number
    fail(group[0], EXITED)
    group[0].worker_fails.set()
    work_together(world, group, after=first)
    said = []
    for event in world.events(member_key(PREFIX, member_id(group[0].lease()))):
        if event.kind == "put":
            ask = parse_join_request(event.kv.key, event.kv.value)
            if ask.failed:
                said.append((ask.failed_at, event.kv.mod_revision))
    assert said[0][0] == 0
    assert [at for at, _ in said[1:]] == [said[0][1]] * (len(said) - 1)
    assert len(said) > 1
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


def why(world: World) -> Explanation:
    """As `ftcoord why` tells it."""
    keys = read_job(world.observer, KEY_PREFIX, "run")
    return explain(tell_job(keys, Rules()), *read_events(world.observer, KEY_PREFIX, "run"))


@simulated
def test_a_run_that_ends_since_an_unknown_peer_was_lost_says_so_and_who_it_may_be(world: World) -> None:
    """With max_restarts=0 nobody is there any more when the lost host's lease ends."""
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
    likely = "node0 had said nothing when node2 left, the last that looked: it is likely that this one was lost."
    assert found.happened.endswith(likely)
    assert found.do.startswith("See which host of that round")


@simulated
def test_a_run_is_closed_in_time_though_nobody_can_tell_how_its_parts_ended(world: World) -> None:
    """What is read for a text, and what is written into the history, leaves half of the time to the record."""
    group = agents(world, 2, (2, 2))
    work_together(world, group)
    agent = group[0]
    texts = events_span(PREFIX), members_span(PREFIX)

    def slow(call: Call) -> Fate:
        hangs = isinstance(call.asked, Get) and call.asked.span in texts
        return Fate(arrives=math.inf) if hangs else Fate(answers=0.2 * agent.settings.times.close_timeout)

    agent.client.fate = slow
    assert agent.node is not None
    run = RunRecord(agent.client, agent.settings)
    run.close("it failed", FAILED, agent.node.speaker, EXITED, agent.name)
    agent.client.fate = lambda _call: DELIVERED
    record = run.read()
    assert record is not None
    assert record.closed.startswith("it failed; first cause: ")
    end(world, group)


@simulated
def test_a_node_that_is_still_there_when_the_lease_ends_says_which_host_was_lost(world: World) -> None:
    """Its agent stops its workers, which takes up to 30 s."""
    group = agents(world, 3, (3, 3))
    for agent in group:
        agent.looks_every = 60
    work_together(world, group)
    oldest = world.observer.range(Get(members_span(PREFIX), limit=1, order="oldest")).one
    assert oldest is not None
    other, lost, peer = sorted(group, key=lambda agent: agent.lease() != oldest.lease)
    lost.crash()
    fail(peer, RESET)
    give_up(peer, RESET)
    world.until(lambda: any(one.event.kind == "lost" for one in history(world)), "it is told", 30)
    found = why(world)
    assert found.first is not None
    assert (found.first.kind, found.first.who) == ("lost", lost.name)
    assert f"It began with this: {lost.name} is gone (its lease ended)." in found.happened
    end(world, [other])


@simulated
def test_whoever_closes_a_run_names_what_nobody_has_written_yet(world: World) -> None:
    """The decider's host is lost, and would else have told of the worker that failed first."""
    group = agents(world, 3, (3, 3), ROLLS)
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


@simulated
def test_the_last_word_of_a_decider_that_leaves_a_recalled_round_is_read(world: World) -> None:
    """It has recalled that itself for what followed, and no decision comes that would tell of it."""
    group = agents(world, 3, (1, 3))
    for agent in group:
        agent.looks_every = 3
    first = work_together(world, group)[0].number
    decider, *others = by_age(world, group)
    fail(others[0], RESET)
    world.until(lambda: any(one.event.kind == "recalled" for one in history(world)), "it is recalled")
    decider.stop.set()
    others[0].worker_fails.set()
    work_together(world, others, after=first)
    ends = [(one.event.kind, one.event.who) for one in history(world) if one.event.is_end]
    assert ("left", decider.name) in ends
    assert "lost" not in {kind for kind, _ in ends}
    end(world, others)


def by_age(world: World, group: Sequence[Agent]) -> list[Agent]:
    """These, the one that decides first."""
    found = world.observer.range(Get(members_span(PREFIX), keys_only=True)).kvs
    born = {kv.lease: kv.create_revision for kv in found}
    return sorted(group, key=lambda agent: born[agent.lease()])


@long_simulated
def test_a_spare_and_a_node_that_contradicts_the_run_are_in_the_history(world: World) -> None:
    group = agents(world, 3, (2, 2))
    world.until(lambda: sum(bool(agent.rounds) for agent in group) == 2, "a round of two")
    spare = next(agent for agent in group if not agent.rounds)
    group.append(Agent(world, "node9", world.etcd.client(), (4, 4)))
    world.sleep(30)
    quiet = world.etcd.revision
    seen = [(one.event.kind, one.event.who, one.event.number) for one in history(world)]
    number = next(agent for agent in group if agent.rounds).rounds[-1].number
    assert seen.count(("waiting", spare.name, number)) == 1
    assert ("refused", "node9", number) in seen
    world.sleep(100)
    since = [one for one in history(world) if one.revision > quiet]
    assert len(since) < 7, "whoever comes back each half second is not told of each time"
    for agent in (spare, group[-1]):
        agent.crash()
    end(world, [agent for agent in group[:-1] if agent is not spare])


@simulated
def test_with_on_member_loss_ignore_a_death_is_in_the_history(world: World) -> None:
    group = [Agent(world, f"node{at}", world.etcd.client(), (1, 3), on_member_loss="ignore") for at in range(3)]
    first = work_together(world, group)[0].number
    died, lost, other = group
    died.die("node0 was killed by signal 9 (SIGKILL)")
    world.sleep(1)
    lost.crash()
    world.sleep(60)
    ends = {(one.event.kind, one.event.who, one.event.number) for one in history(world) if one.event.is_end}
    assert ends == {("died", "node0", first), ("lost", "node1", first)}
    assert other.rounds[-1].number == first, "and it goes on"
    end(world, [other])


@simulated
def test_what_is_done_by_hand_is_in_the_history_with_who_did_it(world: World) -> None:
    group = agents(world, 3, (2, 2))
    world.until(lambda: sum(bool(agent.rounds) for agent in group) == 2, "a round of two")
    spare = next(agent for agent in group if not agent.rounds)
    seated = [agent for agent in group if agent is not spare]
    (member,) = find_members(world.observer, KEY_PREFIX, "run", spare.name)
    spare.crash()
    evict_members(world.observer, "run", [member], "evicted by ann@desk: it smells", "ann@desk")
    end(world, seated)
    done = [(one.event.who, one.event.by, one.event.reason) for one in history(world) if one.event.kind == "ordered"]
    evicted = f"{spare.name} was evicted by ann@desk: it smells"
    assert done == [(spare.name, "ann@desk", evicted)]


@simulated
def test_a_run_without_a_history_gets_none_by_being_closed(world: World) -> None:
    group = [Agent(world, f"node{at}", world.etcd.client(), (2, 2), history_ttl=0) for at in range(2)]
    work_together(world, group)
    close_run(world.observer, PREFIX, "closed by ann@desk", "ann@desk", 1.0)
    end(world, group)
    assert not world.observer.range(Get(events_span(PREFIX))).kvs


@simulated
def test_a_spare_that_dies_ends_no_round(world: World) -> None:
    group = agents(world, 3, (2, 2))
    world.until(lambda: sum(bool(agent.rounds) for agent in group) == 2, "a round of two")
    spare = next(agent for agent in group if not agent.rounds)
    seated = [agent for agent in group if agent is not spare]
    spare.die("the spare was killed")
    world.sleep(5)
    fail(seated[0], OUT_OF_MEMORY)
    seated[0].worker_fails.set()
    work_together(world, seated, after=seated[1].rounds[-1].number)
    assert {one.event.who for one in history(world) if one.event.is_end} == {seated[0].name}
    end(world, seated)


@simulated
def test_a_quorum_of_the_same_replicas_writes_no_event(world: World) -> None:
    with (
        replica_of(world.etcd.client(), PAIR, "a") as one,
        replica_of(world.etcd.client(), PAIR, "b") as other,
    ):
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


@simulated
def test_a_quorum_without_a_replica_that_died_says_of_what(world: World) -> None:
    job = replace(PAIR, min_replicas=1)
    client = world.etcd.client()
    with replica_of(world.etcd.client(), job, "a") as one, replica_of(client, job, "b") as other:
        join = in_background(lambda: until_both(other))
        until_both(one)
        join()
        world.observer.put(death_key(job.prefix, member_id(other.lease)), encode(Death("b was killed", 0)))
        other.leave(5)
        world.until(lambda: len(ask(one, 1).seats) == 1, "it goes on alone")
        past = [(one.event.kind, one.event.node, one.event.reason) for one in history(world, job.prefix)]
        assert ("died", "b", "b: b was killed") in past
        assert past[-1] == ("quorum", "", "1 replica; without b")


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
            world.observer.put(death_key(job.prefix, member_id(other.lease)), encode(Death("b was killed", 0)))
            other.leave(5)
            world.until(lambda: len(ask(one, 1).seats) == 1, "it goes on alone")
            died = history(world, job.prefix)
            for failures in range(1, 21):
                ask(one, 1, failures=failures)
            (repeats,) = history(world, job.prefix)[len(died) :]
            assert (repeats.event.kind, repeats.event.reason) == (
                "quorum",
                "1 replica; the same replicas, after commits that failed",
            )
            told = tell_job(read_job(world.observer, KEY_PREFIX, job.name), Rules())
            why = explain(told, *read_events(world.observer, KEY_PREFIX, job.name))
            assert not why.healthy
            assert "20 commits in a row failed with 1 replica" in why.text
            lines = [one.getMessage() for one in caplog.records]
            assert sum("rank 0 of 1" in line for line in lines) == 1
            warned = [line for line in lines if "commits in a row failed" in line]
            assert len(warned) == 1
            assert "min_replica_size is larger than min_replicas=1" in warned[0]

    play(scenario, 0)


@simulated
def test_a_quorum_without_a_replica_that_left_or_was_lost_tells_which(world: World) -> None:
    job = replace(PAIR, min_replicas=1)
    for last, kind in (("leaves", "left"), ("is lost", "lost")):
        client = world.etcd.client()
        with replica_of(world.etcd.client(), job, "a") as one, replica_of(client, job, "b") as other:
            join = in_background(lambda other=other: until_both(other))
            until_both(one)
            join()
            if last == "leaves":
                other.leave(5)
            else:
                world.etcd.expire(other.lease)
                client.cut_off()
            world.until(lambda one=one: len(ask(one, 1).seats) == 1, "it goes on alone")
            (lost,) = (past.event for past in history(world, job.prefix)[-2:-1])
            assert (lost.kind, lost.node) == (kind, "b") or "or it left" in lost.reason
            assert kind == "left" or lost.kind == "lost"


@simulated
def test_a_loss_is_told_though_too_few_are_left_for_another_quorum(world: World) -> None:
    """Of any replica, also of the one that decided, and at once where somebody has said why."""
    ends = {"leaves": "left", "dies": "died", "is lost": "lost"}
    for place, (last, kind) in product(("first", "second"), ends.items()):
        job = replace(PAIR, name=f"{place} {last}")
        clients = [world.etcd.client() for _ in range(2)]
        with replica_of(clients[0], job, "a") as first, replica_of(clients[1], job, "b") as second:
            join = in_background(lambda second=second: until_both(second))
            until_both(first)
            join()
            gone, other = (first, second) if place == "first" else (second, first)
            if last == "leaves":
                gone.leave(5)
            else:
                clients[place == "second"].cut_off()
                if last == "dies":
                    death = encode(Death(f"{gone.replica_id} was killed", 0))
                    world.observer.put(death_key(job.prefix, member_id(gone.lease)), death)
                world.etcd.expire(gone.lease)
            name = gone.replica_id
            with pytest.raises(TimeoutError):  # too few are left
                ask(other, 1)
            told = [(one.event.kind, one.event.number, one.event.node) for one in history(world, job.prefix)]
            assert told == [("quorum", 1, ""), (kind, 1, name)]
            why = explain(tell_job(read_job(world.observer, KEY_PREFIX, job.name), Rules()), (), events_of(world, job))
            assert why.happened.startswith(f"Quorum 1 lost members. It began with this: {name}")


@simulated
def test_the_loss_of_a_decider_is_told_though_others_went_on_without_it_before(world: World) -> None:
    """Its host is lost, and the others do not wait for its lease to end: one of them takes over."""
    for cause, kind in (("its host went down", "died"), ("", "lost")):
        job = replace(PAIR, name=f"without {kind}", heartbeat_timeout_ms=600_000)
        client = world.etcd.client()
        with ExitStack() as stack:
            clients = [client, *(world.etcd.client() for _ in range(2))]
            three = [stack.enter_context(replica_of(one, job, name)) for one, name in zip(clients, "abc", strict=True)]
            joins = []
            for one in three:  # the first one that joins decides
                joins.append(in_background(lambda one=one: until_both(one, 3)))
                world.until(lambda one=one: one.joined, "it has joined")
            for join in joins:
                join()
            decider, *others = three
            client.cut_off()
            joins = [in_background(lambda one=one: ask(one, 1)) for one in others]
            for join in joins:
                join()
            before = history(world, job.prefix)[-1].event
            assert (before.kind, "without a" in before.reason) == ("quorum", True)
            if cause:
                world.observer.put(death_key(job.prefix, member_id(decider.lease)), encode(Death(cause, 0)))
            world.etcd.expire(decider.lease)
            world.sleep(job.heartbeat_timeout + 5)
            told = [one.event for one in history(world, job.prefix) if one.event.node == "a"]
            assert [(one.kind, one.number) for one in told] == [("left", before.number - 1), (kind, before.number - 1)]
            assert cause in told[-1].reason
            why = explain(tell_job(read_job(world.observer, KEY_PREFIX, job.name), Rules()), (), events_of(world, job))
            assert why.first is not None
            assert (why.first.kind, why.first.who) == (kind, "a")


def events_of(world: World, job: Job) -> list[KeyValue]:
    return [*world.observer.range(Get(events_span(job.prefix))).kvs]


@simulated
def test_a_replica_that_is_back_under_another_lease_is_not_told_as_lost(world: World) -> None:
    client = world.etcd.client()
    with replica_of(client, PAIR, "a") as one, replica_of(world.etcd.client(), PAIR, "b") as other:
        join = in_background(lambda: until_both(other))
        until_both(one)
        join()
        before = one.lease
        world.etcd.expire(before)
        world.sleep(PAIR.heartbeat_timeout / 2)
        join = in_background(lambda: ask(other, 1))
        ask(one, 1)
        join()
        assert one.lease != before
        world.sleep(3 * PAIR.heartbeat_timeout)
        assert [past.event.kind for past in history(world, PAIR.prefix)] == ["quorum"]


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
                world.observer.put(death_key(PAIR.prefix, member_id(other.lease)), death)
                world.etcd.expire(other.lease)
        told = lambda: [past.event for past in history(world, PAIR.prefix)]  # noqa: E731
        world.until(lambda: len(told()) == 3, "all of it is told")
        assert [(one.kind, one.number) for one in told()] == [("quorum", 1), ("died", 1), ("died", 1)]
        assert [one.reason for one in told()[1:]] == ["b: killed in life 0", "b: killed in life 1"]
        why = explain(tell_job(read_job(world.observer, KEY_PREFIX, PAIR.name), Rules()), (), events_of(world, PAIR))
        assert why.first is not None
        assert why.first.reason == "b: killed in life 1"


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

    def grant(self, ttl: int, *, timeout: float | None = None) -> Lease:
        if ttl == HISTORY_TTL and self._how == "leases":
            self._refuse(EtcdNoSpace("mvcc: database space exceeded"))
        if ttl == HISTORY_TTL and self._how == "answers":
            self._refuse(EtcdUnavailable("no answer"))
        return self.real.grant(ttl, timeout=timeout)

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
            if self._how == "the lease":
                self._refuse(LeaseLost("etcdserver: requested lease not found"))
        return self.real.txn(compares, success, failure, timeout=timeout)


@pytest.mark.parametrize("how", ["leases", "answers", "keys", "transactions", "the lease"])
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
    assert len(warnings) == (0 if how in ("answers", "the lease") else 1)


# -- the log itself ----------------------------------------------------------------------------------------------


def happened(number: int) -> HistoryEvent:
    return HistoryEvent("round", number, reason="1 node")


def write(client: Etcd, log: EventLog, events: Sequence[HistoryEvent], value: bytes) -> WriteOutcome:
    """With some record."""
    now = client.range(Get(Span("/g/decided"))).one

    def once(more: Sequence[Op]) -> WriteOutcome:
        return write_once(client, Put("/g/decided", value), now, also=more)

    return log.send(log.writes(events, now.mod_revision if now else 0), events, once)


def keys_of(client: Etcd) -> list[KeyValue]:
    return list(client.range(Get(events_span("/g"))).kvs)


def numbers_in(client: Etcd) -> list[int]:
    past = read_history((kv.key, kv.value, kv.mod_revision) for kv in keys_of(client))
    return [one.event.number for one in past]


@pytest.fixture
def client() -> Iterator[MemoryClient]:
    with MemoryEtcd() as etcd:
        yield etcd.client()


def test_the_oldest_events_go_first(client: MemoryClient) -> None:
    log = EventLog(client, "/g", 600, "me")
    for number in range(KEPT_EVENTS + 40):
        assert write(client, log, [happened(number)], b"%d" % number).done
    assert numbers_in(client) == list(range(40, KEPT_EVENTS + 40))
    other = EventLog(client, "/g", 600, "other")
    assert write(client, other, [happened(9000)], b"other").done
    assert len(keys_of(client)) == KEPT_EVENTS, "whoever writes"
    assert len({kv.lease for kv in keys_of(client)}) == 1
    log.drop()
    other.drop()


def test_garbage_among_the_events_is_left_alone_and_stops_nothing(client: MemoryClient) -> None:
    for at in range(KEPT_EVENTS):
        client.put(f"/g/events/zzz{at}", b"garbage")
    client.put("/g/events/0", b"garbage")
    log = EventLog(client, "/g", 600, "me")
    for number in range(KEPT_EVENTS + 5):
        assert write(client, log, [happened(number)], b"%d" % number).done
    assert sum(event_revision(kv.key) is not None for kv in keys_of(client)) == KEPT_EVENTS
    log.drop()


def test_a_history_whose_lease_is_gone_goes_on_under_another(client: MemoryClient) -> None:
    log = EventLog(client, "/g", 600, "me")
    assert write(client, log, [happened(1)], b"1").done
    client.revoke(keys_of(client)[0].lease)
    assert write(client, log, [happened(2)], b"2").done, "decided all the same"
    assert write(client, log, [happened(3)], b"3").done
    assert numbers_in(client) == [2, 3], "what was decided meanwhile is told a moment later"
    log.drop()


def test_a_lease_that_is_too_short_is_not_gone_on_with(client: MemoryClient) -> None:
    """It may be a member's, or that of a run with another `history_ttl`."""
    short = client.grant(5).id
    client.put("/g/events/0000000000000001-x-000000", b"garbage", short)
    log = EventLog(client, "/g", 600, "me")
    assert write(client, log, [happened(1)], b"1").done
    assert {kv.lease for kv in keys_of(client)} > {short}
    log.drop()


def test_a_decision_of_somebody_else_leaves_no_event(client: MemoryClient) -> None:
    log = EventLog(client, "/g", 600, "me")
    client.put("/g/decided", b"theirs")
    stale = log.send(
        log.writes([happened(1)], 0),
        [happened(1)],
        lambda more: write_once(client, Put("/g/decided", b"x"), None, also=more),
    )
    assert not stale.done
    assert write(client, log, [happened(2)], b"2").done
    assert numbers_in(client) == [2]
    log.drop()


def test_after_a_refusal_nothing_is_tried_for_a_while() -> None:
    def scenario(world: World) -> None:
        door = Refuses(world.etcd.client(), "leases")
        log = EventLog(door, "/g", HISTORY_TTL, "me")
        for number in range(5):
            assert write(door, log, [happened(number)], b"%d" % number).done
        assert door.refused == 1
        world.sleep(OFF + 1)
        door._how = ""
        assert write(door, log, [happened(5)], b"5").done
        past = read_history(
            (kv.key, kv.value, kv.mod_revision) for kv in world.observer.range(Get(events_span("/g"))).kvs
        )
        assert [one.event.number for one in past] == [0, 1, 2, 3, 4, 5], "what happened meanwhile is told then"
        log.drop()

    play(scenario, 0)


def test_a_lease_that_nothing_was_written_under_is_given_back(client: MemoryClient) -> None:
    log = EventLog(client, "/g", 600, "me")
    lease = log._take_lease()
    log.drop()
    with pytest.raises(LeaseLost):
        client.renew(lease)


def test_a_restored_etcd_counts_anew_and_the_history_goes_on(client: MemoryClient) -> None:
    """Its revisions are lower than those in keys that are there."""
    client.put("/g/events/00000000ffffffff-x-000000", b"garbage", 0)
    log = EventLog(client, "/g", 600, "me")
    for number in range(KEPT_EVENTS + 5):
        assert write(client, log, [happened(number)], b"%d" % number).done
    assert numbers_in(client) == list(range(5, KEPT_EVENTS + 5))
    assert client.txn((), [Delete(Span("/g/", is_prefix=True))]).succeeded
    log.drop()


def decided_by(client: MemoryClient, log: EventLog, decision: Publish[bytes]) -> list[list[Op]]:
    """The transactions in which this is decided."""
    sent: list[list[Op]] = []

    class Counting(Door):
        def txn(self, compares: Sequence[Compare], success: Sequence[Op], *more: Any, **rest: Any) -> TxnResult:
            assert len(success) <= MOST_OPERATIONS
            sent.append([*success])
            return super().txn(compares, success, *more, **rest)

    record = DecidedRecord(
        Counting(client), "/g", 60, lambda mirror, posted: None, lambda kv, roster: None, history=log
    )
    record.mirror.begin(10)
    record.mirror.adopt(client.range(Get(Span("/g/decided"))))
    record.tell()
    assert record.publish(decision, ())
    record.close()
    return sent


def test_a_record_is_not_replaced_that_only_has_the_known_ones_revision() -> None:
    """A decider slept while etcd was restored, and others decided."""
    with MemoryEtcd() as etcd:
        client = etcd.client()
        client.put("/g/decided", b"first")
        backup = etcd.snapshot()
        client.put("/g/decided", b"lost")
        record = DecidedRecord(client, "/g", 60, lambda mirror, posted: None, lambda kv, roster: None)
        record.mirror.begin(10)
        record.mirror.adopt(client.range(Get(Span("/g/decided"))))
        record.tell()
        etcd.rewind(backup)
        client.put("/g/decided", b"another")
        now = client.range(Get(Span("/g/decided"))).one
        assert now is not None
        assert record.known is not None
        assert now.mod_revision == record.known.mod_revision
        assert not record.publish(Publish(b"mine", "the decider knows the lost one"), ())
        assert client.range(Get(Span("/g/decided"))).one == now
        record.close()


def test_a_decision_that_fills_a_transaction_is_made_without_its_history(client: MemoryClient) -> None:
    log, events = EventLog(client, "/g", 600, "me"), [happened(number) for number in range(16)]
    puts = [(f"/g/more/{at}", b"") for at in range(MOST_OPERATIONS - 10)]
    (only,) = decided_by(client, log, Publish(b"1", "it is large", puts=puts, events=events))
    assert not keys_of(client)
    assert len(only) == len(puts) + 1
    (second,) = decided_by(client, log, Publish(b"2", "it is small", events=[happened(16)]))
    assert numbers_in(client) == list(range(17)), "it is told with the next one"
    assert len(second) == 18


def test_what_lies_beside_a_record_goes_before_where_history_takes_its_place(client: MemoryClient) -> None:
    log, events = EventLog(client, "/g", 600, "me"), [happened(number) for number in range(16)]
    beside = [(f"/g/rolls/1-me/{at}", b"") for at in range(MOST_OPERATIONS - 10)]
    sent = decided_by(client, log, Publish(b"1", "a large round", beside=beside, events=events))
    assert len(sent) == 2
    assert numbers_in(client) == list(range(16))
