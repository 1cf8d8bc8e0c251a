"""EtcdStore beyond the c10d contract: leases, fences, lost answers, an etcd in trouble, process groups."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from doors import Watching
from helpers import DEADLINE, eventually
from rdzv_nodes import keys_under, spawn
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store

from ftcoord.core.layout import KEY_PREFIX, run_prefix
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import RoundOver
from ftcoord.etcd.api import Etcd, Span
from ftcoord.etcd.client import EtcdClient
from ftcoord.store import EtcdStore

LONG = timedelta(seconds=DEADLINE)

MakeEtcdStore = Callable[..., EtcdStore]


@pytest.fixture
def make(client: EtcdClient, prefix: str) -> Iterator[MakeEtcdStore]:
    """`make(etcd=..., **arguments)`: a client of the test's store."""
    made: list[EtcdStore] = []

    def make(etcd: Etcd | str | Sequence[str] = client, **arguments: Any) -> EtcdStore:
        made.append(EtcdStore(etcd, f"{prefix}/", **{"timeout": LONG, **arguments}))
        return made[-1]

    yield make
    for store in made:
        store.close()


def test_camel_case_spellings(make: MakeEtcdStore) -> None:
    store = make()
    store.set("a", b"1")
    assert store.getNumKeys() == store.num_keys() == 1
    assert store.deleteKey("a")
    assert store.num_keys() == 0


def test_it_can_be_made_from_endpoints_and_from_the_environment(
    etcd: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_list = EtcdStore([etcd.get_endpoint()], prefix)
    monkeypatch.setenv("FTCOORD_ENDPOINTS", etcd.get_endpoint())
    by_environment = EtcdStore(prefix=prefix)
    by_list.set("a", b"1")
    assert by_environment.get("a") == b"1"
    by_list.close()
    by_environment.close()


def test_a_value_that_is_too_large_says_so(make: MakeEtcdStore) -> None:
    store = make()
    with pytest.raises(DistStoreError, match="large"):
        store.set("a", b"x" * 3_000_000)
    store.set("a", b"x")
    assert store.get("a") == b"x"


def test_a_signal_does_not_break_a_wait(make: MakeEtcdStore) -> None:
    store, writer = make(), make()
    before = signal.signal(signal.SIGUSR1, lambda *_: writer.set("key", b"1"))
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        assert store.get("key") == b"1"
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


# -- leases and fences ------------------------------------------------------------------------------------------------


def test_keys_go_away_after_the_store(make: MakeEtcdStore, client: EtcdClient, prefix: str) -> None:
    store = make(ttl=5)
    store.set("a", b"1")
    store.add("n", 1)
    threading.Event().wait(8)  # longer than the lease
    assert store.get("a") == b"1"
    assert all(kv.lease for kv in keys_under(client, prefix).values())
    store.close()
    eventually(lambda: not keys_under(client, prefix), what="the keys go away with the store")


def test_a_store_whose_lease_was_lost_takes_a_new_one(make: MakeEtcdStore, client: EtcdClient, prefix: str) -> None:
    store = make()
    store.set("a", b"1")
    (lease,) = {kv.lease for kv in keys_under(client, prefix).values()}
    client.revoke(lease)
    assert not store.check(["a"])
    store.set("a", b"2")
    assert store.add("n", 1) == 1
    assert store.get("a") == b"2"


def test_keys_of_a_given_lease_go_with_it(make: MakeEtcdStore, client: EtcdClient, prefix: str) -> None:
    lease = client.grant(3600)
    store = make(lease=lease.id)
    store.set("a", b"1")
    assert {kv.lease for kv in keys_under(client, prefix).values()} == {lease.id}
    client.revoke(lease.id)
    assert not store.check(["a"])
    with pytest.raises(RoundOver, match="is gone"):
        store.set("a", b"1")


def test_a_fence_refuses_writes_for_good(make: MakeEtcdStore, client: EtcdClient, prefix: str) -> None:
    fence = f"{prefix}/fence"
    client.put(fence, b"")
    store = make(fence=fence)
    store.set("a", b"1")
    store.add("n", 1)
    client.delete(Span(fence))
    writes: list[Callable[[], object]] = [
        lambda: store.set("a", b"2"),
        lambda: store.add("n", 1),
        lambda: store.append("a", b"2"),
        lambda: store.compare_set("a", b"1", b"2"),
        lambda: store.multi_set(["b", "c"], [b"1", b"2"]),
        lambda: store.delete_key("a"),
    ]
    for write in writes:
        with pytest.raises(RoundOver, match="join the next one"):
            write()
    assert store.multi_get(["a", "n"]) == [b"1", b"1"]
    assert store.num_keys() == 2


WAITS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("absent"),
    "multi_get": lambda store: store.multi_get(["a", "absent"]),
    "wait": lambda store: store.wait(["a", "absent"]),
    "queue_pop": lambda store: store.queue_pop("absent"),
}


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_what_waits_behind_a_fence_ends_with_it(
    make: MakeEtcdStore, client: EtcdClient, prefix: str, wait: Callable[[Store], object], when: str
) -> None:
    """The time-out is longer than the test may take. For users of torch's errors it is one of those."""
    fence = f"{prefix}/fence"
    client.put(fence, b"")
    watching = Watching(client)
    store = make(watching, fence=fence, timeout=timedelta(hours=1))
    store.set("a", b"1")
    if when == "before":
        client.delete(Span(fence))
    waiting = spawn(partial(wait, store))
    eventually(lambda: Span(fence) in watching.spans, "it watches the fence")
    client.put(fence, b"again") if when == "meanwhile" else None
    client.delete(Span(fence))
    with pytest.raises(RoundOver, match="join the next one") as caught:
        waiting.result(DEADLINE)
    assert isinstance(caught.value, DistStoreError)
    assert store.get("a") == b"1"
    assert store.check(["a"])


