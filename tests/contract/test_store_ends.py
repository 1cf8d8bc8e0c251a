"""Stores that nobody holds any more: closed without `close()`, and never before C++ lets go of them."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import warm
from helpers import DEADLINE, eventually, in_fork, python
from rdzv_nodes import keys_under, spawn
from torch.distributed import DistStoreError, PrefixStore, Store

from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.client import EtcdClient
from ftcoord.store import EtcdStore, halves

LONG = timedelta(seconds=DEADLINE)
OURS = "ftcoord-"


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(OURS)}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No thread, hence no connection and no lease that is kept."""
    before = threads()
    yield
    gc.collect()
    eventually(lambda: not threads() - before, lambda: f"the end of {threads() - before}")


MakeStore = Callable[[], EtcdStore]


@pytest.fixture
def make(etcd: EtcdServer, prefix: str) -> MakeStore:
    """Makes clients of one store that have a lease, a watch and a connection of their own."""

    def make() -> EtcdStore:
        store = EtcdStore(etcd.get_endpoint(), f"{prefix}/", LONG, ttl=5)
        store.set("a", b"1")
        waiting = spawn(lambda: store.wait(["b"]))
        store.set("b", b"1")
        waiting.result(DEADLINE)
        return store

    return make


def is_closed(store: EtcdStore) -> bool:
    return store._closed.is_set()


def ended(closed: threading.Event) -> None:
    eventually(closed.is_set, "the store is closed")


def test_a_store_that_python_lets_go_of(make: MakeStore, client: EtcdClient, prefix: str) -> None:
    """Its keys live on for its `ttl`, as after `close()`."""
    store = make()
    closed = store._closed
    del store
    ended(closed)
    assert keys_under(client, prefix)
    eventually(lambda: not keys_under(client, prefix), "the keys expire")


def test_a_store_on_a_client_that_is_not_its_own(client: EtcdClient, prefix: str) -> None:
    store = EtcdStore(client, f"{prefix}/", LONG, ttl=5)
    store.set("a", b"1")
    closed = store._closed
    del store
    ended(closed)
    assert client.get(f"{prefix}/data/a").one, "the client lives on"


class Owner:
    """What people write: something that has a store, and that the store's owner refers to."""

    def __init__(self, store: Store) -> None:
        self.store, self.self = store, self


class Subclass(EtcdStore):
    """A store that refers to itself."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.callback = self.get


@pytest.mark.parametrize("kind", ["around", "through"])
def test_a_store_in_a_reference_cycle(make: MakeStore, etcd: EtcdServer, prefix: str, kind: str) -> None:
    if kind == "around":
        owner = Owner(make())
        closed = owner.store._closed  # type: ignore[attr-defined]
        del owner
    else:
        store = Subclass(etcd.get_endpoint(), prefix)
        store.set("a", b"1")
        closed = store._closed
        del store
    assert not closed.is_set()
    gc.collect()
    ended(closed)


def through_a_prefix(store: Store) -> Store:
    return PrefixStore("p", store)


def through_two_prefixes(store: Store) -> Store:
    return PrefixStore("q", PrefixStore("p", store))


def through_a_clone(store: Store) -> Store:
    return PrefixStore("p", store).clone()


HOLDERS = [through_a_prefix, through_two_prefixes, through_a_clone]


@pytest.mark.parametrize("held", HOLDERS)
def test_a_store_that_only_cpp_holds(make: MakeStore, held: Callable[[Store], Store]) -> None:
    """It works as long as that lasts, also for longer than between two looks, and is closed afterwards."""
    store = make()
    closed, outer = store._closed, held(store)
    del store
    gc.collect()
    for number in range(3):
        threading.Event().wait(halves.HOLDERS_CHECK_INTERVAL)
        outer.set("key", f"{number}")
        assert outer.get("key") == b"%d" % number
        assert outer.add("n", 1) == number + 1
    waiting = spawn(partial(outer.get, "late"))
    outer.set("late", b"1")
    assert waiting.result(DEADLINE) == b"1"
    assert not closed.is_set()
    del outer, waiting
    gc.collect()
    ended(closed)


def test_a_store_that_python_gets_back_from_cpp(make: MakeStore) -> None:
    """And lets go of again, in any order, more than once."""
    store: Store = make()
    closed, outer = store._closed, PrefixStore("p", store)  # type: ignore[attr-defined]
    for _ in range(3):
        del store
        gc.collect()
        store = outer.underlying_store
        assert isinstance(store, EtcdStore)
        del outer
        threading.Event().wait(2 * halves.HOLDERS_CHECK_INTERVAL)
        assert store.get("a") == b"1"
        assert not closed.is_set()
        outer = PrefixStore("p", store)
    del store
    threading.Event().wait(2 * halves.HOLDERS_CHECK_INTERVAL)
    outer.set("key", b"1")
    assert outer.get("key") == b"1"
    del outer
    ended(closed)


def test_a_call_from_cpp_that_waits_is_a_holder(make: MakeStore) -> None:
    """Python has let go of everything but that call."""
    writer, outer = make(), PrefixStore("p", make())
    closed = outer.underlying_store._closed
    box = [outer]
    del outer
    waiting: Future[bytes] = spawn(lambda: box.pop().get("late"))
    eventually(lambda: not box, "the call has begun")
    gc.collect()
    threading.Event().wait(2 * halves.HOLDERS_CHECK_INTERVAL)
    assert not closed.is_set()
    writer.set("p/late", b"1")
    assert waiting.result(DEADLINE) == b"1"
    ended(closed)
    del writer


def test_a_store_that_was_closed_says_so_also_from_cpp(make: MakeStore) -> None:
    store = make()
    outer = PrefixStore("p", store)
    store.close()
    del store
    gc.collect()
    with pytest.raises(DistStoreError, match="closed"):
        outer.get("key")


def test_one_that_could_not_be_made_has_nothing_to_close(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="endpoints"):
        EtcdStore("a:0")
    gc.collect()
    assert capsys.readouterr().err == ""


def test_where_holders_cannot_be_told_stores_stay(make: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a torch that is built in another way: better a lease too many than a store that ends under C++."""
    kept: list[Store] = []
    monkeypatch.setattr(halves, "_PLACE", None)
    monkeypatch.setattr(halves, "_kept", kept)
    store = make()
    outer = PrefixStore("p", store)
    del store
    gc.collect()
    outer.set("key", b"1")
    assert outer.get("key") == b"1"
    (left,) = kept
    assert isinstance(left, EtcdStore)
    assert not is_closed(left)
    left.close()


