"""The c10d Store contract: the same cases on TCPStore and on EtcdStore, alone and under prefixes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import pytest
from helpers import DEADLINE
from rdzv_nodes import spawn
from torch.distributed import DistStoreError, HashStore, PrefixStore, Store, TCPStore

from ftcoord.etcd.client import EtcdClient
from ftcoord.store import EtcdStore, QueueEmptyError

SHORT = timedelta(milliseconds=150)
LONG = timedelta(seconds=DEADLINE)
KINDS = ["tcp", "etcd", "etcd-prefix", "etcd-prefix-prefix"]

MakeStore = Callable[[], Store]


@pytest.fixture(scope="session")
def tcp_clients() -> list[TCPStore]:
    """Four clients of one TCPStore: making one may take seconds where DNS is slow, since torch looks up its peers."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LONG)
    return [server] + [TCPStore("127.0.0.1", server.port, is_master=False, timeout=LONG) for _ in range(3)]


@pytest.fixture(params=KINDS)
def make_store(
    request: pytest.FixtureRequest, client: EtcdClient, prefix: str, tcp_clients: list[TCPStore]
) -> Iterator[MakeStore]:
    """Makes clients (up to four) of one and the same store."""
    kind, *prefixes = request.param.split("-")
    unused = list(tcp_clients)
    made: list[EtcdStore] = []

    def make() -> Store:
        if kind == "tcp":
            tcp: Store = PrefixStore(prefix, unused.pop())
            tcp.set_timeout(LONG)
            return tcp
        made.append(EtcdStore(client, f"{prefix}/", LONG))
        store: Store = made[-1]
        for index in range(len(prefixes)):
            store = PrefixStore(f"p{index}", store)
        return store

    yield make
    for store in made:
        store.close()


@pytest.fixture
def store(make_store: MakeStore) -> Store:
    return make_store()


# -- the contract -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [b"1", b"", b"\0", bytes(range(256)), b"x" * 500_000], ids=["text", "empty", "nul", "all bytes", "large"]
)
def test_set_and_get(store: Store, value: bytes) -> None:
    store.set("key", value)
    assert store.get("key") == value
    store.set("key", b"other")
    assert store.get("key") == b"other"


def test_text_comes_back_as_bytes(store: Store) -> None:
    store.set("key", "gr\u00fc\u00df")
    assert store.get("key") == "gr\u00fc\u00df".encode()


@pytest.mark.parametrize("key", ["a/b", "a b", "/", "\u4f60", "a" * 300, "members/", "decided"])
def test_any_key(store: Store, key: str) -> None:
    assert not store.check([key])
    store.set(key, b"1")
    assert store.get(key) == b"1"
    assert not store.check([key[:-1] + "-", f"{key}-"])
    assert store.delete_key(key)


def test_check(store: Store) -> None:
    assert store.check([])
    assert not store.check(["a"])
    store.set("a", b"1")
    assert store.check(["a"])
    assert store.check(["a", "a"])
    assert not store.check(["a", "b"])


def test_get_waits_for_the_key(make_store: MakeStore) -> None:
    reader, writer = make_store(), make_store()
    waiting = spawn(lambda: reader.get("key"))
    writer.set("other", b"0")
    assert not waiting.done()
    writer.set("key", b"1")
    assert waiting.result(DEADLINE) == b"1"


def test_wait_for_several_keys(make_store: MakeStore) -> None:
    reader, writer = make_store(), make_store()
    writer.set("a", b"1")
    waiting = spawn(lambda: reader.wait(["a", "b", "a", "c", "c"]))
    writer.set("c", b"1")
    assert not waiting.done()
    writer.set("b", b"")
    waiting.result(DEADLINE)


def test_wait_for_nothing_and_for_what_is_there(store: Store) -> None:
    store.wait([])
    store.set("a", b"1")
    store.wait(["a", "a"])
    store.wait(["a"], LONG)


