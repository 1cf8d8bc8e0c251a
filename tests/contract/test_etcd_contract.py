"""What `ftcoord.etcd.api.Etcd` promises, held against real etcd and against `virtual.MemoryEtcd` alike.

test_histories_of_etcd.py shows that transactions, reads and watches are the same on both.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, TypeAlias

import pytest
from helpers import DEADLINE, Seen, eventually
from virtual import MemoryClient, MemoryEtcd

from ftcoord import config, errors
from ftcoord.etcd import api
from ftcoord.etcd.api import (
    Batch,
    Began,
    Delete,
    Get,
    KeyValue,
    Put,
    RangeResult,
    SnapshotReader,
    Span,
    WatchItem,
    absent,
    exists,
    read_snapshot,
)
from ftcoord.etcd.client import EtcdClient

Client: TypeAlias = "EtcdClient | MemoryClient"


@pytest.fixture(params=["etcd", "memory"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client that nobody else uses; of the etcd that all tests share, or of one in memory."""
    with contextlib.ExitStack() as stack:
        if request.param == "memory":
            yield stack.enter_context(MemoryEtcd()).client()
        else:
            endpoint = request.getfixturevalue("etcd").get_endpoint()
            yield stack.enter_context(EtcdClient(config.EtcdConfig.load(endpoint, env={}, request_timeout=DEADLINE)))


def keys(result: RangeResult) -> list[str]:
    return [kv.key for kv in result.kvs]


def values(seen: Seen, count: int) -> list[bytes]:
    return [event.kv.value for event in seen.events(count)]


def watch_from_now(client: Client, span: Span, seen: Seen) -> Any:
    return client.watch(span, client.get("/").revision + 1, seen)


# -- reads and transactions -----------------------------------------------------------------------------------------


def test_a_transaction_that_only_reads_is_not_sent(client: Client, prefix: str) -> None:
    """Its client's end could crash etcd."""
    read = Get(Span(prefix))
    for success, failure in [((read,), ()), ((read,), (read,)), ((), (read,))]:
        with pytest.raises(errors.RequestRefused, match="read_snapshot"):
            client.txn([absent(prefix)], success, failure)
    assert client.txn([exists(prefix)], (Put(prefix, b""),), (read,)).range(0).one is None


def test_a_snapshot_shows_what_there_was_at_its_first_read(client: Client, prefix: str) -> None:
    first, second = Get(Span(f"{prefix}/a")), Get(Span(f"{prefix}/b"))

    def look(then: SnapshotReader) -> list[KeyValue | None]:
        found = then.range(first).one
        client.txn((), (Put(f"{prefix}/a", b"late"), Put(f"{prefix}/b", b"late")))
        return [found, *(one.one for one in then.ranges([second, first]))]

    assert read_snapshot(client.range, look) == [None, None, None]
    assert client.get(f"{prefix}/b").one is not None


def test_the_pages_of_a_snapshot_are_all_its_keys(client: Client, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "PAGE", 2)
    keys = [f"{prefix}/a/{number}" for number in range(5)]
    client.txn((), [Put(key, b"") for key in [*keys, f"{prefix}/b"]])
    for span, expected in [
        (Span(f"{prefix}/a/", is_prefix=True), keys),
        (Span(keys[1], stop=keys[4]), keys[1:4]),
        (Span(keys[0]), keys[:1]),
        (Span(f"{prefix}/none/", is_prefix=True), []),
    ]:
        assert [kv.key for kv in read_snapshot(client.range, lambda then, span=span: then.pages(span))] == expected


def test_a_transaction_runs_one_branch_and_answers_it_in_order(client: Client, prefix: str) -> None:
    key = f"{prefix}/key"
    first = client.txn((absent(key),), (Put(key, b"1"), Get(Span(key)), Delete(Span(f"{prefix}/none"))), ())
    assert first.succeeded
    assert first.results[0] is None
    assert first.range(1).one is not None
    assert first.range(1).revision == first.revision
    assert first.deleted(2) == 0
    second = client.txn((absent(key),), (Put(key, b"2"),), (Get(Span(key)),))
    assert not second.succeeded
    assert [kv.value for kv in second.range(0).kvs] == [b"1"]
    with pytest.raises(TypeError, match="operation 0"):
        second.deleted(0)
    with pytest.raises(TypeError, match="operation 0"):
        first.range(0)


