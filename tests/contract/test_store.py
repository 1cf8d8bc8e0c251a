"""The c10d Store contract: the same cases on TCPStore and on EtcdStore, alone and under prefixes. Then what is ours only."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from rdzv_nodes import DEADLINE, eventually, keys_under, spawn
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore

from ftcoord.errors import EtcdUnavailable, ForkedProcessError, OutcomeUnknown, RoundOver
from ftcoord.etcd.api import Compare, Etcd, Get, Op, RangeResult, Span, TxnResult
from ftcoord.etcd.client import EtcdClient
from ftcoord.etcd.server import EtcdServer
from ftcoord.store import EtcdStore

SHORT = timedelta(milliseconds=150)
LONG = timedelta(seconds=DEADLINE)
KINDS = ["tcp", "tcp-prefix", "etcd", "etcd-prefix", "etcd-prefix-prefix"]

MakeStore = Callable[[], Store]


@pytest.fixture
def prefix() -> str:
    return f"/store-test/{uuid.uuid4().hex}/"


@pytest.fixture(params=KINDS)
def make_store(request: pytest.FixtureRequest, client: EtcdClient, prefix: str) -> Iterator[MakeStore]:
    """Makes clients of one and the same store."""
    kind, *prefixes = request.param.split("-")
    tcp = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LONG) if kind == "tcp" else None
    made: list[EtcdStore] = []

    def make() -> Store:
        if tcp is not None:
            store: Store = TCPStore("127.0.0.1", tcp.port, is_master=False, timeout=LONG)
        else:
            store = EtcdStore(client, prefix, LONG)
            made.append(store)
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
    store.wait(["a"], SHORT)


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
    assert clone.clone().get("a") == b"1"
    assert clone.timeout == LONG


def test_clients_add_at_once(make_store: MakeStore) -> None:
    stores = [make_store() for _ in range(4)]

    def add(store: Store) -> None:
        for _ in range(20):
            store.add("n", 1)

    for done in [spawn(partial(add, store)) for store in stores]:
        done.result(DEADLINE)
    assert stores[0].add("n", 0) == 80


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


def test_a_signal_does_not_break_a_wait(make_store: MakeStore) -> None:
    store, writer = make_store(), make_store()
    before = signal.signal(signal.SIGUSR1, lambda *_: writer.set("key", b"1"))
    try:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
        if isinstance(store, TCPStore):  # it waits in C++, where no Python signal handler runs
            store.set("key", b"1")
        store.wait(["key"], LONG)
    finally:
        signal.signal(signal.SIGUSR1, before)


# -- ours only --------------------------------------------------------------------------------------------------------

MakeEtcdStore = Callable[..., EtcdStore]


@pytest.fixture
def make(client: EtcdClient, prefix: str) -> Iterator[MakeEtcdStore]:
    """`make(etcd=..., **arguments)`: a client of the test's store."""
    made: list[EtcdStore] = []

    def make(etcd: Etcd | str | Sequence[str] = client, **arguments: Any) -> EtcdStore:
        made.append(EtcdStore(etcd, prefix, **{"timeout": LONG, **arguments}))
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


def test_the_python_half_lives_while_cpp_uses_it(shared_etcd: EtcdServer, prefix: str) -> None:
    store = PrefixStore("p", EtcdStore(shared_etcd.get_endpoint(), prefix, LONG))
    gc.collect()
    store.set("a", b"1")
    clone = store.clone()
    del store
    gc.collect()
    assert clone.get("a") == b"1"
    inner = clone.underlying_store
    del clone
    gc.collect()
    assert inner.get("p/a") == b"1"
    inner.close()


def test_stores_with_other_prefixes_are_apart(make: MakeEtcdStore, client: EtcdClient, prefix: str) -> None:
    outer, inner = make(), EtcdStore(client, f"{prefix}data/", LONG)
    outer.set("a", b"1")
    inner.set("a", b"2")
    assert outer.get("a") == b"1"
    assert inner.num_keys() == 1
    inner.close()


