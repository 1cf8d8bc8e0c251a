"""Expiration timers as keys of etcd, for tests of their readers."""

from __future__ import annotations

from ftcoord.core.layout import expired_key, timers_key
from ftcoord.core.timers import HeldTimers, Timer, Worker, encode
from ftcoord.etcd.api import KeyValue

WORKER = Worker(host="h1", pid=7, start=1000, node="node7", rank=3, ledger=5)
TIMER = Timer("step", after_ms=5000, until_ms=5009, wall_ms=1_004_000, slot=0, token=1)


def timers_kv(prefix: str, *timers: Timer, worker: Worker = WORKER, lease: int = 1) -> KeyValue:
    """The key of a worker that holds these, or `TIMER`."""
    key = timers_key(prefix, worker.host, lease)
    return KeyValue(key, encode(HeldTimers(worker, timers or (TIMER,))), 1, 1, 1, lease)


def expired_kv(prefix: str, timer: Timer = TIMER, worker: Worker = WORKER) -> KeyValue:
    """The mark of a timer that has expired."""
    key = expired_key(prefix, worker.host, timer.token)
    return KeyValue(key, encode(HeldTimers(worker, (timer,))), 1, 1, 1, 1)