def test_large_answers(client: Client, prefix: str) -> None:
    for i in range(8):
        client.put(f"{prefix}/{i}", bytes(1 << 20))
    assert sum(len(kv.value) for kv in client.range(Get(Span(prefix, is_prefix=True))).kvs) == 8 << 20
    client.delete(Span(prefix, is_prefix=True))


# -- leases ---------------------------------------------------------------------------------------------------------


def test_leases(client: Client, prefix: str) -> None:
    lease = client.grant(60)
    assert lease.ttl == 60
    client.put(f"{prefix}/key", b"", lease.id)
    assert client.renew(lease.id) == 60
    client.revoke(lease.id)
    client.revoke(lease.id)
    assert client.get(f"{prefix}/key").one is None
    with pytest.raises(errors.LeaseLost):
        client.renew(lease.id)
    with pytest.raises(errors.LeaseLost):
        client.put(f"{prefix}/key", b"", lease.id)


def test_the_shortest_lease(client: Client) -> None:
    for ttl in (1, 0, 2):
        assert client.grant(ttl).ttl == 2
    with pytest.raises(errors.RequestRefused, match="too large lease TTL"):
        client.grant(9_000_000_001)


def test_a_lease_that_is_not_renewed_ends_with_its_keys(client: Client, prefix: str) -> None:
    """All of them at one revision, in the order of the keys; those under another lease, or none, stay."""
    seen = Seen()
    client.watch(Span(prefix, is_prefix=True), 0, seen)
    assert isinstance(seen.next(), Began)
    short, kept = client.grant(4).id, client.grant(60).id
    client.txn((), [*(Put(f"{prefix}/{name}", b"", short) for name in "cab"), Put(f"{prefix}/kept", b"", kept)])
    client.put(f"{prefix}/moved", b"", short)
    client.put(f"{prefix}/moved", b"")
    deleted = [event for event in seen.events(9) if event.kind == "delete"]
    assert [event.kv.key for event in deleted] == [f"{prefix}/{name}" for name in "abc"]
    assert len({event.kv.mod_revision for event in deleted}) == 1
    assert keys(client.range(Get(Span(prefix, is_prefix=True)))) == [f"{prefix}/kept", f"{prefix}/moved"]
    with pytest.raises(errors.LeaseLost):
        client.renew(short)
    client.revoke(short)
    client.revoke(kept)


def test_a_lease_that_is_renewed_lives(client: Client, prefix: str) -> None:
    lease = client.grant(4).id  # renewed so often that a machine which stalls for some seconds does not end it
    client.put(prefix, b"", lease)
    pause = threading.Event()
    for _ in range(14):
        assert client.renew(lease) == 4
        pause.wait(0.4)
    assert client.get(prefix).one is not None
    client.revoke(lease)


# -- watches --------------------------------------------------------------------------------------------------------


def test_the_changes_of_a_revision_come_together(client: Client, prefix: str) -> None:
    seen = Seen()
    watch_from_now(client, Span(prefix, is_prefix=True), seen)
    for _ in range(20):
        client.txn((), [Put(f"{prefix}/{i}", b"") for i in range(100)])
    client.delete(Span(prefix, is_prefix=True))
    seen.events(2100)
    for batch in seen.batches:
        assert len(batch.events) % 100 == 0


def test_a_watch_of_deletes_alone(client: Client, prefix: str) -> None:
    seen, marker = Seen(), Seen()
    now = client.get(prefix).revision + 1
    client.watch(Span(prefix), now, seen, deletes_only=True)
    client.watch(Span(prefix), now, marker)
    client.put(prefix, b"1")
    client.put(prefix, b"2")
    client.delete(Span(prefix))
    assert [event.kind for event in marker.events(3)] == ["put", "put", "delete"]
    assert [event.kind for event in seen.events(1)] == ["delete"]
    assert seen.is_quiet()


