"""Heartbeats on a real etcd, and the key under a lease that they and the timers stand on."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from helpers import DEADLINE, eventually, in_fork, python

import ftcoord
from ftcoord.core.heartbeats import HeartbeatEvent
from ftcoord.core.layout import KEY_PREFIX, heartbeats_span, run_prefix
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import ClientClosed, EtcdUnavailable, ForkedProcessError, OutcomeUnknown
from ftcoord.etcd.api import Compare, Get, KeyValue, Op, Span, TxnResult
from ftcoord.etcd.client import EtcdClient
from ftcoord.heartbeat import HeartbeatWatch
from ftcoord.primitives.leased_key import LeasedKey


class Events:
    """What a watch yields, read on a thread."""

    def __init__(self, watch: HeartbeatWatch) -> None:
        self._watch = watch
        self._events: queue.SimpleQueue[HeartbeatEvent] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for event in self._watch:
            self._events.put(event)

    def next(self) -> HeartbeatEvent:
        return self._events.get(timeout=DEADLINE)

    def is_quiet(self) -> bool:
        return self._events.empty()

    def ends(self) -> None:
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def watching(run: str, endpoint: str) -> Iterator[Events]:
    with ftcoord.watch_heartbeats(run, endpoint) as watch:
        events = Events(watch)
        yield events
    events.ends()


def keys_of(client: EtcdClient, run: str) -> Sequence[KeyValue]:
    span = heartbeats_span(run_prefix(KEY_PREFIX, run))
    return client.range(Get(span)).kvs


def test_one_comes_changes_and_leaves(etcd: EtcdServer, prefix: str) -> None:
    endpoint = etcd.get_endpoint()
    with ftcoord.Heartbeat(prefix, "early", 30, etcd=endpoint), watching(prefix, endpoint) as events:
        assert events.next() == HeartbeatEvent("joined", "early")
        with ftcoord.Heartbeat(prefix, "a/ä", 30, {"x": [1, None]}, etcd=endpoint) as heartbeat:
            assert events.next() == HeartbeatEvent("joined", "a/ä", {"x": [1, None]})
            heartbeat.update("more")
            assert events.next() == HeartbeatEvent("updated", "a/ä", "more")
        assert events.next() == HeartbeatEvent("lost", "a/ä", "more", "left")
        assert events.is_quiet()


def test_one_that_is_killed_expires_and_its_successor_speaks_for_it(
    client: EtcdClient, etcd: EtcdServer, prefix: str
) -> None:
    endpoint = etcd.get_endpoint()
    code = "import ftcoord, sys\nwith ftcoord.Heartbeat(*sys.argv[1:3], 10, 1, etcd=sys.argv[3]): sys.stdin.read()"
    alone = {"FTCOORD_SENTINEL": "0"}  # who stands beside one for long enough would say that it died
    with watching(prefix, endpoint) as events:
        with python("-c", code, prefix, "a", endpoint, env=alone), python("-c", code, prefix, "b", endpoint, env=alone):
            assert {events.next().name, events.next().name} == {"a", "b"}
        with ftcoord.Heartbeat(prefix, "a", 10, 2, etcd=endpoint):
            assert events.next() == HeartbeatEvent("updated", "a", 2)
            assert events.next() == HeartbeatEvent("lost", "b", 1, "expired")
        assert events.next() == HeartbeatEvent("lost", "a", 2, "left")


def test_an_outage_loses_nobody(fragile: EtcdServer) -> None:
    endpoint = fragile.get_endpoint()
    with ftcoord.Heartbeat("job", "a", 10, 1, etcd=endpoint) as heartbeat, watching("job", endpoint) as events:
        assert events.next() == HeartbeatEvent("joined", "a", 1)
        fragile.kill()
        with pytest.raises((EtcdUnavailable, OutcomeUnknown)):
            heartbeat.update(2)
        fragile.restart()
        assert events.next() == HeartbeatEvent("updated", "a", 2)
        assert events.is_quiet()


def test_a_heartbeat_that_etcd_lost_comes_back(client: EtcdClient, etcd: EtcdServer, prefix: str) -> None:
    endpoint = etcd.get_endpoint()
    with ftcoord.Heartbeat(prefix, "a", 6, 1, etcd=endpoint), watching(prefix, endpoint) as events:
        assert events.next() == HeartbeatEvent("joined", "a", 1)
        for _ in range(2):
            client.revoke(keys_of(client, prefix)[0].lease)
            assert events.next() == HeartbeatEvent("lost", "a", 1, "expired")
            assert events.next() == HeartbeatEvent("joined", "a", 1)


def test_without_etcd_there_is_no_heartbeat(fragile: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftcoord.heartbeat.HEARTBEAT_TIMEOUT", 0.5)
    fragile.kill()
    with pytest.raises(EtcdUnavailable), ftcoord.Heartbeat("job", "a", 2, etcd=fragile.get_endpoint()):
        pytest.fail("there is none")


# -- a key under a lease -----------------------------------------------------------------------------------------------


class Unreliable(EtcdClient):
    """Loses answers to writes, and makes some of these writes only after the next one."""

    def __init__(self, client: EtcdClient, fates: Sequence[str]) -> None:
        self.__dict__.update(client.__dict__)
        self._fates = itertools.cycle(fates)
        self._delayed: list[Callable[[], TxnResult]] = []

    def txn(
        self, compares: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = (), **options: Any
    ) -> TxnResult:
        fate, delayed = next(self._fates), self._delayed
        self._delayed = []
        if fate == "late":
            self._delayed = [lambda: EtcdClient.txn(self, compares, success, failure)]
            result = None
        else:
            result = super().txn(compares, success, failure, **options)
        for late in delayed:
            late()
        if result is None or fate == "lost":
            raise OutcomeUnknown(f"the answer is {fate}")
        return result


@pytest.fixture
def key(client: EtcdClient, prefix: str, request: pytest.FixtureRequest) -> Iterator[LeasedKey]:
    etcd = Unreliable(client, request.param) if hasattr(request, "param") else client
    made = LeasedKey(etcd, 10, lambda lease: f"{prefix}/a", "things")
    yield made
    made.close(5)


FATES = [("ok",), ("lost", "ok"), ("late", "ok"), ("lost", "late", "ok", "late", "late", "ok", "ok")]


@pytest.mark.parametrize("key", FATES, indirect=True, ids=" ".join)
def test_the_last_value_stays_whatever_becomes_of_the_others(
    key: LeasedKey, client: EtcdClient, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that arrives late does not bring back what was replaced, also if that is wanted again."""
    monkeypatch.setattr("ftcoord.primitives.step_thread.STEP_RETRY_PAUSE", 0.01)
    for number in range(12):
        key.put(b"%d" % (number % 3))
        key.wait(0.02 * number, through_outage=True)
    key.put(b"last")
    assert key.wait(DEADLINE, through_outage=True)
    found = client.get(f"{prefix}/a").one
    assert found is not None
    assert found.value == b"last"


