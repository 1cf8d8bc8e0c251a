"""Copies of keys that turn out to be wrong: changes that a watch missed, and an etcd that has lost what they show."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from accidents import Forgetful, Rewinding, cut_off, settle
from helpers import DEADLINE, eventually

from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import StateError
from ftcoord.etcd.api import Batch, Began, Delete, Etcd, Get, KeyValue, Put, Span, WatchItem
from ftcoord.etcd.client import EtcdClient
from ftcoord.heartbeat import Heartbeat, watch_heartbeats
from ftcoord.primitives.group.parse_cache import ParsedKey, ParsedKeys
from ftcoord.primitives.mirror import Feed, Mirror, Posted

MISSED = "missed a change"


@pytest.fixture
def door(client: EtcdClient) -> Forgetful:
    return Forgetful(client)


# -- changes that were missed -----------------------------------------------------------------------------------------

GAPS = {
    "a change": ("put", "put!", "put"),
    "the creation": ("put!", "put"),
    "the deletion": ("put", "delete!", "put"),
    "a whole life": ("put", "delete!", "put!", "put"),
    "the creation of what is then deleted": ("put!", "delete"),
}


@pytest.mark.parametrize("history", GAPS.values(), ids=GAPS.keys())
def test_a_missed_change_is_noticed_and_made_up_for(
    door: Forgetful, prefix: str, history: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """With the next change of the key; what other keys missed is told then too, each change once."""
    feed, told = Feed(door, Span(prefix, is_prefix=True)), dict[str, KeyValue]()

    def is_true() -> bool:
        return catch_up(feed, told) == {kv.key: kv for kv in door.real.range(Get(Span(prefix, is_prefix=True))).kvs}

    catch_up(feed, told)
    key, other = f"{prefix}/key", f"{prefix}/other"
    for number, step in enumerate(history):
        if step.endswith("!") and not door.lost:
            eventually(is_true, what="all of before, so that this is what is lost")
        with door.losing(*([key, other] if step.endswith("!") else [])):
            change(door, key, step.rstrip("!"), number)
            if step.endswith("!"):
                door.txn((), [Put(other, str(number).encode())])
    eventually(is_true, what=lambda: f"{told} is what etcd has")
    assert other in told
    assert caplog.text.count(MISSED) == 1
    feed.close()


def change(etcd: Etcd, key: str, step: str, number: int) -> None:
    etcd.txn((), [Put(key, str(number).encode()) if step == "put" else Delete(Span(key))])


def catch_up(feed: Feed, told: dict[str, KeyValue]) -> dict[str, KeyValue]:
    """Take in what a feed tells; it has to fit what was told before."""
    while (news := feed.next(0.1)) is not None or not feed.synced:
        for key, was, now in news.changes if news else ():
            assert told.get(key) == was != now
            if now is None:
                del told[key]
            else:
                told[key] = now
    return told


def test_nothing_is_read_again_when_nothing_was_missed(
    door: Forgetful, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All that keys can go through: lives and deaths, several at one revision, ends of leases, values learned early."""
    inbox: queue.SimpleQueue[Posted] = queue.SimpleQueue()
    keys = [f"{prefix}/{number}" for number in range(3)]
    whole = Mirror(door, Span(prefix, is_prefix=True), lambda mirror, posted: inbox.put(posted))
    one: queue.SimpleQueue[Posted] = queue.SimpleQueue()
    single = Mirror(door, Span(keys[0]), lambda mirror, posted: one.put(posted))
    settle(whole, inbox)
    settle(single, one)
    before = door.reads
    lease = door.grant(60).id
    for number in range(5):
        value = str(number).encode()
        result = door.txn((), [*(Put(key, value, lease) for key in keys), Get(Span(keys[0]))])
        learned = result.range(3).one
        assert learned is not None
        single.learn(learned)
        if number % 2:
            door.txn((), [Delete(Span(prefix, is_prefix=True))])
        else:
            door.txn((), [Put(keys[1], value), Delete(Span(keys[2]))])
    door.revoke(lease)
    last = door.txn((), [Put(f"{prefix}/last", b""), Put(keys[0], b"last")]).revision
    for mirror, items in ((whole, inbox), (single, one)):
        while mirror.revision < last:
            mirror.apply(items.get(timeout=DEADLINE))
        assert mirror.synced
        mirror.close()
    assert door.reads == before
    assert MISSED not in caplog.text


def test_a_mirror_of_deletes_alone_misses_no_puts(door: Forgetful, prefix: str) -> None:
    inbox: queue.SimpleQueue[Posted] = queue.SimpleQueue()
    mirror = Mirror(door, Span(prefix), lambda mirror, posted: inbox.put(posted), deletes_only=True)
    door.txn((), [Put(prefix, b"1")])
    settle(mirror, inbox)
    before = door.reads
    for _ in range(2):  # the second time it was not known to be there
        door.txn((), [Put(prefix, b"2")])
        door.txn((), [Put(prefix, b"3")])
        revision = door.txn((), [Delete(Span(prefix))]).revision
        while mirror.revision < revision:
            mirror.apply(inbox.get(timeout=DEADLINE))
        assert mirror.one is None
    assert (mirror.synced, door.reads) == (True, before)
    mirror.close()


def test_the_end_of_a_heartbeat_that_was_never_seen_is_no_news(door: Forgetful, prefix: str) -> None:
    run = prefix.strip("/")
    with watch_heartbeats(run, door) as events:
        with Heartbeat(run, "seen first", 30, etcd=door.real):
            assert next(events).name == "seen first"
            door.loses = lambda _key: True
            with Heartbeat(run, "unseen", 30, etcd=door.real):
                eventually(lambda: door.lost == 1, what="its beat is lost")
                door.loses = lambda key: "unseen" in key and door.lost == 1  # its parting words
        last = next(events)
        assert (last.kind, last.name) == ("lost", "seen first")


