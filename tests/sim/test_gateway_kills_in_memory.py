"""Orders to end managers behind a gateway, which calls those whose addresses it knows."""

from __future__ import annotations

import logging
from unittest import mock

import builders
import pytest
from worlds import World, simulated

from ftcoord import concurrency
from ftcoord.coordination import gateway
from ftcoord.coordination.address import Job
from ftcoord.coordination.gateway import GatewaySessions
from ftcoord.coordination.replica import order_kill
from ftcoord.core.layout import kill_key, members_span
from ftcoord.etcd.api import Get

LONG = 60.0
"""Seconds, virtual."""
JOB = Job("etcd", "", "job", min_replicas=1, join_timeout_ms=100, heartbeat_timeout_ms=30_000)


class Behind:
    """A gateway's replicas, and the managers of theirs that it has called to end, with the messages."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.called: list[tuple[str, str]] = []

    def __enter__(self) -> Behind:
        self._patch = mock.patch.object(gateway, "_kill", lambda *call: self.called.append(call))
        self._patch.start()
        self._sessions = GatewaySessions(self._world.etcd.client(), JOB, lambda: None)
        return self

    def __exit__(self, *_error: object) -> None:
        self._sessions.close()
        self._patch.stop()

    def beat(self, name: str) -> str:
        """The id of the newest member, after a beat."""
        self._sessions.beat(name, "ipv4:10.0.0.1:1", concurrency.now() + LONG)
        (newest, *_) = self._world.observer.range(Get(members_span(JOB.prefix), order="newest")).kvs
        return newest.key.rpartition("/")[2]

    def ask(self, name: str) -> None:
        request = builders.request(name, address=f"http://{name}:1", step=1)
        self._sessions.ask(request, "ipv4:10.0.0.1:1", concurrency.now() + LONG, bool)


@simulated
def test_a_replica_that_only_beats_is_found_by_the_last_quorum(world: World) -> None:
    """It hangs in its step, and its gateway was started again since it asked."""
    with Behind(world) as before:
        before.ask("a")
    with Behind(world) as after:
        after.beat("b")
        after.beat("a")
        began = concurrency.now()
        order_kill(world.observer, JOB.prefix, "a", "why", began + LONG)  # its beats have ended
        assert concurrency.now() - began > 1
        assert after.called == [("http://a:1", "why")]
        after.beat("b")
        with pytest.raises(TimeoutError, match="still a member"):
            order_kill(world.observer, JOB.prefix, "b", "why", concurrency.now() + 3)
        assert after.called == [("http://a:1", "why")], "the address of the other one is not known"


@simulated
def test_each_order_is_for_one_manager_once_and_waits_for_its_address(world: World) -> None:
    """A manager that was restarted since, under the same name and lease, does not get its predecessor's."""
    client = world.observer
    with Behind(world) as behind:
        order, other = kill_key(JOB.prefix, behind.beat("a")), kill_key(JOB.prefix, "0" * 16)
        lease = client.grant(600).id
        client.put(order, b"why", lease)
        concurrency.sleep(1)
        assert behind.called == [], "it has not asked yet, so nobody knows where its manager is"
        behind.ask("a")
        for value in (b"1", b"2"):  # another change has all orders looked at again
            client.put(other, value)
        client.put(order, b"why", lease)  # by one whose answer was lost
        concurrency.sleep(1)
        assert behind.called == [("http://a:1", "why")]
        client.put(order, b"again", client.grant(600).id)
        concurrency.sleep(1)
        assert behind.called == [("http://a:1", "why"), ("http://a:1", "again")], "what was ordered anew is obeyed"
    client.put(order, b"late", client.grant(600).id)
    concurrency.sleep(1)
    assert len(behind.called) == 2, "nobody is called after the end"


@pytest.mark.parametrize("address", ["", "https://x:1", "http://x", "http://127.0.0.1:1"])
def test_a_manager_that_cannot_be_reached_is_logged(
    address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "KILL_TIMEOUT", 0.5)
    with caplog.at_level(logging.INFO):
        gateway._kill(address, "why")
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert "does not end, as ordered (why): " in line.getMessage()
