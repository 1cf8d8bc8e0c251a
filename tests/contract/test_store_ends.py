"""Stores that nobody refers to: they stay open for C++ until `close()` or the end of the process, at little cost."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import warm
from helpers import DEADLINE, eventually, python
from rdzv_nodes import keys_under, spawn
from torch.distributed import DistStoreError, PrefixStore, Store

from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.client import EtcdClient
from ftcoord.store import EtcdStore

LONG = timedelta(seconds=DEADLINE)


def through_a_prefix(store: Store) -> Store:
    return PrefixStore("p", store)


def through_two_prefixes(store: Store) -> Store:
    return PrefixStore("q", PrefixStore("p", store))


def through_a_clone(store: Store) -> Store:
    return PrefixStore("p", store).clone()


@pytest.mark.parametrize("held", [through_a_prefix, through_two_prefixes, through_a_clone])
def test_a_store_that_only_cpp_holds(etcd: EtcdServer, prefix: str, held: Callable[[Store], Store]) -> None:
    outer = held(EtcdStore(etcd.get_endpoint(), f"{prefix}/", LONG, ttl=5))
    gc.collect()
    outer.set("key", "1")
    assert outer.get("key") == b"1"
    assert outer.add("n", 1) == 1
    waiting = spawn(partial(outer.get, "late"))
    outer.set("late", b"1")
    assert waiting.result(DEADLINE) == b"1"
    while isinstance(outer, PrefixStore):
        outer = outer.underlying_store
    assert isinstance(outer, EtcdStore)
    outer.close()


def test_a_store_that_was_closed(etcd: EtcdServer, client: EtcdClient, prefix: str) -> None:
    """It says so to C++ as long as it is there; Python frees it when it is dropped, and its keys expire."""
    store = EtcdStore(etcd.get_endpoint(), f"{prefix}/", LONG, ttl=5)
    outer = PrefixStore("p", store)
    outer.set("key", b"1")
    store.close()
    with pytest.raises(DistStoreError, match="closed"):
        outer.get("key")
    del store
    with pytest.raises(RuntimeError):
        outer.get("key")
    eventually(lambda: not keys_under(client, prefix), "the keys expire")


def test_a_hundred_dropped_stores_have_no_thread_and_no_descriptor(etcd: EtcdServer, prefix: str) -> None:
    """They share the process's client, and the thread that keeps its leases."""

    def drop(number: int) -> Store:
        outer = PrefixStore("p", EtcdStore(etcd.get_endpoint(), f"{prefix}/{number}/", LONG, ttl=60))
        outer.set("a", b"1")
        waiting = spawn(lambda: outer.get("b"))
        outer.set("b", b"1")
        waiting.result(DEADLINE)
        return outer

    def threads() -> int:
        return sum(thread.name.startswith("ftcoord-") for thread in threading.enumerate())

    others = threads()  # as of the etcd of this test
    dropped = [drop(0)]
    eventually(lambda: threads() <= others + 1, "the watches have ended")
    files = len(os.listdir("/proc/self/fd"))
    dropped += [drop(number) for number in range(1, 101)]
    eventually(lambda: threads() <= others + 1, "the watches have ended")
    assert len(os.listdir("/proc/self/fd")) <= files
    for outer in dropped:
        store = outer.underlying_store  # type: ignore[attr-defined]
        assert store.get("p/a") == b"1"
        store.close()
    eventually(lambda: threads() == others, "no lease is kept")


GROUP = """
import gc, os, sys
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
    print(turn, tensor.item(), flush=True)
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
        assert (out.splitlines(), process.returncode) == (["0 1.0", "1 1.0"], code)