def test_it_can_be_made_from_endpoints_and_from_the_environment(
    shared_etcd: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_list = EtcdStore([shared_etcd.get_endpoint()], prefix)
    monkeypatch.setenv("FTCOORD_ENDPOINTS", shared_etcd.get_endpoint())
    by_environment = EtcdStore(prefix=prefix)
    by_list.set("a", b"1")
    assert by_environment.get("a") == b"1"
    by_list.close()
    by_environment.close()


def test_add_to_what_is_no_number_says_so(make: MakeEtcdStore) -> None:
    store = make()
    store.set("a", b"word")
    with pytest.raises(DistStoreError, match=r"'a' .*no.* number"):
        store.add("a", 1)
    assert store.get("a") == b"word"


def test_a_value_that_is_too_large_says_so(make: MakeEtcdStore) -> None:
    store = make()
    with pytest.raises(DistStoreError, match="large"):
        store.set("a", b"x" * 3_000_000)
    store.set("a", b"x")
    assert store.get("a") == b"x"


def test_a_store_that_is_closed_while_it_waits(make: MakeEtcdStore) -> None:
    store = make()
    waiting = spawn(lambda: store.get("absent"))
    store.set("there", b"1")
    store.close()
    with pytest.raises(DistStoreError, match="closed"):
        waiting.result(DEADLINE)


def test_use_in_a_forked_child_is_refused(make: MakeEtcdStore) -> None:
    store = make()
    store.set("a", b"1")
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (partial(store.get, "a"), partial(store.set, "a", b"2")):
            try:
                call()
            except ForkedProcessError:
                refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert store.get("a") == b"1"


# -- leases and fences ------------------------------------------------------------------------------------------------


def test_keys_go_away_after_the_store(make: MakeEtcdStore, client: EtcdClient, prefix: str) -> None:
    store = make(ttl=2)
    store.set("a", b"1")
    store.add("n", 1)
    threading.Event().wait(4)  # longer than the lease
    assert store.get("a") == b"1"
    assert all(kv.lease for kv in keys_under(client, prefix).values())
    store.close()
    eventually(lambda: not keys_under(client, prefix), "the keys go away with the store")


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
    fence = f"{prefix}fence"
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


def test_a_new_store_behind_a_fence_that_is_gone(make: MakeEtcdStore, prefix: str) -> None:
    with pytest.raises(RoundOver):
        make(fence=f"{prefix}fence").set("a", b"1")


# -- answers that are lost --------------------------------------------------------------------------------------------


class LossyEtcd:
    """An etcd whose answers to writing transactions get lost: `plan` says for each, in turn, what happens to it.

    o  it is answered     l  done, but the answer is lost     n  not done, and nobody knows     u  provably not done
    """

    def __init__(self, etcd: Etcd, plan: str) -> None:
        self._etcd, self._plan = etcd, iter(plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._etcd, name)

    def range(self, get: Get, *, timeout: float | None = None) -> RangeResult:
        return self._etcd.range(get, timeout=timeout)

    def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Op],
        failure: Sequence[Op] = (),
        *,
        timeout: float | None = None,
    ) -> TxnResult:
        fate = "o" if all(isinstance(op, Get) for op in success) else next(self._plan, "o")
        if fate == "u":
            raise EtcdUnavailable("provably not done")
        result = self._etcd.txn(compares, success, failure, timeout=timeout) if fate in "ol" else None
        if result is None or fate == "l":
            raise OutcomeUnknown("the answer was lost")
        return result


PLANS = ["l", "n", "u", "ll", "ln", "nl", "ul", "lul", "olnol", "llllollll"]


@pytest.mark.parametrize("plan", PLANS)
def test_lost_answers_change_nothing_twice(make: MakeEtcdStore, client: EtcdClient, plan: str) -> None:
    store, other = make(LossyEtcd(client, plan)), make()
    assert store.add("n", 5) == 5
    store.append("text", "a")
    assert store.compare_set("cas", "", "1") == b"1"
    assert store.compare_set("cas", "", "2") == b"1"
    other.add("n", 1)
    assert store.add("n", 5) == 11
    store.append("text", "b")
    assert store.delete_key("cas")
    assert not store.delete_key("cas")
    store.multi_set(["x", "y"], [b"1", b"2"])
    assert other.multi_get(["n", "text", "x", "y"]) == [b"11", b"ab", b"1", b"2"]


@pytest.mark.parametrize("plan", PLANS)
def test_lost_answers_under_a_fence(make: MakeEtcdStore, client: EtcdClient, prefix: str, plan: str) -> None:
    client.put(f"{prefix}fence", b"")
    store = make(LossyEtcd(client, plan), fence=f"{prefix}fence", lease=client.grant(60).id)
    for count in range(1, 6):
        assert store.add("n", 1) == count
    client.delete(Span(f"{prefix}fence"))
    with pytest.raises(RoundOver):
        store.add("n", 1)
    assert store.get("n") == b"5"


def test_an_answer_that_never_comes_ends_in_an_error_and_harms_nothing(
    make: MakeEtcdStore, client: EtcdClient
) -> None:
    store = make(LossyEtcd(client, "l" + "u" * 1000), timeout=timedelta(seconds=0.5))
    with pytest.raises(DistNetworkError, match="timeout"):
        store.add("n", 1)
    store._etcd = client
    assert make().get("n") == b"1"
    assert store.add("n", 1) == 2


