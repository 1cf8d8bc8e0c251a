"""What replicas ask, and what becomes of it when answers are lost, come late, or somebody else decides."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import builders
import pytest
from doors import Door
from virtual import REFUSED
from worlds import World, play, simulated

from ftcoord import concurrency
from ftcoord.coordination.address import Job
from ftcoord.coordination.replica import Replica
from ftcoord.core.layout import decided_key, decider_key, members_span
from ftcoord.core.quorum_records import QuorumRecord, parse_replica
from ftcoord.etcd.api import Etcd, Get, Span, Watch, WatchItem

ALONE = Job("etcd", "", "alone", min_replicas=1, join_timeout_ms=2000, heartbeat_timeout_ms=5000)
PAIR = Job("etcd", "", "pair", min_replicas=2, join_timeout_ms=2000, heartbeat_timeout_ms=5000)


def ask(replica: Replica, step: int, timeout: float = 30, failures: int = 0) -> QuorumRecord:
    request = builders.request(replica.replica_id, step=step, commit_failures=failures)
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
            told = r"replica a waits for a quorum: .*need min_replicas 2 .* a asks; the call ends at "
            assert re.search(told, waits[1])
        with replica_of(world.etcd.client(lambda call: REFUSED), PAIR, "b") as replica, pytest.raises(TimeoutError):
            ask(replica, 0, timeout=60)
        away = [one.getMessage() for one in caplog.records if "etcd does not answer" in one.getMessage()]
        assert len(away) == 2
        assert "the call ends at " in away[0]

    play(scenario, 0)


@simulated
def test_a_lone_replica_goes_on_when_somebody_deletes_its_office_or_ends_the_lease_of_its_quorums(world: World) -> None:
    with replica_of(world.etcd.client(), ALONE, "a") as replica:
        ask(replica, 0)
        world.observer.delete(Span(decider_key(ALONE.prefix)))
        assert ask(replica, 1, timeout=15).number == 2
        record = world.observer.range(Get(Span(decided_key(ALONE.prefix)))).one
        assert record is not None
        world.etcd.expire(record.lease)
        assert ask(replica, 2, timeout=15).number == 3


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
