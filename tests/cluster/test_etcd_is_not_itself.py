"""An etcd that is full, has no majority, forgets its past or is another one: said clearly, and never a step back."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta

import pytest
from clusters import SIZE, Cluster, alarm, client_of, pass_time
from cutting import Lines
from helpers import DEADLINE, Seen
from load import LEASE_TTL, Run, everything, two_jobs
from rdzv_nodes import Nodes, spawn
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from ftcoord import config, errors
from ftcoord.etcd.api import Batch, Get, Put, Span
from ftcoord.etcd.client import EtcdClient
from ftcoord.primitives.write_once import write_once
from ftcoord.store import EtcdStore

pytestmark = pytest.mark.alone

OUTAGE = float(os.environ.get("FTCOORD_TEST_OUTAGE", "6"))
"""Seconds without a majority; longer than the leases."""
COMPACTIONS = int(os.environ.get("FTCOORD_TEST_COMPACTIONS", "30"))
WORDS = "NOSPACE.*etcdctl compact.*etcdctl defrag.*etcdctl alarm disarm"


def test_no_space(cluster: Cluster, prefix: str, figures: Callable[..., None]) -> None:
    """Running jobs go on; what needs room reports that with the remedy, and works again without a restart. A quorum
    waits for room until its time is over."""
    with everything(cluster.endpoints, prefix) as load, ExitStack() as stack:
        load.progress()
        load.training.stop()
        load.store.stop()
        load.rounds.stop()
        stack.callback(alarm, cluster, False)
        store = EtcdStore(cluster.endpoints, f"{prefix}-other/", timedelta(seconds=DEADLINE))
        stack.callback(store.close)
        store.set("before", "")
        alarm(cluster, True)
        since = time.monotonic()
        with pytest.raises(DistStoreError, match=WORDS):
            store.set("key", "value")
        late = Nodes(cluster.endpoints, f"{prefix.rpartition('/')[2]}-late", (1, 1))
        stack.callback(late.end)
        with pytest.raises(RendezvousConnectionError, match=WORDS):
            late.one()
        took = time.monotonic() - since
        with pytest.raises(TimeoutError, match=WORDS):  # who decides tries again and again, and the others wait
            load.training.ask_once(timeout=3)
        pass_time(2 * LEASE_TTL)
        assert load.run.evictions() == 0
        alarm(cluster, False)
        store.set("key", "value")
        assert late.one().join().result(DEADLINE).world == 1
        assert load.training.ask_once()[1] == ["a", "b", "c"]
        assert load.run.evictions() == 0
        load.store.judge()
        load.rounds.judge()
    figures(two_were_told_within=round(took, 2), evictions=0)


@pytest.mark.forms("containers")
def test_the_majority_is_lost_for_a_while(cluster: Cluster, prefix: str, figures: Callable[..., None]) -> None:
    """Nothing is decided meanwhile, nobody is evicted, and all go on by themselves."""
    with everything(cluster.endpoints, prefix) as load:
        load.progress()
        leader = cluster.leader()
        gone = [leader, (leader + 1) % SIZE]
        for i in gone:
            cluster.kill(i)
        since = time.monotonic()
        pass_time(min(OUTAGE / 2, 3))
        decided, answered, met = load.training.count(), load.store.answered(), list(load.rounds.answered)
        pass_time(OUTAGE - (time.monotonic() - since))
        assert load.evictions() == 0
        assert load.training.count() <= decided + 3  # what was decided before may be told late, to each
        assert load.store.answered() == answered
        assert load.rounds.answered == met
        for i in gone:
            cluster.restart(i, wait=False)
        back = time.monotonic()
        load.progress(1, 1)
        took = time.monotonic() - back
        pass_time(LEASE_TTL)
        load.progress()
        told = load.end()
    figures(seconds=OUTAGE, decided_meanwhile=0, **told, back_after=round(took, 2), bound=LEASE_TTL + 5)


def test_etcd_is_wiped(cluster: Cluster, prefix: str, figures: Callable[..., None]) -> None:
    with two_jobs(cluster.endpoints, prefix) as jobs:
        store = jobs.run.nodes[0].info.store  # type: ignore[union-attr]
        cluster.wipe()
        with pytest.raises(errors.RoundOver):
            store.set("late", "")
        round_, quorum = jobs.start_over()
    figures(round_after=round_, quorum_after=quorum)


def test_compactions_under_watches(cluster: Cluster, prefix: str, figures: Callable[..., None]) -> None:
    """Every 100 ms, while connections break. Nothing is missed but what was compacted, and nothing comes twice."""
    with ExitStack() as stack:
        writer = stack.enter_context(client_of(cluster))
        line = stack.enter_context(Lines(cluster.endpoints.split(",")))
        reader = stack.enter_context(EtcdClient(config.EtcdConfig.load(line.endpoints)))
        run = Run([line.endpoints] * 2, prefix.rpartition("/")[2])
        stack.callback(run.close)
        done = threading.Event()
        followed = spawn(lambda: follow(reader, prefix + "-key", done))
        count, written = 0, None
        for compaction in range(COMPACTIONS):
            until = time.monotonic() + 0.1
            while time.monotonic() < until:
                count += 1
                put = Put(prefix + "-key", b"%d" % count)
                written = write_once(writer, put, written, timeout=DEADLINE).kv
                assert written is not None
            assert written is not None
            writer.compact(written.mod_revision)
            if compaction % 5 == 2:
                line.reset()
        done.set()
        write_once(writer, Put(prefix + "-key", b"%d" % (count + 1)), written, timeout=DEADLINE)
        seen, gaps = followed.result(DEADLINE)
        assert run.evictions() == 0
    figures(compactions=COMPACTIONS, writes=count, seen=seen, listed_again=gaps, evictions=0)


def follow(client: EtcdClient, key: str, done: threading.Event) -> tuple[int, int]:
    """Watch a key that counts up, and read it again after a compaction; how many were seen, and how many such reads."""
    last, seen, gaps = 0, 0, 0
    while True:
        found = client.range(Get(Span(key)), timeout=DEADLINE)
        now = int(found.one.value) if found.one else 0
        assert now >= last
        last, items = now, Seen()
        watch = client.watch(Span(key), found.revision + 1, items)
        while not isinstance(item := items.next(), Exception):
            for event in item.events if isinstance(item, Batch) else ():
                assert int(event.kv.value) == last + 1, "missed or repeated"
                last, seen = last + 1, seen + 1
            if done.is_set() and client.range(Get(Span(key)), timeout=DEADLINE).one.value == b"%d" % last:  # type: ignore[union-attr]
                watch.cancel()
                return seen, gaps
        assert isinstance(item, errors.Compacted), item
        gaps += 1