def test_the_count_of_holders(client: EtcdClient, prefix: str) -> None:
    store = EtcdStore(client, prefix)
    assert halves.holders(store) == 1
    held = [PrefixStore(f"{number}", store) for number in range(3)]
    assert halves.holders(store) == 4
    held.pop()
    assert halves.holders(store) == 3
    assert halves.holders(PrefixStore("p", store)) is not None
    held.clear()
    assert halves.holders(store) == 1


def test_a_forked_child_lets_go_of_nothing(make: MakeStore) -> None:
    box = [make()]
    closed = box[0]._closed
    outer = PrefixStore("p", make())

    def forget() -> object:
        box.clear()
        gc.collect()
        return closed.is_set(), [thread.name for thread in threading.enumerate() if thread.name == "ftcoord-forget"]

    assert in_fork(forget) == "(False, [])"
    assert box[0].get("a") == b"1"
    outer.set("key", b"1")
    box[0].close()


GROUP = """
import gc, os, sys, threading
from datetime import timedelta
import torch, torch.distributed as dist
from ftcoord.store import EtcdStore
endpoint, prefix = sys.argv[1:]
for turn in range(2):
    dist.init_process_group("gloo", store=EtcdStore(endpoint, prefix + str(turn)), rank=0, world_size=1)
    gc.collect()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    other = dist.new_group([0])
    dist.all_reduce(tensor, group=other)
    del other
    dist.destroy_process_group()
    gc.collect()
    for _ in range(600):
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("ftcoord-")]
        if not left:
            break
        threading.Event().wait(0.1)
    print(turn, tensor.item(), left, flush=True)
os.dup2(1, 2)
END
"""


HELD = "store = EtcdStore(endpoint); store.set('x', 'y'); p = dist.PrefixStore('p', store); del store"


@pytest.mark.parametrize(
    ("start", "end", "code"),
    [
        (partial(warm.python, whole=True), "", 0),
        (partial(warm.python, whole=True), "sys.exit(3)", 3),
        (partial(python, "-X", "dev", "-W", "ignore"), HELD, 0),
    ],
    ids=["in peace", "with a code", "with a store in C++"],
)
def test_process_groups_and_the_end_of_the_process(
    etcd: EtcdServer, prefix: str, start: Any, end: str, code: int
) -> None:
    """Nobody closes anything, and the end is silent."""
    with start("-c", GROUP.replace("END", end), etcd.get_endpoint(), prefix) as process:
        out, _ = process.communicate(timeout=DEADLINE)
        assert (out.splitlines(), process.returncode) == (["0 1.0 []", "1 1.0 []"], code)


def test_many_that_come_and_go_at_once(client: EtcdClient, prefix: str) -> None:
    """Threads that make, hold in C++, use and drop stores, while the collector runs."""

    def work(number: int) -> None:
        for turn in range(20):
            store: Store = EtcdStore(client, f"{prefix}/{number}/{turn}/", LONG)
            if turn % 2:
                store = PrefixStore("p", store)
            with contextlib.suppress(AttributeError):
                store.me = store  # type: ignore[attr-defined]  # a PrefixStore takes none
            store.set("a", f"{turn}")
            assert store.get("a") == b"%d" % turn
            if not turn % 5:
                gc.collect()

    for one in [spawn(lambda number=number: work(number)) for number in range(4)]:
        one.result(DEADLINE)