# -- etcd in trouble --------------------------------------------------------------------------------------------------


def test_sums_are_exact_when_etcd_is_killed_meanwhile(own_etcd: EtcdServer, make: MakeEtcdStore) -> None:
    stores = [make(own_etcd.get_endpoint()) for _ in range(4)]
    running = threading.Event()
    running.set()

    def add(store: EtcdStore) -> int:
        count = 0
        while running.is_set() or count < 50:
            store.add("n", 1)
            store.append("text", "x")
            count += 1
        return count

    counts = [spawn(partial(add, store)) for store in stores]
    for _ in range(2):
        reached = int(stores[0].get("n")) + 40 if stores[0].check(["n"]) else 40
        eventually(lambda reached=reached: stores[0].add("n", 0) >= reached, "the sum grows")
        own_etcd.kill()
        own_etcd.restart()
    running.clear()
    total = sum(count.result(DEADLINE) for count in counts)
    assert stores[0].add("n", 0) == total
    assert stores[0].get("text") == b"x" * total


def test_a_wait_goes_on_after_a_restart(own_etcd: EtcdServer, make: MakeEtcdStore) -> None:
    store, writer = make(own_etcd.get_endpoint()), make(own_etcd.get_endpoint())
    writer.set("there", b"1")
    waiting = [spawn(lambda: store.get("key")), spawn(lambda: store.wait(["there", "key"]))]
    own_etcd.kill()
    own_etcd.restart()
    writer.set("key", b"1")
    assert waiting[0].result(DEADLINE) == b"1"
    waiting[1].result(DEADLINE)


def test_a_wait_goes_on_after_a_pause(own_etcd: EtcdServer, make: MakeEtcdStore) -> None:
    store, writer = make(own_etcd.get_endpoint()), make(own_etcd.get_endpoint())
    waiting = spawn(lambda: store.get("key"))
    writer.set("other", b"1")
    own_etcd.pause()
    writing = spawn(lambda: writer.set("key", b"1"))
    assert not writing.done()
    own_etcd.resume()
    writing.result(DEADLINE)
    assert waiting.result(DEADLINE) == b"1"


def test_a_wait_goes_on_after_a_compaction(own_etcd: EtcdServer, make: MakeEtcdStore) -> None:
    """The key is put and its history compacted away while the waiting watch is cut off from etcd."""
    store = make(own_etcd.get_endpoint())
    store.set("there", b"1")
    waiting = spawn(lambda: store.get("key"))
    eventually(lambda: store._client is not None and store._client._watches._watchers, "it waits")
    own_etcd.kill()
    own_etcd.restart(wait=False)
    with own_etcd.get_client() as client:
        eventually(lambda: own_etcd.healthy(), "etcd serves again")
        revision = client.put(f"{store._data}key", b"1").revision
        for count in range(5):
            client.put("/filler", b"%d" % count)
        client.compact(revision + 5)
    assert waiting.result(DEADLINE) == b"1"


def test_an_outage_that_lasts_too_long(own_etcd: EtcdServer, make: MakeEtcdStore) -> None:
    store = make(own_etcd.get_endpoint(), timeout=timedelta(seconds=1))
    store.set("a", b"1")
    own_etcd.kill()
    for call in (lambda: store.get("a"), lambda: store.set("a", b"2"), lambda: store.check(["a"]), store.num_keys):
        with pytest.raises(DistNetworkError, match="timeout"):
            call()
    own_etcd.restart()
    store.set_timeout(LONG)
    store.set("a", b"3")
    assert store.get("a") == b"3"


# -- process groups ---------------------------------------------------------------------------------------------------

WORKER = """
import sys
import torch, torch.distributed as dist
from datetime import timedelta
from ftcoord.store import EtcdStore

endpoint, prefix, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = EtcdStore(endpoint, prefix, timedelta(seconds=90))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
dist.barrier()
group = dist.new_group([0, 1])
dist.all_reduce(total, group=group)
shapes = [None, None]
dist.all_gather_object(shapes, {"rank": rank}, group=group)
dist.monitored_barrier()
dist.destroy_process_group()
store.close()
print(total.item(), shapes)
"""


def test_process_group(shared_etcd: EtcdServer, prefix: str) -> None:
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, shared_etcd.get_endpoint(), prefix, str(rank)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [worker.communicate(timeout=DEADLINE)[0].split() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert outputs[0] == outputs[1] == "6.0 [{'rank': 0}, {'rank': 1}]".split()
