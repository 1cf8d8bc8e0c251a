"""What replicas ask, and what becomes of it when answers are lost, come late, or somebody else decides."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from members import Door
from virtual import DELIVERED, LOST_ANSWER, REFUSED, Call, Fate
from virtual.keyspace import Transaction
from worlds import World, play, simulated

from ftcoord import concurrency
from ftcoord.coordination.address import Job
from ftcoord.coordination.policy import QuorumPolicy
from ftcoord.coordination.replica import Replica
from ftcoord.core.layout import decided_key, member_id, members_span, roster_key
from ftcoord.core.quorum_head import encode_quorum
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest, QuorumSeat, parse_replica
from ftcoord.core.verdict import Verdict
from ftcoord.etcd.api import Etcd, Get, Put, Span, Watch, WatchItem
from ftcoord.primitives.group.policy import View

ALONE = Job("etcd", "", "alone", min_replicas=1, join_timeout_ms=2000, heartbeat_timeout_ms=5000)
PAIR = Job("etcd", "", "pair", min_replicas=2, join_timeout_ms=2000, heartbeat_timeout_ms=5000)


def ask(replica: Replica, step: int, timeout: float = 30, failures: int = 0) -> QuorumRecord:
    request = QuorumRequest(replica.replica_id, "", "", step, 1, False, "", failures, ())
    return replica.ask(request, concurrency.now() + timeout)


@contextmanager
def replica_of(client: Etcd, job: Job, name: str) -> Iterator[Replica]:
    replica = Replica(client, job, name, keeps_lease=True)
    try:
        yield replica
    finally:
        replica.leave(5)


def in_background(work: Callable[[], object]) -> Callable[[], None]:
    """Begin it on a thread of its own; the result waits for its end."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)
            raise

    thread = concurrency.thread(run, "asks")
    thread.start()

    def join() -> None:
        thread.join(120)
        assert not thread.is_alive()
        assert not failures

    return join


def asked(world: World, job: Job, name: str) -> int:
    """Which request of the replica is in etcd; 0 for none."""
    found = world.observer.range(Get(members_span(job.prefix))).kvs
    records = [parse_replica(kv.key, kv.value) for kv in found]
    return max((one.asked for one in records if one.request.replica_id == name), default=0)


@simulated
def test_a_step_of_a_lone_replica_is_two_writes(world: World) -> None:
    """Its ask, and the decision."""
    with replica_of(world.etcd.client(), ALONE, "a") as replica:
        first = ask(replica, 0)
        before = world.etcd.revision
        for step in range(1, 6):
            assert ask(replica, step).requests[0].step == step
        assert world.etcd.revision == before + 2 * 5
        assert ask(replica, 6).number == first.number + 6


