"""A replica's calls: what ends them, and what they leave behind."""

from __future__ import annotations

import random
import re
import string
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import builders
import pytest
from doors import Door
from helpers import DEADLINE, eventually
from portless import portless

from ftcoord import EtcdServer
from ftcoord.coordination import address
from ftcoord.coordination.address import Job
from ftcoord.coordination.replica import LARGEST_REQUEST, Replica
from ftcoord.core.quorum_records import ReplicaRecord, parse_replica
from ftcoord.errors import EtcdUnavailable, OutcomeUnknown, RequestRefused, ServerError
from ftcoord.etcd.api import Etcd, Get, Span, TxnResult
from ftcoord.etcd.client import EtcdClient

REQUEST = builders.request("x")


@pytest.fixture(autouse=True)
def by_key() -> Iterator[None]:
    """Replicas ask through etcd, where a test sees what they ask; tests/contract/test_ask_port.py has the other way."""
    with portless():
        yield


@pytest.fixture
def job(prefix: str) -> Job:
    return Job("etcd", "", prefix, min_replicas=2)


@pytest.fixture
def replica(client: EtcdClient, job: Job) -> Iterator[Replica]:
    replica = Replica(client, job, "x", keeps_lease=True)
    yield replica
    replica.leave(DEADLINE)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def replica_records(client: EtcdClient, job: Job) -> dict[int, ReplicaRecord]:
    """What each member asks, by its lease."""
    kvs = client.range(Get(Span(f"{job.prefix}/members/", is_prefix=True))).kvs
    return {kv.lease: parse_replica(kv.key, kv.value) for kv in kvs}


def requests(client: EtcdClient, job: Job) -> list[int]:
    """Which of its requests each member makes."""
    return [one.asked for one in replica_records(client, job).values()]


def test_an_etcd_that_starts_later_is_waited_for(
    fragile: EtcdServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torchft's Manager waits a minute for it: in silence, that is a replica that hangs."""
    monkeypatch.setattr(address, "REQUEST_TIMEOUT", 0.5)
    fragile.kill()
    later = threading.Timer(2, fragile.restart)
    later.start()
    try:
        _, etcd = address.connect(f"etcd://{fragile.get_endpoint()}/job", DEADLINE)
    finally:
        later.join()
    etcd.close()
    said = [message for message in caplog.messages if "trying again" in message]
    assert len(said) == 1
    why = "connection refused|.*Deadline Exceeded"  # on a busy machine
    assert re.match(rf"no etcd at .*: ({why}).* trying again for \d+ s \(connect_timeout\)", said[0])


def test_a_caller_that_is_gone_does_not_ask(
    client: EtcdClient, job: Job, replica: Replica, threads: ThreadPoolExecutor
) -> None:
    gone = threading.Event()
    call = threads.submit(replica.ask, REQUEST, time.monotonic() + 1000, gone)
    eventually(lambda: requests(client, job) == [1], "it asks")
    gone.set()
    replica.participant.nudge()
    with pytest.raises(TimeoutError):
        call.result(DEADLINE)
    eventually(lambda: requests(client, job) == [0], "it is taken back")


def test_of_two_callers_one_may_go(client: EtcdClient, job: Job, replica: Replica, threads: ThreadPoolExecutor) -> None:
    gone = threading.Event()
    first = threads.submit(replica.ask, REQUEST, time.monotonic() + 1000, gone)
    eventually(lambda: requests(client, job) == [1], "it asks")
    second = threads.submit(replica.ask, REQUEST, time.monotonic() + 1000)
    eventually(lambda: requests(client, job) == [2], "it asks again")
    gone.set()
    replica.participant.nudge()
    with pytest.raises(TimeoutError):
        first.result(DEADLINE)
    assert requests(client, job) == [2]
    replica.leave(DEADLINE)
    with pytest.raises(ServerError, match="left the job"):
        second.result(DEADLINE)


@pytest.mark.parametrize(("character", "size"), [("x", 1), ("\n", 2), ("\u202e", 6)])
def test_a_request_that_is_too_large_is_refused_before_anything_is_written(
    client: EtcdClient, job: Job, character: str, size: int
) -> None:
    """By its size in etcd, where a character may have several bytes."""
    single = replace(job, min_replicas=1)
    replica = Replica(client, single, "x", keeps_lease=True)
    fits = replace(REQUEST, store_address=character * ((LARGEST_REQUEST - 300) // size))
    with pytest.raises(RequestRefused, match=r"'x' asks with \d+ bytes .* the limit is 65536: share where"):
        replica.ask(replace(fits, handles=("h" * 200,)), time.monotonic() + DEADLINE)
    assert replica_records(client, job) == {}
    assert replica.ask(fits, time.monotonic() + DEADLINE).requests == (fits,)
    replica.leave(DEADLINE)


def test_the_error_of_the_replica_that_decides_names_why_nothing_is_decided(client: EtcdClient, job: Job) -> None:
    """All requests together are more than etcd takes, also compressed, though each may be asked."""
    count, gone, dice = 40, threading.Event(), random.Random(1)
    large = replace(REQUEST, store_address="".join(dice.choices(string.ascii_letters, k=LARGEST_REQUEST - 300)))
    all_of_them = replace(job, min_replicas=count, heartbeat_timeout_ms=60_000)  # none is lost on a busy machine
    crew = [Replica(client, all_of_them, str(at), keeps_lease=True) for at in range(count)]

    def ask(replica: Replica, limit: float) -> str:
        with pytest.raises((TimeoutError, ServerError)) as caught:
            replica.ask(replace(large, replica_id=replica.replica_id), time.monotonic() + limit, gone)
        return str(caught.value)

    assert f"need min_replicas {count}" in ask(crew[-1], 5)  # the first to join decides
    with ThreadPoolExecutor(count) as calls:
        try:
            for replica in crew[:-1]:
                calls.submit(ask, replica, 1000)
            eventually(lambda: sum(map(bool, requests(client, job))) == count - 1, "the others ask")
            # Again: on a busy machine the office may just have ended, or another one may have it.
            eventually(lambda: "too large" in ask(crew[-1], 5), "it is named")
        finally:
            gone.set()
            for replica in crew:
                replica.leave(DEADLINE)


class Refusing(Door):
    """Loses every fourth transaction, and the answer to another fourth."""

    def __init__(self, real: Etcd) -> None:
        super().__init__(real)
        self.lost = 0

    def txn(self, *args: Any, **kwargs: Any) -> TxnResult:
        self.lost += 1
        lost = self.lost % 4
        if lost == 1:
            raise EtcdUnavailable("refused by the test")
        result = super().txn(*args, **kwargs)
        if lost == 3:
            raise OutcomeUnknown("the test lost the answer")
        return result


def test_requests_that_are_lost_on_the_way_are_made_again(
    client: EtcdClient, job: Job, threads: ThreadPoolExecutor
) -> None:
    etcd = Refusing(client)
    pair = [Replica(etcd, job, name, keeps_lease=True) for name in "xy"]
    try:
        for number in range(1, 21):
            asked = [replace(REQUEST, replica_id=one.replica_id, step=number) for one in pair]
            until = time.monotonic() + DEADLINE
            calls = [threads.submit(one.ask, request, until) for one, request in zip(pair, asked, strict=True)]
            for call in calls:
                quorum = call.result(DEADLINE)
                assert quorum.number == number
                assert list(quorum.requests) == asked
        assert etcd.lost > 60
    finally:
        for one in pair:
            one.leave(DEADLINE)
