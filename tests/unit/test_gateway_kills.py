"""Orders to kill replicas behind a gateway, with an etcd in memory, and managers that are none."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from helpers import DEADLINE, eventually
from replicas_in_memory import PREFIX, join

from ftcoord import concurrency
from ftcoord.coordination import gateway
from ftcoord.coordination.gateway import KILL_TIMEOUT, GatewayKills
from ftcoord.core.layout import kill_key, member_id
from ftcoord.testing import MemoryClient, MemoryEtcd


@pytest.fixture
def client() -> Iterator[MemoryClient]:
    with MemoryEtcd() as etcd, etcd.client() as client:
        yield client


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The managers that were called, each with its message, and in time."""
    called: list[tuple[str, str]] = []

    def call(address: str, message: str, deadline: float) -> None:
        assert 0 < deadline - concurrency.now() <= KILL_TIMEOUT
        called.append((address, message))

    monkeypatch.setattr(gateway, "_kill", call)
    return called


def test_each_order_is_for_one_manager_once(client: MemoryClient, called: list[tuple[str, str]]) -> None:
    """A manager that was restarted since, under the same name and lease, does not get its predecessor's."""
    member = member_id(join(client, "east"))
    order, other = kill_key(PREFIX, member), kill_key(PREFIX, "0" * 16)
    with GatewayKills(client, PREFIX, {member: "http://east:1"}.get) as kills:
        kills.begin()
        lease = client.grant(60).id
        client.put(order, b"why", lease)
        eventually(lambda: called == [("http://east:1", "why")], "its manager is called")
        for value in (b"1", b"2"):  # another change has all orders looked at again
            client.put(other, value)
        client.put(order, b"why", lease)  # by one whose answer was lost
        client.put(order, b"again", client.grant(60).id)
        eventually(lambda: len(called) == 2, "what was ordered anew is obeyed")
    assert called == [("http://east:1", "why"), ("http://east:1", "again")]


def test_an_order_waits_for_the_address_of_its_manager(client: MemoryClient, called: list[tuple[str, str]]) -> None:
    """And is left to others who have it."""
    member, managers = member_id(join(client, "east")), dict[str, str]()
    with GatewayKills(client, PREFIX, managers.get) as kills:
        kills.begin()
        client.put(kill_key(PREFIX, member), b"why", client.grant(60).id)
        client.put(kill_key(PREFIX, "0" * 16), b"another")
        managers[member] = "http://east:1"
        client.put(kill_key(PREFIX, "0" * 16), b"once more")
        eventually(lambda: called, "it is called")


def test_no_manager_is_called_after_the_end(client: MemoryClient, called: list[tuple[str, str]]) -> None:
    member = member_id(join(client, "east"))
    with GatewayKills(client, PREFIX, {member: "http://east:1"}.get) as kills:
        kills.begin()
    client.put(kill_key(PREFIX, member), b"why")
    assert called == []


@pytest.mark.parametrize("address", ["", "https://x:1", "http://x", "http://127.0.0.1:1"])
def test_a_manager_that_cannot_be_reached_is_logged(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        gateway._kill(address, "why", concurrency.now() + DEADLINE)
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert "does not end, as ordered (why): " in line.getMessage()