def test_add_wakes_who_waits(make_store: MakeStore) -> None:
    reader, writer = make_store(), make_store()
    waiting = spawn(lambda: reader.get("n"))
    writer.add("n", 3)
    assert waiting.result(DEADLINE) == b"3"


@pytest.mark.parametrize("keys", [["absent"], ["there", "absent"], ["absent", "absent"]])
def test_wait_times_out(store: Store, keys: list[str]) -> None:
    store.set("there", b"1")
    with pytest.raises(DistStoreError, match="timeout"):
        store.wait(keys, SHORT)


def test_get_times_out(store: Store) -> None:
    store.set_timeout(SHORT)
    assert store.timeout == SHORT
    with pytest.raises(DistStoreError, match="timeout"):
        store.get("absent")
    with pytest.raises(DistStoreError, match="timeout"):
        store.wait(["absent"])
    store.set_timeout(LONG)
    store.set("absent", b"1")
    assert store.get("absent") == b"1"


def test_multi_get_times_out(store: Store) -> None:
    store.set_timeout(SHORT)
    store.set("a", b"1")
    with pytest.raises(DistStoreError, match="timeout"):
        store.multi_get(["a", "absent"])


def test_add(store: Store) -> None:
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.add("n", 0) == -2
    assert store.get("n") == b"-2"
    assert store.add("zero", 0) == 0
    assert store.check(["zero"])
    store.set("text", "40")
    assert store.add("text", 2) == 42
    assert store.add("big", 2**62) == 2**62


def test_compare_set(store: Store) -> None:
    assert store.compare_set("key", "expected", "new") == b"expected"
    assert not store.check(["key"])
    assert store.compare_set("key", "", "first") == b"first"
    assert store.compare_set("key", "wrong", "second") == b"first"
    assert store.compare_set("key", "first", "second") == b"second"
    assert store.get("key") == b"second"


def test_compare_set_lets_one_win(make_store: MakeStore) -> None:
    stores = [make_store() for _ in range(4)]
    answers = [spawn(partial(one.compare_set, "key", "", f"{index}")) for index, one in enumerate(stores)]
    assert {answer.result(DEADLINE) for answer in answers} == {stores[0].get("key")}


def test_append(store: Store) -> None:
    store.append("key", "a")
    store.append("key", "")
    store.append("key", "bc")
    assert store.get("key") == b"abc"
    store.append("empty", "")
    assert store.get("empty") == b""


def test_delete_key(store: Store) -> None:
    assert not store.delete_key("key")
    store.set("key", b"1")
    assert store.delete_key("key")
    assert not store.check(["key"])
    assert not store.delete_key("key")
    assert store.add("key", 1) == 1


def test_num_keys(store: Store) -> None:
    before = store.num_keys()
    store.set("a", b"1")
    store.add("b", 1)
    store.set("a", b"2")
    assert store.num_keys() == before + 2
    store.delete_key("a")
    assert store.num_keys() == before + 1


def test_multi_set_and_multi_get(store: Store) -> None:
    assert store.has_extended_api()
    store.multi_set(["a", "b", "c"], [b"1", b"\0\xff", b""])
    assert store.multi_get(["c", "a", "b", "a"]) == [b"", b"1", b"\0\xff", b"1"]
    store.multi_set(["a", "d"], ["x", "y"])
    assert store.multi_get(["a", "d"]) == [b"x", b"y"]


def test_multi_set_of_one_key_twice_keeps_the_last(store: Store) -> None:
    store.multi_set(["a", "b", "a"], [b"1", b"2", b"3"])
    assert store.multi_get(["a", "b"]) == [b"3", b"2"]


def test_multi_of_more_keys_than_a_transaction_holds(store: Store) -> None:
    keys = [f"key{index}" for index in range(301)]
    store.multi_set(keys, [key.encode() for key in keys])
    assert store.multi_get(keys[::-1]) == [key.encode() for key in keys[::-1]]
    assert store.check(keys)
    store.wait(keys, LONG)


