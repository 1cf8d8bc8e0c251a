"""A replica's calls: what ends them, and what they leave behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
from helpers import DEADLINE, eventually

from ftcoord import EtcdServer
from ftcoord.config import EtcdConfig
from ftcoord.coordination.address import Job
from ftcoord.coordination.replica import Replica
from ftcoord.core.quorum import Quorum, Request
from ftcoord.core.quorum_records import parse_petition
from ftcoord.etcd.api import Get, Span, Watch, WatchItem
from ftcoord.etcd.client import EtcdClient

REQUEST = Request("x", "", "", 0, 1, False, "", 0, ())


@pytest.fixture
def job(prefix: str) -> Job:
    return Job("etcd", "", prefix, min_replicas=2)


@pytest.fixture
def replica(client: EtcdClient, job: Job) -> Iterator[Replica]:
    replica = Replica(client, job, "x", kept=True)
    yield replica
    replica.leave(DEADLINE)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def requests(client: EtcdClient, job: Job) -> list[int]:
    """What each member asks."""
    kvs = client.range(Get(Span(f"{job.prefix}/members/", is_prefix=True))).kvs
    return [parse_petition(kv.key, kv.value).asked for kv in kvs]


def test_a_caller_that_is_gone_does_not_ask(
    client: EtcdClient, job: Job, replica: Replica, threads: ThreadPoolExecutor
) -> None:
    gone = threading.Event()
    call = threads.submit(replica.ask, REQUEST, time.monotonic() + 1000, gone)
    eventually(lambda: requests(client, job) == [1], "it asks")
    gone.set()
    replica.nudge()
    with pytest.raises(TimeoutError):
        call.result(DEADLINE)
    assert requests(client, job) == [0]


def test_of_two_callers_one_may_go(client: EtcdClient, job: Job, replica: Replica, threads: ThreadPoolExecutor) -> None:
    gone = threading.Event()
    first = threads.submit(replica.ask, REQUEST, time.monotonic() + 1000, gone)
    eventually(lambda: requests(client, job) == [1], "it asks")
    second = threads.submit(replica.ask, REQUEST, time.monotonic() + 1000)
    eventually(lambda: requests(client, job) == [2], "it asks again")
    gone.set()
    replica.nudge()
    with pytest.raises(TimeoutError):
        first.result(DEADLINE)
    assert requests(client, job) == [2]
    replica.leave(DEADLINE)
    with pytest.raises(TimeoutError, match="left"):
        second.result(DEADLINE)


def test_a_call_does_not_wait_for_anothers_write(fragile: EtcdServer, job: Job, threads: ThreadPoolExecutor) -> None:
    with fragile.get_client() as client:
        replica = Replica(client, job, "x", kept=True)
        fragile.stop()
        other = threads.submit(replica.ask, REQUEST, time.monotonic() + 8)
        threading.Event().wait(1)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            replica.beat(began + 1)
        assert time.monotonic() - began < 5
        with pytest.raises(TimeoutError):
            other.result(DEADLINE)


def test_who_left_stays_gone(client: EtcdClient, job: Job, replica: Replica) -> None:
    replica.beat(time.monotonic() + DEADLINE)
    assert requests(client, job) == [0]
    replica.leave(DEADLINE)
    with pytest.raises(TimeoutError, match="left"):
        replica.beat(time.monotonic() + DEADLINE)
    assert requests(client, job) == []


def test_who_is_abandoned_lives_until_its_lease_ends(client: EtcdClient, job: Job, replica: Replica) -> None:
    replica.beat(time.monotonic() + DEADLINE)
    replica.abandon()
    assert requests(client, job) == [0]
    eventually(lambda: requests(client, job) == [], "the lease expires")


class Late(EtcdClient):
    """Hears of nothing between `hold()` and `release()`; its requests are answered at once."""

    def __init__(self, config: EtcdConfig) -> None:
        super().__init__(config)
        self._turn = threading.Lock()
        self._held: list[Callable[[], None]] | None = None

    def hold(self) -> None:
        with self._turn:
            self._held = []

    def release(self) -> None:
        with self._turn:
            held, self._held = self._held or [], None
            for deliver in held:
                deliver()

    def watch(self, span: Span, start_revision: int, deliver: Callable[[WatchItem], None], **how: bool) -> Watch:
        def late(item: WatchItem) -> None:
            with self._turn:
                if self._held is None:
                    deliver(item)
                else:
                    self._held.append(lambda: deliver(item))

        return super().watch(span, start_revision, late, **how)


def test_who_was_elsewhere_meanwhile_is_counted_though_it_hears_of_that_late(
    etcd: EtcdServer, client: EtcdClient, job: Job, threads: ThreadPoolExecutor
) -> None:
    """Of two members with one name the newest counts: here, then there, then here again, before news of there came."""

    def ask(one: Replica) -> Future[Quorum]:
        request = replace(REQUEST, replica_id=one.replica_id)
        return threads.submit(one.ask, request, time.monotonic() + DEADLINE)

    with Late(EtcdConfig.load(etcd.get_endpoint())) as late:
        peer = Replica(client, job, "y", kept=True)
        here = Replica(late, job, "x", kept=True, roams=True)
        there = Replica(client, job, "x", kept=True, roams=True)
        try:
            peer.beat(time.monotonic() + DEADLINE)  # the oldest one decides
            together = ask(peer), ask(here)
            assert [one.result(DEADLINE).number for one in together] == [1, 1]
            late.hold()
            together = ask(peer), ask(there)
            assert [one.result(DEADLINE).number for one in together] == [2, 2]
            together = ask(peer), ask(here)
            eventually(lambda: sorted(requests(client, job)) == [1, 2, 3], "both ask")
            late.release()
            assert [one.result(DEADLINE).number for one in together] == [3, 3]
        finally:
            for one in (peer, here, there):
                one.leave(DEADLINE)