def test_cancel_is_idempotent_and_final(client: Client, prefix: str) -> None:
    seen, other = Seen(), Seen()
    watch = watch_from_now(client, Span(prefix), seen)
    watch_from_now(client, Span(prefix), other)
    client.put(prefix, b"1")
    seen.events(1)
    watch.cancel()
    watch.cancel()
    client.put(prefix, b"2")
    other.events(2)
    assert seen.is_quiet()
    first, second = client.watch(Span(prefix), 0, seen), Seen()
    assert isinstance(seen.next(), Began)
    first.cancel()
    client.watch(Span(prefix), 0, second)
    assert isinstance(second.next(), Began)
    first.cancel()  # and not the one that watches the same
    client.put(prefix, b"3")
    assert values(second, 1) == [b"3"]


def test_a_compacted_start_ends_the_watch(client: Client, prefix: str) -> None:
    revisions = [client.put(prefix, str(i).encode()).revision for i in range(5)]
    client.compact(revisions[3])
    seen, other = Seen(), Seen()
    client.watch(Span(prefix), revisions[0], seen)
    error = seen.error()
    assert isinstance(error, errors.Compacted)
    assert error.compact_revision == revisions[3]
    client.watch(Span(prefix), error.compact_revision, other)
    assert values(other, 2) == [b"3", b"4"]
    assert seen.is_quiet()


def test_a_watch_that_begins_behind_etcds_end_is_told_that_etcd_was_rewound(client: Client, prefix: str) -> None:
    seen = Seen()
    now = client.get("/").revision
    client.watch(Span(prefix), now + 1000, seen)
    error = seen.error()
    assert isinstance(error, errors.Rewound)
    assert now <= error.compact_revision < now + 1000
    assert seen.is_quiet()


def test_who_watches_what_is_watched_is_told_at_once_that_it_stands(client: Client, prefix: str) -> None:
    first = Seen()
    client.watch(Span(prefix), 0, first)
    assert isinstance(first.next(), Began)
    revision = client.put(prefix, b"1").revision
    assert values(first, 1) == [b"1"]
    told: list[tuple[WatchItem, str]] = []
    client.watch(Span(prefix), 0, lambda item: told.append((item, threading.current_thread().name)))
    assert told == [(Began(revision), threading.current_thread().name)]
    client.put(prefix, b"2")
    eventually(lambda: len(told) == 2, what="the change")
    assert isinstance(told[1][0], Batch)
    assert told[1][1] != threading.current_thread().name
    assert values(first, 2) == [b"1", b"2"]


def test_a_watcher_that_raises_costs_nobody_an_event(client: Client, prefix: str) -> None:
    seen, failed = Seen(), []

    def fail(item: WatchItem) -> None:
        failed.append(item)
        raise ValueError("of the test")

    client.watch(Span(prefix), 0, fail)
    client.watch(Span(prefix), 0, seen)
    assert isinstance(seen.next(), Began)
    for value in (b"1", b"2"):
        client.put(prefix, value)
    assert values(seen, 2) == [b"1", b"2"]
    assert len(failed) == 3


def test_closing_ends_every_watch_with_an_error(client: Client, prefix: str) -> None:
    before = set(threading.enumerate())
    watched = [Seen(), Seen()]
    for number, seen in enumerate(watched):
        client.watch(Span(f"{prefix}/{number}"), 0, seen)
        assert isinstance(seen.next(), Began)
    client.close()
    for seen in watched:
        assert isinstance(seen.next(), errors.ClientClosed)
        assert seen.is_quiet()
    eventually(lambda: not {t for t in set(threading.enumerate()) - before if "ftcoord" in t.name}, what="its threads")


def test_a_closed_client_says_so(client: Client) -> None:
    client.get("/key")
    client.close()
    client.close()
    for use in (
        lambda: client.get("/key"),
        lambda: client.put("/key", b""),
        lambda: client.renew(1),
        lambda: client.watch(Span("/key"), 1, lambda item: None),
    ):
        with pytest.raises(errors.ClientClosed, match="was closed"):
            use()