def test_multi_set_of_more_bytes_than_a_request_holds(store: Store) -> None:
    keys = [f"key{index}" for index in range(12)]
    store.multi_set(keys, [b"x" * 300_000] * 12)
    assert [len(value) for value in store.multi_get(keys)] == [300_000] * 12


def test_multi_get_waits_for_all(make_store: MakeStore) -> None:
    reader, writer = make_store(), make_store()
    waiting = spawn(lambda: reader.multi_get(["a", "b", "c"]))
    for key in "cab":
        assert not waiting.done()
        writer.set(key, key)
    assert waiting.result(DEADLINE) == [b"a", b"b", b"c"]


def test_clone(make_store: MakeStore) -> None:
    store = make_store()
    clone = store.clone()
    del store
    gc.collect()
    clone.set("a", b"1")
    assert make_store().get("a") == b"1"
    assert clone.timeout == LONG


def test_threads_share_a_store(store: Store) -> None:
    def work(index: int) -> None:
        mine = store.clone()
        for count in range(10):
            mine.set(f"{index}/{count}", f"{index}")
            mine.append("all", "x")
        mine.wait([f"{index}/{count}" for count in range(10)])

    for done in [spawn(partial(work, index)) for index in range(4)]:
        done.result(DEADLINE)
    assert store.get("all") == b"x" * 40


def test_a_counter_is_a_value_like_any_other(store: Store) -> None:
    for _ in range(3):
        store.add("n", 2)
    assert store.compare_set("n", "6", "8") == b"8"
    assert store.add("n", 2) == 10
    assert store.add("n", 2) == 12
    store.append("n", "5")
    assert store.get("n") == b"125"
    assert store.add("n", -25) == 100
    store.set("n", "7")
    assert store.multi_get(["n"]) == [b"7"]
    assert store.add("n", 0) == 7
    assert store.add("n", 2) == 9
    assert store.delete_key("n")
    assert store.add("n", 2) == 2


def test_what_looks_like_a_counter_is_a_value(store: Store) -> None:
    odd = b"\0ftcoord+5:1"
    store.set("key", odd)
    assert store.get("key") == odd
    assert store.compare_set("key", odd, b"\0ftcoord=") == b"\0ftcoord="
    store.append("key", odd)
    assert store.get("key") == b"\0ftcoord=" + odd


def test_clients_add_different_amounts_at_once(make_store: MakeStore) -> None:
    stores = [make_store() for _ in range(4)]

    def add(store: Store, amount: int) -> None:
        for _ in range(10):
            store.add("n", amount)

    for done in [spawn(partial(add, store, amount)) for store, amount in zip(stores, (1, -1, 5, 10), strict=True)]:
        done.result(DEADLINE)
    assert stores[0].add("n", 0) == 150


def test_every_sum_is_told_once(make_store: MakeStore) -> None:
    """What barriers rest on: the last one to come knows it."""
    stores = [make_store() for _ in range(4)]
    sums = [spawn(partial(store.add, "n", 1)) for store in stores for _ in range(16)]
    assert sorted(one.result(DEADLINE) for one in sums) == list(range(1, 65))


# -- what torch passes on to no store in Python: only without a PrefixStore -------------------------------------------


@pytest.fixture(params=["tcp", "hash", "etcd"])
def bare(
    request: pytest.FixtureRequest, client: EtcdClient, prefix: str, tcp_clients: list[TCPStore]
) -> Iterator[list[Store]]:
    """Three clients of one store of its own."""
    if request.param == "tcp":
        yield [PrefixStore(prefix, store) for store in tcp_clients[:3]]
        return
    if request.param == "hash":
        yield [HashStore()] * 3
        return
    stores = [EtcdStore(client, f"{prefix}/", LONG) for _ in range(3)]
    yield list(stores)
    for store in stores:
        store.close()


def test_list_keys(bare: list[Store]) -> None:
    store = bare[0]
    assert store.list_keys() == []
    store.multi_set(["b", "a/c"], ["1", "2"])
    store.add("n", 1)
    assert sorted(store.list_keys()) == ["a/c", "b", "n"]
    store.delete_key("b")
    assert sorted(bare[1].list_keys()) == ["a/c", "n"]