# -- an etcd that lost what it had ------------------------------------------------------------------------------------


@pytest.fixture
def rewinding(tmp_path: Path) -> Iterator[Rewinding]:
    rewinding = Rewinding(tmp_path / "data")
    with rewinding.server:
        yield rewinding


@pytest.mark.parametrize("more", [0, 3], ids=["as many writes since", "more"])
def test_what_etcd_lost_is_noticed_though_it_has_caught_up(rewinding: Rewinding, more: int) -> None:
    """Others were back before, and wrote: etcd's revision does not tell any more."""
    inbox: queue.SimpleQueue[Posted] = queue.SimpleQueue()
    with rewinding.server.get_client() as client, rewinding.server.get_client() as other:
        mirror = Mirror(client, Span("/m/", is_prefix=True), lambda mirror, posted: inbox.put(posted))
        other.put("/m/kept", b"before")
        rewinding.remember()
        settle(mirror, inbox)
        lost = [other.put(key, b"lost").revision for key in ("/m/kept", "/m/lost", "/m/new")]
        while mirror.revision < lost[-1]:
            mirror.apply(inbox.get(timeout=DEADLINE))
        with cut_off(client):
            rewinding.lose()
            rewinding.server.restart()
            written = [other.put(key, b"new").revision for key in ("/elsewhere", "/elsewhere", "/m/new")]
            assert written == lost
            for _ in range(more):
                other.put("/m/more", b"")
        expected = {kv.key: kv for kv in other.range(Get(Span("/m/", is_prefix=True))).kvs}
        assert len(expected) == 2 + bool(more)
        eventually(lambda: followed(mirror, inbox) == expected, what=lambda: f"{mirror.kvs} to be {expected}")
        mirror.close()


def test_an_interruption_costs_one_read_and_no_change(fragile: EtcdServer, caplog: pytest.LogCaptureFixture) -> None:
    """What was written meanwhile is told change by change, as the resumed watch brings it."""
    with fragile.get_client() as client, fragile.get_client() as other:
        door = Forgetful(client)
        feed = Feed(door, Span("/m/", is_prefix=True))
        other.put("/m/key", b"0")
        catch_up(feed, told := {})
        reads, values = door.reads, list[bytes]()
        for number in range(1, 4):
            with cut_off(client):
                other.put("/m/key", f"{number} during".encode())
                other.put("/m/key", f"{number}".encode())
            while values[-1:] != [f"{number}".encode()]:
                news = feed.next(DEADLINE)
                values += [now.value for _, _, now in news.changes if now] if news else []
            eventually(lambda: feed.next(0.05) is None and feed.synced, what="peace")
        assert values == [text.encode() for n in "123" for text in (f"{n} during", n)]
        assert door.reads == reads + 3
        assert MISSED not in caplog.text
        assert list(told) == ["/m/key"]
        feed.close()


def followed(mirror: Mirror, inbox: queue.SimpleQueue[Posted]) -> dict[str, KeyValue]:
    """The mirror after all that has come by now."""
    while not inbox.empty():
        mirror.apply(inbox.get())
    if not mirror.synced:
        mirror.sync()
    return mirror.kvs


# -- values that are read once ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Named:
    """What a member asks."""

    name: str
    highest: int = 0


def test_another_value_with_the_same_revision_is_read_again() -> None:
    before = KeyValue("/key", b"before", 3, 5, 2, 0)
    after = before._replace(value=b"after")
    reading = ParsedKey(lambda key, value: value)
    assert [reading.of(kv) for kv in (before, before, after)] == [b"before", b"before", b"after"]
    readings = ParsedKeys(lambda key, value: Named(value.decode()))
    read = [readings.of([kv]) for kv in (before, after)]
    assert read == [[(before, Named("before"))], [(after, Named("after"))]]


def test_many_members_that_nobody_can_read_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(key: str, value: bytes) -> Named:
        raise StateError(key, "is garbage")

    reading = ParsedKeys(refuse)
    garbage = [KeyValue(f"/{at}", b"", 1, 1, 1, at) for at in range(1, 1001)]
    for _ in range(2):
        assert reading.of(garbage) == []
    reading.of([*garbage, KeyValue("/last", b"", 1, 1, 1, 2000)])
    first, second = [record.getMessage().partition(";")[0] for record in caplog.records]
    assert first.startswith("1000 members count as alive, and as asking for nothing")
    assert second == "a member counts as alive, and as asking for nothing: etcd key '/last' is garbage"


# -- those who are told -----------------------------------------------------------------------------------------------


def test_one_who_fails_when_told_costs_nobody_else_an_event(
    client: EtcdClient, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    told: list[queue.SimpleQueue[WatchItem]] = [queue.SimpleQueue() for _ in range(3)]

    def deliver(number: int, item: WatchItem) -> None:
        told[number].put(item)
        if number == 1 and not isinstance(item, Began):
            raise ValueError("of the test")

    watches = [client.watch(Span(prefix), 0, lambda item, n=n: deliver(n, item)) for n in range(3)]
    for items in told:
        assert isinstance(items.get(timeout=DEADLINE), Began)
    for value in (b"1", b"2"):
        client.put(prefix, value)
        for items in told:
            item = items.get(timeout=DEADLINE)
            assert isinstance(item, Batch)
            assert item.events[0].kv.value == value
    assert caplog.text.count("ValueError: of the test") == 2
    for watch in watches:
        watch.cancel()