def test_somebody_elses_word_is_overwritten(key: LeasedKey, client: EtcdClient, prefix: str) -> None:
    key.put(b"mine")
    assert key.wait(DEADLINE)
    for theirs in (lambda: client.put(f"{prefix}/a", b"theirs"), lambda: client.delete(Span(f"{prefix}/a"))):
        theirs()
        key.put(b"mine again")
        assert key.wait(DEADLINE)
        found = client.get(f"{prefix}/a").one
        assert found is not None
        assert found.value == b"mine again"


def test_it_ends_with_its_owner(key: LeasedKey, client: EtcdClient, prefix: str) -> None:
    key.put(b"1")
    assert key.wait(DEADLINE)
    assert in_fork(lambda: key.put(b"2")) == ForkedProcessError.__name__
    assert in_fork(lambda: key.close(1)) == "None"
    key.close(5)
    assert client.get(f"{prefix}/a").one is None
    with pytest.raises(ClientClosed):
        key.put(b"2")


def test_in_an_outage_one_waits_and_then_nobody(fragile: EtcdServer) -> None:
    with fragile.get_client() as client:
        key = LeasedKey(client, 10, lambda lease: "/a", "things")
        key.put(b"1")
        assert key.wait(DEADLINE)
        fragile.pause()
        key.put(b"2")
        assert not key.wait(0.2)
        key.put(b"3")
        assert not key.wait(DEADLINE)  # at once, or the test takes too long
        fragile.resume()
        assert key.wait(DEADLINE, through_outage=True)
        key.close(5)
        eventually(lambda: client.get("/a").one is None, "its end")