def test_a_queue_gives_in_the_order_in_which_it_got(bare: list[Store]) -> None:
    writer, reader, _ = bare
    assert reader.queue_len("q") == 0
    for item in ("a", b"", b"\0\xff"):
        writer.queue_push("q", item)
    writer.queue_push("q/other", "x")
    writer.set("q", "a key, no item")
    assert reader.get("q") == b"a key, no item"  # written last: TCPStore acknowledges neither, and keeps their order
    assert reader.queue_len("q") == 3
    assert [reader.queue_pop("q") for _ in range(3)] == [b"a", b"", b"\0\xff"]
    assert reader.queue_len("q") == 0
    assert reader.queue_pop("q/other", False) == b"x"
    assert reader.get("q") == b"a key, no item"


def test_an_empty_queue(bare: list[Store]) -> None:
    store = bare[0]
    with pytest.raises(QueueEmptyError, match="empty"):
        store.queue_pop("q", False)
    store.set_timeout(SHORT)
    with pytest.raises(DistStoreError, match="timeout"):
        store.queue_pop("q")
    store.set_timeout(LONG)


def test_who_sees_a_queue(bare: list[Store]) -> None:
    """`check` and `wait` do while there is an item in it, and nobody else does."""
    writer, reader, _ = bare
    before = reader.num_keys()
    assert not reader.check(["q"])
    writer.queue_push("q", "a")
    writer.queue_push("q", "b")
    reader.wait(["q"], LONG)
    assert reader.check(["q"])
    assert not reader.check(["q", "other"])
    assert not reader.check(["q/"])
    assert not reader.check(["p", "r", "q "])
    assert reader.num_keys() == before
    assert reader.list_keys() == []
    assert not reader.delete_key("q")
    writer.set("key", "1")
    assert reader.get("key") == b"1"
    assert reader.check(["key", "q"])
    reader.wait(["q", "key"], LONG)
    for _ in range(2):
        assert reader.check(["q"])
        reader.queue_pop("q")
    assert not reader.check(["q"])
    with pytest.raises(DistStoreError, match="timeout"):
        reader.wait(["q", "key"], SHORT)


def test_a_key_and_a_queue_of_one_name(bare: list[Store]) -> None:
    store = bare[0]
    store.set("both", "value")
    store.queue_push("both", "item")
    assert store.delete_key("both")
    assert store.check(["both"])
    assert store.queue_pop("both") == b"item"
    assert not store.check(["both"])


def test_an_item_ends_a_wait(bare: list[Store]) -> None:
    writer, *readers = bare
    waiting = [
        spawn(partial(reader.wait, keys, LONG)) for reader, keys in zip(readers, (["q"], ["there", "q"]), strict=True)
    ]
    writer.set("there", "1")
    assert not any(one.done() for one in waiting)
    for _ in readers:
        writer.queue_push("q", "a")  # TCPStore wakes one of them for each item
    for one in waiting:
        one.result(DEADLINE)
    assert writer.queue_len("q") == 2


def test_queues_with_many_items_beside_each_other(bare: list[Store]) -> None:
    store = bare[0]
    for number in range(12):
        store.queue_push("q1", f"{number}")
    store.queue_push("q2/x", "a")
    store.set("q3", "value")
    assert store.check(["q1", "q2/x", "q3"])
    assert not store.check(["q1", "q2", "q3"])
    store.wait(["q2/x", "q3", "q1"], LONG)


def test_a_queue_wakes_those_who_wait_and_gives_each_item_to_one(bare: list[Store]) -> None:
    writer, *readers = bare
    waiting = [spawn(partial(reader.queue_pop, "q")) for reader in readers]
    assert not any(one.done() for one in waiting)
    items = [b"%d" % number for number in range(2)]
    for item in items:
        writer.queue_push("q", item)
    assert sorted(one.result(DEADLINE) for one in waiting) == items
