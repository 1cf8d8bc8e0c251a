"""A replica's calls: what ends them, and what they leave behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import DEADLINE, eventually

from ftcoord import EtcdServer
from ftcoord.coordination.address import Job
from ftcoord.coordination.replica import Replica
from ftcoord.core.quorum import Request
from ftcoord.core.quorum_records import parse_petition
from ftcoord.etcd.api import Get, Span
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
