"""What `ftcoord.etcd.api.Etcd` promises, held against real etcd and against `virtual.MemoryEtcd` alike."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
from helpers import DEADLINE, Seen, eventually
from virtual import MemoryClient, MemoryEtcd

from ftcoord.config import EtcdConfig
from ftcoord.errors import ClientClosed, Compacted, LeaseLost, RequestRefused, Rewound
from ftcoord.etcd import api
from ftcoord.etcd.api import (
    Batch,
    Began,
    Compare,
    Delete,
    Get,
    KeyValue,
    Op,
    Put,
    RangeResult,
    SnapshotReader,
    Span,
    WatchItem,
    absent,
    exists,
    read_snapshot,
    unchanged,
)
from ftcoord.etcd.client import EtcdClient

Client: TypeAlias = "EtcdClient | MemoryClient"
KINDS = ["etcd", "memory"]


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client that nobody else uses; of the etcd that all tests share, or of one in memory."""
    with contextlib.ExitStack() as stack:
        yield connected(request, "etcd", stack)


@pytest.fixture(params=KINDS)
def empty(request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of an etcd in which nobody else writes."""
    with contextlib.ExitStack() as stack:
        yield connected(request, "fragile", stack)


def connected(request: pytest.FixtureRequest, server: str, stack: contextlib.ExitStack) -> Client:
    if request.param == "memory":
        return stack.enter_context(MemoryEtcd()).client()
    endpoint = request.getfixturevalue(server).get_endpoint()
    return stack.enter_context(EtcdClient(EtcdConfig.load(endpoint, env={}, request_timeout=DEADLINE)))


def keys(result: RangeResult) -> list[str]:
    return [kv.key for kv in result.kvs]


def values(seen: Seen, count: int) -> list[bytes]:
    return [event.kv.value for event in seen.events(count)]


def watch_from_now(client: Client, span: Span, seen: Seen) -> Any:
    return client.watch(span, client.get("/").revision + 1, seen)


# -- reads and transactions -----------------------------------------------------------------------------------------


def test_range_put_and_delete(client: Client, prefix: str) -> None:
    written = [client.put(f"{prefix}/{name}", name.encode()).revision for name in "cab"]
    client.put(f"{prefix}/a", b"again")
    everything = Span(prefix, is_prefix=True)
    found = client.range(Get(everything))
    assert keys(found) == [f"{prefix}/{name}" for name in "abc"]
    assert [(kv.value, kv.version) for kv in found.kvs] == [(b"again", 2), (b"b", 1), (b"c", 1)]
    assert found.count == 3
    assert found.kvs[2].create_revision == found.kvs[2].mod_revision == written[0]
    assert client.range(Get(everything, limit=2)).count == 3
    assert keys(client.range(Get(everything, limit=2))) == [f"{prefix}/a", f"{prefix}/b"]
    assert client.range(Get(everything, keys_only=True)).kvs[0].value == b""
    assert client.range(Get(everything, count_only=True)) == RangeResult((), 3, found.revision)
    assert client.delete(Span(f"{prefix}/b")) == 1
    assert client.delete(Span(f"{prefix}/b")) == 0
    assert client.get(f"{prefix}/b").one is None
    assert client.delete(everything) == 2
    assert client.range(Get(everything)).kvs == ()


def test_a_transaction_that_only_reads_is_not_sent(client: Client, prefix: str) -> None:
    """Its client's end could crash etcd."""
    read = Get(Span(prefix))
    for success, failure in [((read,), ()), ((read,), (read,)), ((), (read,))]:
        with pytest.raises(RequestRefused, match="read_snapshot"):
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


def test_newest_first_goes_by_creation_not_by_change(client: Client, prefix: str) -> None:
    for name in "cab":
        client.put(f"{prefix}/{name}", b"")
    client.put(f"{prefix}/c", b"changed last, yet the oldest")
    everything = Span(prefix, is_prefix=True)
    assert keys(client.range(Get(everything, order="newest"))) == [f"{prefix}/{name}" for name in "bac"]
    assert keys(client.range(Get(everything, order="newest", limit=1))) == [f"{prefix}/b"]


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


def test_every_kind_of_comparison(client: Client, prefix: str) -> None:
    key = f"{prefix}/key"
    lease = client.grant(60)
    created = client.put(key, b"m", lease.id).revision
    changed = client.put(key, b"n", lease.id).revision
    actual: dict[Any, int | bytes] = {
        "create": created,
        "mod": changed,
        "version": 2,
        "value": b"n",
        "lease": lease.id,
    }
    for target, value in actual.items():
        less = b"m" if isinstance(value, bytes) else value - 1
        more = b"o" if isinstance(value, bytes) else value + 1
        for relation, operand, expected in [
            *[("=", value, True), ("=", less, False), ("!=", more, True), ("!=", value, False)],
            *[(">", less, True), (">", value, False), ("<", more, True), ("<", value, False)],
        ]:
            compare = Compare(key, target, relation, operand)  # type: ignore[arg-type]
            assert client.txn((compare,), ()).succeeded is expected, compare
    nothing = f"{prefix}/nothing"
    assert client.txn((exists(key), unchanged(key, changed), absent(nothing), unchanged(nothing, 0)), ()).succeeded
    assert not client.txn((exists(nothing),), ()).succeeded
    client.revoke(lease.id)


def test_large_answers(client: Client, prefix: str) -> None:
    for i in range(8):
        client.put(f"{prefix}/{i}", bytes(1 << 20))
    assert sum(len(kv.value) for kv in client.range(Get(Span(prefix, is_prefix=True))).kvs) == 8 << 20
    client.delete(Span(prefix, is_prefix=True))


def test_the_count_is_that_of_the_span_whatever_is_left_of_it(client: Client, prefix: str) -> None:
    for name in "cab":
        client.put(f"{prefix}/{name}", b"")
    everything = Span(prefix, is_prefix=True)
    assert keys(client.range(Get(everything, order="oldest"))) == [f"{prefix}/{name}" for name in "cab"]
    limited = client.range(Get(everything, order="oldest", limit=1))
    assert (keys(limited), limited.count) == ([f"{prefix}/c"], 3)
    assert client.range(Get(everything, count_only=True, limit=1)).count == 3
    assert client.range(Get(everything, limit=3, keys_only=True, order="newest")).kvs[0].key == f"{prefix}/b"


def test_a_span_of_one_key_is_no_prefix(client: Client, prefix: str) -> None:
    client.txn((), [Put(prefix, b""), Put(f"{prefix}/a", b"")])
    assert keys(client.range(Get(Span(prefix)))) == [prefix]
    assert client.delete(Span(prefix)) == 1
    assert keys(client.range(Get(Span(prefix, is_prefix=True)))) == [f"{prefix}/a"]


def test_only_what_changes_something_has_a_revision(empty: Client) -> None:
    """One for a transaction, however much it changes."""
    before = empty.get("/key").revision
    assert empty.delete(Span("/key")) == 0
    assert not empty.txn((exists("/key"),), (Put("/key", b""),), (Delete(Span("/key")),)).succeeded
    lease = empty.grant(60).id
    empty.renew(lease)
    assert empty.get("/key").revision == before
    written = empty.txn((), (Put("/key", b""), Put("/other", b"", lease), Delete(Span("/none"))))
    assert written.revision == before + 1
    assert {kv.mod_revision for kv in empty.range(Get(Span("/", is_prefix=True))).kvs} == {before + 1}
    empty.revoke(lease)
    assert empty.get("/key").revision == before + 2


def test_a_transaction_reads_what_it_wrote_at_its_own_revision(client: Client, prefix: str) -> None:
    client.put(prefix, b"1")
    result = client.txn((), (Get(Span(prefix)), Put(prefix, b"2"), Get(Span(prefix)), Delete(Span(f"{prefix}/none"))))
    before, after = result.range(0), result.range(2)
    assert [kv.value for kv in (*before.kvs, *after.kvs)] == [b"1", b"2"]
    assert before.revision == after.revision == result.revision == after.kvs[0].mod_revision


def test_a_key_that_is_deleted_begins_again(client: Client, prefix: str) -> None:
    client.put(prefix, b"")
    client.put(prefix, b"")
    client.delete(Span(prefix))
    revision = client.put(prefix, b"again").revision
    assert client.get(prefix).one == KeyValue(prefix, b"again", revision, revision, 1, 0)


def test_a_key_that_does_not_exist_has_no_value_but_zeros(client: Client, prefix: str) -> None:
    for relation, operand in itertools.product(("=", "!=", "<", ">"), (b"", b"x")):
        compare = Compare(prefix, "value", relation, operand)  # type: ignore[arg-type]
        assert not client.txn((compare,), ()).succeeded, compare
    for target in ("create", "mod", "version", "lease"):
        zero = Compare(prefix, target, "=", 0)  # type: ignore[arg-type]
        assert client.txn((zero,), ()).succeeded, zero


def test_every_guard_must_hold(client: Client, prefix: str) -> None:
    client.put(f"{prefix}/a", b"")
    assert client.txn((exists(f"{prefix}/a"), absent(f"{prefix}/b")), ()).succeeded
    assert not client.txn((exists(f"{prefix}/a"), exists(f"{prefix}/b")), ()).succeeded


@pytest.mark.parametrize(
    "ops",
    [
        lambda key: (Put(key, b"1"), Delete(Span(key))),
        lambda key: (Delete(Span(key[:-1], is_prefix=True)), Put(key, b"1")),
    ],
)
def test_a_key_is_not_both_put_and_deleted(client: Client, prefix: str, ops: Callable[[str], tuple[Op, ...]]) -> None:
    with pytest.raises(RequestRefused, match="duplicate key"):
        client.txn((), ops(f"{prefix}/key"))
    assert client.txn((absent(f"{prefix}/key"),), (Put(f"{prefix}/key", b""),), ops(f"{prefix}/key")[:1]).succeeded


def test_a_branch_that_is_not_taken_must_be_right_too(client: Client, prefix: str) -> None:
    with pytest.raises(RequestRefused, match="duplicate key"):
        client.txn((), (Put(prefix, b""),), (Put(prefix, b"1"), Put(prefix, b"2")))
    assert client.get(prefix).one is None
    assert client.txn((), (Put(prefix, b""),), (Put(f"{prefix}/other", b"", 12345),)).succeeded, (
        "its lease is not asked"
    )


@pytest.mark.parametrize("read", [Get(Span("/key")), Get(Span("/", is_prefix=True))])
def test_a_read_tells_from_where_to_watch(client: Client, read: Get) -> None:
    """The revision of a read, in a transaction or not, is that of the store, not that of the key."""
    client.put("/key", b"")
    revision = client.put("/other", b"").revision
    assert client.range(read).revision == revision
    assert client.txn([absent("/key")], (Delete(Span("/key")),), (read,)).range(0).revision == revision


# -- the past -------------------------------------------------------------------------------------------------------


def test_reads_of_the_past(client: Client, prefix: str) -> None:
    everything = Span(prefix, is_prefix=True)
    first = client.put(f"{prefix}/a", b"1").revision
    second = client.txn((), (Put(f"{prefix}/a", b"2"), Put(f"{prefix}/b", b"1"))).revision
    client.delete(everything)
    for revision, expected in [(first - 1, []), (first, [b"1"]), (second, [b"2", b"1"]), (second + 1, [])]:
        found = client.range(Get(everything, revision=revision))
        assert [kv.value for kv in found.kvs] == expected, revision
        assert found.revision > second
    put = Put(f"{prefix}/c", b"")
    assert client.txn((), (put, Get(everything, revision=second))).range(1).count == 2
    with pytest.raises(RequestRefused, match="future revision"):
        client.range(Get(everything, revision=client.get("/").revision + 1000))


# -- leases ---------------------------------------------------------------------------------------------------------


def test_leases(client: Client, prefix: str) -> None:
    lease = client.grant(60)
    assert lease.ttl == 60
    client.put(f"{prefix}/key", b"", lease.id)
    assert client.renew(lease.id) == 60
    client.revoke(lease.id)
    client.revoke(lease.id)
    assert client.get(f"{prefix}/key").one is None
    with pytest.raises(LeaseLost):
        client.renew(lease.id)
    with pytest.raises(LeaseLost):
        client.put(f"{prefix}/key", b"", lease.id)


def test_the_shortest_lease(client: Client) -> None:
    for ttl in (1, 0, 2):
        assert client.grant(ttl).ttl == 2
    with pytest.raises(RequestRefused, match="too large lease TTL"):
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
    with pytest.raises(LeaseLost):
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


def test_a_put_under_a_lease_that_is_gone_refuses_the_whole(client: Client, prefix: str) -> None:
    lease = client.grant(60).id
    client.revoke(lease)
    with pytest.raises(LeaseLost, match="take a new one"):
        client.txn((), (Put(f"{prefix}/a", b""), Put(f"{prefix}/b", b"", lease)))
    assert client.range(Get(Span(prefix, is_prefix=True))).count == 0


# -- watches --------------------------------------------------------------------------------------------------------


def test_events_tell_what_was_written(client: Client, prefix: str) -> None:
    seen = Seen()
    watch_from_now(client, Span(prefix, is_prefix=True), seen)
    lease = client.grant(60)
    first = client.put(f"{prefix}/a", b"1", lease.id).revision
    second = client.put(f"{prefix}/a", b"2").revision
    client.put(f"{prefix[:-1]}", b"not in the span")
    third = client.delete(Span(f"{prefix}/a"))
    events = seen.events(3)
    assert [(event.kind, event.kv.value, event.kv.lease) for event in events] == [
        ("put", b"1", lease.id),
        ("put", b"2", 0),
        ("delete", b"", 0),
    ]
    assert [(event.kv.create_revision, event.kv.mod_revision, event.kv.version) for event in events[:2]] == [
        (first, first, 1),
        (first, second, 2),
    ]
    assert third == 1
    assert events[2].kv.mod_revision > second
    client.revoke(lease.id)


def test_the_changes_of_a_revision_come_together(client: Client, prefix: str) -> None:
    seen = Seen()
    watch_from_now(client, Span(prefix, is_prefix=True), seen)
    for _ in range(20):
        client.txn((), [Put(f"{prefix}/{i}", b"") for i in range(100)])
    client.delete(Span(prefix, is_prefix=True))
    seen.events(2100)
    for batch in seen.batches:
        assert len(batch.events) % 100 == 0


def test_a_watch_begins_in_the_past(client: Client, prefix: str) -> None:
    revisions = [client.put(prefix, str(i).encode()).revision for i in range(5)]
    seen = Seen()
    client.watch(Span(prefix), revisions[2], seen)
    assert values(seen, 3) == [b"2", b"3", b"4"]


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


def test_watches_begin_and_end_while_events_come(client: Client, prefix: str) -> None:
    everything = Seen()
    watch_from_now(client, Span(prefix), everything)
    for i in range(100):
        revision = client.put(prefix, str(i).encode()).revision
        seen = Seen()
        watch = client.watch(Span(prefix), revision, seen)
        if i % 2:
            assert values(seen, 1) == [str(i).encode()]
        watch.cancel()
    assert values(everything, 100) == [str(i).encode() for i in range(100)]


def test_a_new_watch_after_all_others_ended(client: Client, prefix: str) -> None:
    for i in range(5):
        seen = Seen()
        watch = watch_from_now(client, Span(prefix), seen)
        client.put(prefix, str(i).encode())
        assert values(seen, 1) == [str(i).encode()]
        watch.cancel()


def test_a_compacted_start_ends_the_watch(client: Client, prefix: str) -> None:
    revisions = [client.put(prefix, str(i).encode()).revision for i in range(5)]
    client.compact(revisions[3])
    seen, other = Seen(), Seen()
    client.watch(Span(prefix), revisions[0], seen)
    error = seen.error()
    assert isinstance(error, Compacted)
    assert error.compact_revision == revisions[3]
    client.watch(Span(prefix), error.compact_revision, other)
    assert values(other, 2) == [b"3", b"4"]
    assert seen.is_quiet()


def test_a_watch_from_now_on_says_when_it_stands(client: Client, prefix: str) -> None:
    seen = Seen()
    before = client.put(prefix, b"1").revision
    client.watch(Span(prefix), 0, seen)
    began = seen.next()
    assert isinstance(began, Began)
    assert began.revision >= before
    client.put(prefix, b"2")
    (event,) = seen.events(1)
    assert event.kv.value == b"2"
    assert event.kv.mod_revision > began.revision


def test_a_watch_that_begins_in_the_past_goes_on_in_the_present(client: Client, prefix: str) -> None:
    first = client.txn((), [Put(f"{prefix}/{number}", b"1") for number in range(3)]).revision
    gone = client.txn((), (Delete(Span(f"{prefix}/1")),)).revision
    seen = Seen()
    client.watch(Span(prefix, is_prefix=True), first, seen)
    seen.events(4)
    client.put(f"{prefix}/1", b"2")
    events = seen.events(5)
    revisions = [event.kv.mod_revision for event in events]
    assert revisions == sorted(revisions)
    assert [event.kv.key[-1] for event in events] == ["0", "1", "2", "1", "1"]
    assert events[3].kv == KeyValue(f"{prefix}/1", b"", 0, gone, 0, 0)


def test_a_watch_that_begins_behind_etcds_end_is_told_that_etcd_was_rewound(client: Client, prefix: str) -> None:
    seen = Seen()
    now = client.get("/").revision
    client.watch(Span(prefix), now + 1000, seen)
    error = seen.error()
    assert isinstance(error, Rewound)
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
        assert isinstance(seen.next(), ClientClosed)
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
        with pytest.raises(ClientClosed, match="was closed"):
            use()
