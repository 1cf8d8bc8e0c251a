"""Random histories, step by step the same on a real etcd and on one in memory: the simulator stands on the second."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import threading
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import pytest
from helpers import eventually
from virtual import MemoryClient, MemoryEtcd

from ftcoord import EtcdServer
from ftcoord.errors import EtcdError
from ftcoord.etcd import api
from ftcoord.etcd.client import EtcdClient

SEEDS = int(os.environ.get("FTCOORD_SEEDS", "2"))
"""Histories of `STEPS` each: 50 of them are 10,000 steps."""
STEPS: Final = 200
KEYS: Final = ("/h/a", "/h/b", "/h/b/c", "/h/d", "/h/é")
EVERYTHING: Final = api.Span("/h/", is_prefix=True)
TTL: Final = 600
"""Seconds: no lease ends by time, which is not the same on both sides."""

Client: TypeAlias = "EtcdClient | MemoryClient"
Step: TypeAlias = "Callable[[Side], object]"


class Side:
    """One etcd, and what is to be the same on the other: leases by the order in which they were granted."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.leases: list[int] = []
        self.seen: list[api.Event | Exception] = []
        began = threading.Event()
        self._began = began.set
        self._watch = client.watch(EVERYTHING, 0, self._hear)
        eventually(began.is_set, "the watch stands: it tells of all that comes from now on")

    def lease(self, index: int) -> int:
        """The id of a lease; of one that there never was, beyond the last."""
        return 0 if index < 0 else self.leases[index] if index < len(self.leases) else 0x7777

    def plain(self, told: object) -> object:
        """What it was told, without what is its own."""
        if isinstance(told, api.KeyValue):
            return told._replace(lease=self.leases.index(told.lease) + 1 if told.lease else 0)
        if isinstance(told, api.RangeResult):
            return tuple(self.plain(kv) for kv in told.kvs), told.count, told.revision
        if isinstance(told, api.TxnResult):
            return told.succeeded, told.revision, tuple(self.plain(one) for one in told.results)
        if isinstance(told, api.Event):
            return told.kind, self.plain(told.kv)
        return told

    def do(self, step: Step) -> object:
        """What becomes of a step: its answer, or the class of its error."""
        try:
            return self.plain(step(self))
        except EtcdError as error:
            return type(error).__name__

    def history(self, start: int, until: int) -> object:
        """What a watch from a revision on tells, up to another one; or that it cannot."""
        items: list[api.WatchItem] = []
        watch = self.client.watch(EVERYTHING, start, items.append)
        try:
            eventually(lambda: _is_told(items, until), lambda: f"{items} are not all up to {until}")
        finally:
            watch.cancel()
        errors = [type(item).__name__ for item in items if isinstance(item, Exception)]
        return errors or [self.plain(event) for item in items if isinstance(item, api.Batch) for event in item.events]

    def has_seen(self, revision: int) -> bool:
        """Whether its watch has told of that, or is over."""
        last = self.seen[-1]
        return isinstance(last, Exception) or last.kv.mod_revision >= revision

    def _hear(self, item: api.WatchItem) -> None:
        if isinstance(item, api.Batch):
            self.seen.extend(item.events)
        elif isinstance(item, Exception):
            self.seen.append(item)
        elif isinstance(item, api.Began):
            self._began()


def _is_told(items: list[api.WatchItem], until: int) -> bool:
    last = items[-1] if items else None
    return isinstance(last, Exception) or (isinstance(last, api.Batch) and last.events[-1].kv.mod_revision >= until)


def drawn_span(draw: random.Random) -> api.Span:
    return (
        api.Span(draw.choice(KEYS)) if draw.random() < 0.7 else api.Span(draw.choice(("/h/", "/h/b")), is_prefix=True)
    )


def drawn_get(draw: random.Random, revision: int) -> api.Get:
    return api.Get(
        drawn_span(draw),
        limit=draw.choice((0, 0, 1, 2)),
        keys_only=draw.random() < 0.2,
        count_only=draw.random() < 0.1,
        order=draw.choice(("keys", "oldest", "newest")),
        revision=draw.choice((0, 0, draw.randint(1, revision + 1))),
    )


def drawn_compare(draw: random.Random, revision: int, side: Side) -> api.Compare:
    key, relation = draw.choice(KEYS), draw.choice(("=", "!=", ">", "<"))
    target = draw.choice(("create", "mod", "version", "value", "lease"))
    if target == "lease":  # ids have no order that both sides share
        return api.Compare(key, target, draw.choice(("=", "!=")), side.lease(draw.randint(-1, len(side.leases))))
    operands: dict[str, Any] = {"value": draw.choice((b"", b"1", b"2")), "version": draw.randint(0, 3)}
    return api.Compare(key, target, relation, operands.get(target, draw.randint(0, revision)))


def drawn_op(draw: random.Random, revision: int, side: Side) -> api.Op:
    kind = draw.random()
    if kind < 0.3:
        return drawn_get(draw, revision)
    if kind < 0.5:
        return api.Delete(drawn_span(draw))
    lease = side.lease(draw.randint(0, len(side.leases))) if draw.random() < 0.4 else 0
    return api.Put(draw.choice(KEYS), draw.choice((b"", b"1", b"2")), lease)


def transaction(seed: float, revision: int) -> Step:
    """The same on both sides, but for the ids of leases."""

    def step(side: Side) -> object:
        draw = random.Random(seed)
        compares = [drawn_compare(draw, revision, side) for _ in range(draw.choice((0, 1, 1, 2)))]
        branches = [[drawn_op(draw, revision, side) for _ in range(draw.randint(0, 3))] for _ in range(2)]
        return side.client.txn(compares, *branches)

    return step


def grant(side: Side) -> object:
    side.leases.append(side.client.grant(TTL).id)
    return len(side.leases)


def drawn_step(draw: random.Random, revision: int, leases: int) -> Step:
    kind = draw.random()
    if kind < 0.55:
        return transaction(draw.random(), revision)
    if kind < 0.8:
        get = drawn_get(draw, revision)
        return lambda side: side.client.range(get)
    if kind < 0.87:
        return grant
    if kind < 0.93:
        index = draw.randint(0, leases)
        return lambda side: side.client.revoke(side.lease(index))
    if kind < 0.96:
        past = max(draw.randint(revision - 20, revision + 1), 1)
        return lambda side: side.client.compact(past)
    marked, start = b"%d" % revision, draw.randint(max(revision - 30, 1), revision + 1)
    return lambda side: side.history(start, side.client.put("/h/marked", marked).revision)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_same_on_both(fragile: EtcdServer, seed: int) -> None:
    draw = random.Random(seed)
    with contextlib.ExitStack() as stack:
        real = Side(stack.enter_context(EtcdClient(fragile.get_endpoint())))
        memory = Side(stack.enter_context(MemoryEtcd()).client())
        done = []
        for number in range(STEPS):
            revision = memory.client.put("/h/step", b"%d" % number).revision
            assert real.client.put("/h/step", b"%d" % number).revision == revision, f"after {done[-5:]}"
            step = drawn_step(draw, revision, len(memory.leases))
            done.append((memory.do(step), real.do(step)))
            assert done[-1][0] == done[-1][1], f"step {number} of seed {seed}, at revision {revision}"
        for side in (real, memory):
            told = side.client.put("/h/end", b"").revision
            eventually(functools.partial(side.has_seen, told), f"the watch tells of {told}")
        assert [*map(memory.plain, memory.seen)] == [*map(real.plain, real.seen)]
        assert len({str(answer) for answer, _ in done}) > STEPS / 4, "most steps say the same"
