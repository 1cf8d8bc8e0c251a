"""What interrupts a change of an EtcdStore: late requests, signals, forks, a close, values that are none."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from doors import Door
from helpers import DEADLINE, ask_etcd, eventually, in_fork, set_alarm
from rdzv_nodes import spawn
from torch.distributed import DistNetworkError, DistStoreError

from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import OutcomeUnknown
from ftcoord.etcd.api import Etcd, Lease, TxnResult
from ftcoord.etcd.client import EtcdClient
from ftcoord.store import EtcdStore

LONG = timedelta(seconds=DEADLINE)


class Scripted(Door):
    """Does once, at the next transaction, what it was told: `accident(send)` with the call that sends it."""

    def __init__(self, real: Etcd) -> None:
        super().__init__(real)
        self.accident: Callable[[Callable[[], TxnResult]], TxnResult] | None = None
        self.granted: list[Lease] = []

    def txn(self, *args: Any, **kwargs: Any) -> TxnResult:
        accident, self.accident = self.accident, None
        send = lambda: self.real.txn(*args, **kwargs)  # noqa: E731
        return send() if accident is None else accident(send)

    def grant(self, ttl: int, *, timeout: float | None = None) -> Lease:
        self.granted.append(self.real.grant(ttl, timeout=timeout))
        return self.granted[-1]


@pytest.fixture
def door(client: EtcdClient) -> Scripted:
    return Scripted(client)


@pytest.fixture
def store(door: Scripted, prefix: str) -> Iterator[EtcdStore]:
    store = EtcdStore(door, f"{prefix}/", LONG)
    store.set("warm", b"")
    yield store
    store.close()


@pytest.fixture
def other(client: EtcdClient, prefix: str) -> Iterator[EtcdStore]:
    other = EtcdStore(client, f"{prefix}/", LONG)
    yield other
    other.close()


CHANGES: dict[str, Callable[[EtcdStore], Any]] = {
    "compare_set": lambda store: store.compare_set("key", b"a", b"ghost"),
    "delete_key": lambda store: store.delete_key("key"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_that_was_not_made_is_not_made_later(
    door: Scripted, store: EtcdStore, other: EtcdStore, change: Callable[[EtcdStore], Any]
) -> None:
    """Its request is under way for so long that it is sent again, refused, and then arrives."""
    under_way: list[Callable[[], TxnResult]] = []

    def delayed(send: Callable[[], TxnResult]) -> TxnResult:
        under_way.append(send)
        other.delete_key("key")
        raise OutcomeUnknown("the request is still under way")

    other.set("key", b"a")
    door.accident = delayed
    assert change(store) in (False, b"a")
    other.set("key", b"a")
    under_way[0]()
    assert other.get("key") == b"a"
    store.set("after", b"1")
    assert other.get("after") == b"1"


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_signal_handler_may_use_the_store(door: Scripted, store: EtcdStore, before: bool) -> None:
    def handler(*_: object) -> None:
        store.add("signals", 1)

    def signalled(send: Callable[[], TxnResult]) -> TxnResult:
        if before:
            signal.raise_signal(signal.SIGUSR1)
        result = send()
        if not before:
            signal.raise_signal(signal.SIGUSR1)
        return result

    previous = signal.signal(signal.SIGUSR1, handler)
    try:
        for number in range(1, 4):
            door.accident = signalled
            assert store.add("n", 1) == number
            assert store.get("signals") == b"%d" % number
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_a_child_is_refused_also_while_another_thread_changes_something(door: Scripted, store: EtcdStore) -> None:
    changing, go_on = threading.Event(), threading.Event()

    def slow(send: Callable[[], TxnResult]) -> TxnResult:
        changing.set()
        assert go_on.wait(DEADLINE)
        return send()

    door.accident = slow
    done = spawn(lambda: store.set("a", b"1"))
    assert changing.wait(DEADLINE)
    for use in (lambda: store.set("b", b"2"), lambda: store.get("warm")):
        assert in_fork(use) == "ForkedProcessError"
    go_on.set()
    done.result(DEADLINE)


def test_a_client_that_is_closed_ends_what_waits(etcd: EtcdServer, prefix: str) -> None:
    client = etcd.get_client()
    store = EtcdStore(client, prefix, LONG)
    waiting = spawn(lambda: store.get("never"))
    assert not waiting.done()
    client.close()
    with pytest.raises((DistNetworkError, DistStoreError), match="closed"):
        waiting.result(DEADLINE)
    store.close()


def test_an_etcd_that_is_full_serves_again_once_what_the_error_says_was_done() -> None:
    """Its quota is used up in earnest."""
    with EtcdServer(extra_args=["--quota-backend-bytes=8000000"]) as server, server.get_client() as client:
        store = EtcdStore(client, "/full/", LONG)
        with pytest.raises(DistStoreError, match=r"NOSPACE.*etcdctl compact.*etcdctl defrag.*etcdctl alarm disarm"):
            _write_over(store, 32)
        last = store.get("big")
        client.compact(client.get("/").revision)
        eventually(lambda: _size_when_defragmented(server) < 4_000_000, "the space is given back")
        set_alarm(server.get_endpoint(), False, int(client.status().member_id, 16))
        assert store.get("big") == last
        store.set("big", b"small")
        assert store.get("big") == b"small"
        store.close()


def _write_over(store: EtcdStore, times: int) -> None:
    for number in range(times):
        store.set("big", b"%d" % number + bytes(1_000_000))


def _size_when_defragmented(server: EtcdServer) -> int:
    ask_etcd(server.get_endpoint(), "Maintenance/Defragment")
    with EtcdClient(server.config(DEADLINE)) as client:
        return client.member_status().db_size


@pytest.mark.parametrize("value", [5, True, None, ["a"]], ids=repr)
def test_a_value_is_text_or_bytes(store: EtcdStore, value: Any) -> None:
    for change in (store.set, store.append, store.queue_push):
        with pytest.raises(TypeError, match="str or bytes"):
            change("a", value)
    assert not store.check(["a"])


def test_a_broken_counter_is_named(client: EtcdClient, store: EtcdStore, prefix: str) -> None:
    client.put(f"{prefix}/data/a", b"\0ftcoord+nonsense")
    with pytest.raises(DistStoreError, match=r"data/a.*delete it"):
        store.get("a")
    store.set("a", b"1")
    assert store.get("a") == b"1"