def test_a_replica_that_waits_logs_for_what_and_until_when(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ftcoord")

    def scenario(world: World) -> None:
        with replica_of(world.etcd.client(), PAIR, "a") as replica:
            with pytest.raises(TimeoutError):
                ask(replica, 0, timeout=60)
            waits = [one.getMessage() for one in caplog.records if "waits for a quorum" in one.getMessage()]
            assert len(waits) == 2
            assert "replica a waits for a quorum: 1 of at least 2 replicas asks (a); the call ends at " in waits[1]
        with (
            replica_of(world.etcd.client(lambda call: REFUSED), PAIR, "b") as replica,
            pytest.raises(TimeoutError),
        ):
            ask(replica, 0, timeout=60)
        away = [one.getMessage() for one in caplog.records if "etcd does not answer" in one.getMessage()]
        assert len(away) == 2
        assert "the call ends at " in away[0]

    play(scenario, 0)


@simulated
def test_a_seat_of_an_earlier_member_takes_the_present_one_s_request_back(world: World) -> None:
    """A lease was lost just when the request under it was answered, and the replica had asked again under another: a
    later quorum would seat it, though it does not ask."""
    with replica_of(world.etcd.client(), PAIR, "a") as replica:
        join = in_background(lambda: ask(replica, 0))
        world.until(lambda: asked(world, PAIR, "a") == 1, "it asks")
        lost = replica.lease
        world.etcd.expire(lost)
        world.until(lambda: asked(world, PAIR, "a") and replica.lease != lost, "it asks under another lease")
        request = QuorumRequest("a", "", "", 0, 1, False, "", 0, ())
        head, roster = encode_quorum(QuorumRecord(1, 1, (QuorumSeat(member_id(lost), 99, request),), (), 0.0))
        assert roster is not None
        key = decided_key(PAIR.prefix)
        world.observer.txn([], [Put(roster_key(key), roster, 0), Put(key, head, 0)])
        join()
        (kv,) = world.observer.range(Get(members_span(PAIR.prefix))).kvs
        assert not parse_replica(kv.key, kv.value).asked, "it asks for nothing"


@simulated
def test_a_decider_looks_once_for_a_step_and_its_own_decision_is_no_news(world: World) -> None:
    looks = 0
    decide = QuorumPolicy.decide

    def counted(self: QuorumPolicy, view: View, me: str, now: float) -> Verdict[bytes]:
        nonlocal looks
        looks += 1
        return decide(self, view, me, now)

    with replica_of(world.etcd.client(), ALONE, "a") as replica:
        ask(replica, 0)
        world.sleep(1)
        with patch.object(QuorumPolicy, "decide", counted):
            for step in range(1, 6):
                assert ask(replica, step).requests[0].step == step
            world.sleep(1)
    assert looks == 5


class LosesAnswers:
    """A client's fate: the answers of the next transactions that decide something are lost."""

    def __init__(self, key: str) -> None:
        self.key, self.left, self.lost = key, 0, 0

    def __call__(self, call: Call) -> Fate:
        asked = call.asked
        puts = [op.key for op in asked.success if isinstance(op, Put)] if isinstance(asked, Transaction) else []
        if self.key not in puts or not self.left:
            return DELIVERED
        self.left, self.lost = self.left - 1, self.lost + 1
        return LOST_ANSWER


@simulated
def test_the_answer_to_a_decision_is_lost(world: World) -> None:
    fate = LosesAnswers(decided_key(ALONE.prefix))
    with replica_of(world.etcd.client(fate), ALONE, "a") as replica:
        first = ask(replica, 0)
        fate.left = 2
        second = ask(replica, 1)
        assert fate.lost == 2
        assert (second.number, second.requests[0].step) == (first.number + 1, 1)
        assert ask(replica, 2).number == second.number + 1


@simulated
def test_somebody_else_decides_before(world: World) -> None:
    """The decider's transaction fails; what it asks is answered by a later quorum."""
    with replica_of(world.etcd.client(), ALONE, "a") as replica:
        ask(replica, 0)
        now = world.observer.get(decided_key(ALONE.prefix)).kvs[0]
        join = in_background(lambda: ask(replica, 1))
        world.observer.put(now.key, now.value.replace(b'"number":1', b'"number":7'), now.lease)
        join()
        quorum = ask(replica, 2)
        assert quorum.number > 7
        assert quorum.requests[0].step == 2


class LateWatches(Door):
    """Its requests are answered at once, but its watches deliver changes late."""

    def __init__(self, real: Etcd, lag: float) -> None:
        super().__init__(real)
        self._lag = lag

    def watch(self, span: Span, start_revision: int, deliver: Callable[[WatchItem], None], **how: bool) -> Watch:
        def late(item: WatchItem) -> None:
            concurrency.sleep(self._lag)
            deliver(item)

        return super().watch(span, start_revision, late, **how)


@simulated
def test_who_asked_before_the_decider_is_in_its_quorum_though_its_watch_is_late(world: World) -> None:
    """The last quorum is the decider's alone, so as far as it knows its ask makes the next one due at once."""
    door = LateWatches(world.etcd.client(), lag=0.06 + 0.02 * (world.seed % 5))
    with replica_of(door, ALONE, "decider") as decider, replica_of(world.etcd.client(), ALONE, "newcomer") as newcomer:
        ask(decider, 0)
        assert ask(decider, 1).names == {"decider"}
        join = in_background(lambda: ask(newcomer, 0))
        world.until(lambda: asked(world, ALONE, "newcomer"), "it has asked")
        assert ask(decider, 2).names == {"decider", "newcomer"}
        join()