def test_the_end_of_a_fence_comes_through_cpp(make: MakeEtcdStore, client: EtcdClient, prefix: str) -> None:
    store = PrefixStore("p", make(fence=f"{prefix}/fence"))
    for call in (lambda: store.get("absent"), lambda: store.set("a", "1"), lambda: store.wait(["absent"])):
        with pytest.raises(DistStoreError, match="join the next one") as caught:
            call()
        assert isinstance(caught.value, RoundOver)


def test_no_run_has_the_keys_of_a_store_without_a_prefix(etcd: EtcdServer) -> None:
    store = EtcdStore(etcd.get_endpoint(), timeout=LONG)
    store.set("mine", b"1")
    runs = ["store", "@store", "%40store", "/", "", "a/../@store", "st\u00f6re"]
    with etcd.get_client() as client:
        (key,) = (key for key in keys_under(client, "/ftcoord/v2") if key.endswith("/mine"))
    assert not any(key.startswith(f"{run_prefix(KEY_PREFIX, run)}/") for run in runs)
    store.delete_key("mine")
    store.close()


# -- etcd in trouble --------------------------------------------------------------------------------------------------


def test_a_wait_goes_on_after_a_restart(fragile: EtcdServer, make: MakeEtcdStore) -> None:
    store, writer = make(fragile.get_endpoint()), make(fragile.get_endpoint())
    writer.set("there", b"1")
    waiting = [spawn(lambda: store.get("key")), spawn(lambda: store.wait(["there", "key"]))]
    fragile.kill()
    fragile.restart()
    writer.set("key", b"1")
    assert waiting[0].result(DEADLINE) == b"1"
    waiting[1].result(DEADLINE)


def test_an_outage_that_lasts_too_long(fragile: EtcdServer, make: MakeEtcdStore) -> None:
    store = make(fragile.get_endpoint(), timeout=timedelta(seconds=1))
    store.set("a", b"1")
    fragile.kill()
    for call in (lambda: store.get("a"), lambda: store.set("a", b"2"), lambda: store.check(["a"]), store.num_keys):
        with pytest.raises(DistNetworkError, match="timeout"):
            call()
    fragile.restart()
    store.set_timeout(LONG)
    store.set("a", b"3")
    assert store.get("a") == b"3"
