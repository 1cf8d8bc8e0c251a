"""Orders to end a manager's process, with an etcd in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers import eventually
from virtual import REFUSED, MemoryClient, MemoryEtcd

from ftcoord.coordination import kills
from ftcoord.coordination.kills import OrderedKill, ends_here, watch_kills
from ftcoord.core.layout import kill_key
from ftcoord.etcd.api import Delete, Put, Span

PREFIX = "/f/job/quorum"
KEY = kill_key(PREFIX, "a")


@pytest.fixture
def client() -> Iterator[MemoryClient]:
    with MemoryEtcd() as etcd, etcd.client() as client:
        yield client


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why this process was ended, if it was."""
    ended: list[str] = []
    monkeypatch.setattr(kills, "end_process", ended.append)
    return ended


def ordered(client: MemoryClient) -> OrderedKill:
    """The order that a manager sees, when it has seen it."""
    client.put(KEY, b"why", client.grant(60).id)
    seen: list[OrderedKill] = []
    with watch_kills(client, PREFIX, seen.extend, lambda error: None):
        eventually(lambda: seen, "it is seen")
    return seen[0]


def test_an_order_for_this_member_ends_the_process_and_is_taken(client: MemoryClient, ended: list[str]) -> None:
    order = ordered(client)
    ends_here(lambda member: member == "b")([order])
    assert not ended
    assert client.get(KEY).one is not None
    ends_here(lambda member: member == "a")([order])
    assert ended == ["why"]
    assert client.get(KEY).one is None


@pytest.mark.parametrize("again", [False, True], ids=["withdrawn", "replaced"])
def test_an_order_that_stands_no_longer_ends_nothing(client: MemoryClient, ended: list[str], again: bool) -> None:
    """The manager could not run while it was withdrawn."""
    order = ordered(client)
    client.txn((), [Put(KEY, b"another") if again else Delete(Span(KEY))])
    ends_here(lambda _member: True)([order])
    assert not ended
    assert (client.get(KEY).one is not None) is again


def test_a_manager_ends_though_etcd_does_not_answer(client: MemoryClient, ended: list[str]) -> None:
    order = ordered(client)
    client.fate = lambda _call: REFUSED
    ends_here(lambda _member: True)([order])
    assert ended == ["why"]
