"""Heartbeats on a real etcd, and the keys under a lease that they and the timers stand on."""

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
from ftcoord.etcd.api import Compare, Get, KeyValue, Op, TxnResult
from ftcoord.etcd.client import EtcdClient
from ftcoord.heartbeat import HeartbeatWatch
from ftcoord.primitives.leased_keys import LeasedKeys


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


# -- keys under a lease -----------------------------------------------------------------------------------------------


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
def keys(client: EtcdClient, prefix: str, request: pytest.FixtureRequest) -> Iterator[LeasedKeys]:
    etcd = Unreliable(client, request.param) if hasattr(request, "param") else client
    made = LeasedKeys(etcd, 10, lambda name, lease: f"{prefix}/{name}", "things")
    yield made
    made.close(5)


FATES = [("ok",), ("lost", "ok"), ("late", "ok"), ("lost", "late", "ok", "late", "late", "ok", "ok")]


@pytest.mark.parametrize("keys", FATES, indirect=True, ids=" ".join)
def test_the_last_value_stays_whatever_becomes_of_the_others(
    keys: LeasedKeys, client: EtcdClient, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that arrives late does not bring back what was replaced or emptied."""
    monkeypatch.setattr("ftcoord.primitives.leased_keys.KEYS_RETRY_PAUSE", 0.01)
    for number in range(12):
        keys.put("a", lambda: b"%d" % number)  # noqa: B023 - rendered when it is written
        keys.put("b", lambda: b"%d" % number)  # noqa: B023
        keys.wait("a", 0.02 * number, through_outage=True)
        keys.put("b", lambda: b"")
    keys.put("a", lambda: b"last")
    for name in ("a", "b"):
        assert keys.wait(name, DEADLINE, through_outage=True)
    values = {name: kv.value if (kv := client.get(f"{prefix}/{name}").one) else b"" for name in ("a", "b")}
    assert values == {"a": b"last", "b": b""}


def test_what_was_never_there_is_not_emptied(keys: LeasedKeys, client: EtcdClient, prefix: str) -> None:
    keys.put("a", lambda: b"")
    assert keys.wait("a", DEADLINE)
    assert client.get(f"{prefix}/a").one is None


def test_somebody_elses_word_is_overwritten(keys: LeasedKeys, client: EtcdClient, prefix: str) -> None:
    """As a timer's server writes that it has expired, and the worker that it goes on."""
    keys.put("a", lambda: b"mine")
    assert keys.wait("a", DEADLINE)
    client.put(f"{prefix}/a", b"theirs")
    keys.put("a", lambda: b"mine again")
    assert keys.wait("a", DEADLINE)
    found = client.get(f"{prefix}/a").one
    assert found is not None
    assert found.value == b"mine again"


def test_they_end_with_their_owner(keys: LeasedKeys, client: EtcdClient, prefix: str) -> None:
    keys.put("a", lambda: b"1")
    assert keys.wait("a", DEADLINE)
    assert in_fork(lambda: keys.put("a", lambda: b"2")) == ForkedProcessError.__name__
    assert in_fork(lambda: keys.close(1)) == "False"
    keys.close(5)
    assert client.get(f"{prefix}/a").one is None
    with pytest.raises(ClientClosed):
        keys.put("a", lambda: b"2")


def test_in_an_outage_one_waits_and_then_nobody(fragile: EtcdServer) -> None:
    with fragile.get_client() as client:
        keys = LeasedKeys(client, 10, lambda name, lease: f"/{name}", "things")
        keys.put("a", lambda: b"1")
        assert keys.wait("a", DEADLINE)
        fragile.pause()
        keys.put("a", lambda: b"2")
        assert not keys.wait("a", 0.2)
        keys.put("a", lambda: b"3")
        assert not keys.wait("a", DEADLINE)  # at once, or the test takes too long
        fragile.resume()
        assert keys.wait("a", DEADLINE, through_outage=True)
        keys.close(5)
        eventually(lambda: client.get("/a").one is None, "its end")
