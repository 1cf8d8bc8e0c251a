"""Heartbeats on a real etcd, and the key under a lease that they and the timers stand on."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator

import pytest
from helpers import DEADLINE, eventually, python

import ftcoord
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import EtcdUnavailable, OutcomeUnknown
from ftcoord.etcd.client import EtcdClient
from ftcoord.heartbeat import HeartbeatEvent, HeartbeatWatch
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


def test_without_etcd_there_is_no_heartbeat(fragile: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftcoord.heartbeat.HEARTBEAT_TIMEOUT", 0.5)
    fragile.kill()
    with pytest.raises(EtcdUnavailable), ftcoord.Heartbeat("job", "a", 2, etcd=fragile.get_endpoint()):
        pytest.fail("there is none")


# -- a key under a lease -----------------------------------------------------------------------------------------------


@pytest.fixture
def key(client: EtcdClient, prefix: str) -> Iterator[LeasedKey]:
    made = LeasedKey(client, 10, lambda lease: f"{prefix}/a", "things")
    yield made
    made.close(5)


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
