"""Orders to kill replicas behind a gateway, with an etcd in memory, and managers that are none."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
from helpers import DEADLINE, eventually
from replicas_in_memory import PREFIX, join
from virtual import MemoryClient, MemoryEtcd

from ftcoord import concurrency
from ftcoord.coordination import gateway_kills
from ftcoord.coordination.gateway_kills import GatewayKills
from ftcoord.coordination.kills import order_kill
from ftcoord.core.layout import kill_key, member_id


@pytest.fixture
def client() -> Iterator[MemoryClient]:
    with MemoryEtcd() as etcd, etcd.client() as client:
        yield client


def kill(client: MemoryClient, name: str, wait: float = DEADLINE) -> None:
    order_kill(client, PREFIX, name, "why", concurrency.now() + wait)


def test_an_order_is_taken_when_its_manager_has_ended(client: MemoryClient, monkeypatch: pytest.MonkeyPatch) -> None:
    member, ended = member_id(join(client, "east")), threading.Event()
    told: list[tuple[str, str]] = []

    def end(address: str, message: str, _deadline: float) -> str:
        assert client.get(kill_key(PREFIX, member)).one is not None, "it is not taken yet"
        told.append((address, message))
        ended.set()
        return ""

    monkeypatch.setattr(gateway_kills, "_kill", end)
    with GatewayKills(client, PREFIX, {member: "http://east:1"}.get) as kills:
        kills.begin()
        kills.begin()
        kill(client, "east")
        assert ended.wait(DEADLINE)
    assert told == [("http://east:1", "why")]


def test_one_that_is_not_obeyed_is_not_taken_and_never_given_to_a_successor(
    client: MemoryClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    member, told = member_id(join(client, "east")), list[str]()

    def refuse(address: str, _message: str, _deadline: float) -> str:
        told.append(address)
        return "it listens to nobody"

    monkeypatch.setattr(gateway_kills, "_kill", refuse)
    order, other = kill_key(PREFIX, member), kill_key(PREFIX, "0" * 16)
    with caplog.at_level(logging.WARNING), GatewayKills(client, PREFIX, {member: "http://east:1"}.get) as kills:
        kills.begin()
        client.put(order, b"why", client.grant(60).id)
        eventually(lambda: "it listens to nobody" in caplog.text, "it is said")
        for value in (b"1", b"2"):  # another change has all orders looked at again
            client.put(other, value)
        client.put(order, b"again", client.grant(60).id)
        eventually(lambda: len(told) == 2, "what was ordered anew is handed on")
    assert client.get(order).one is not None
    assert told == ["http://east:1"] * 2


def test_orders_for_others_replicas_are_left_alone(client: MemoryClient) -> None:
    join(client, "east")
    with GatewayKills(client, PREFIX, lambda _member: None) as kills:
        kills.begin()
        with pytest.raises(TimeoutError, match="or its gateway"):
            kill(client, "east", wait=0.2)


@pytest.mark.parametrize("address", ["", "https://x:1", "http://x", "http://127.0.0.1:1"])
def test_a_manager_that_cannot_be_reached_is_a_problem_in_words(address: str) -> None:
    assert gateway_kills._kill(address, "why", concurrency.now() + DEADLINE)
