"""The expiration timers of a run, from their keys: who holds which one until when. Pure.

A timer runs on the monotonic clock of its worker's host, which nobody else sees. The times here are on that host's wall
clock: they are for people, and no decision depends on them.
"""

from __future__ import annotations

from collections.abc import Iterable

from ftcoord.core.layout import is_expired_key
from ftcoord.core.timers import Timer, Worker, parse_timers
from ftcoord.errors import StateError
from ftcoord.etcd.api import KeyValue
from ftcoord.operator.told import TimerStatus, Unreadable


def tell_timers(kvs: Iterable[KeyValue]) -> tuple[list[TimerStatus], list[Unreadable]]:
    """The timers that are held, the one that expires first before the others; and the keys that are not counted."""
    held, expired, unreadable = list[tuple[Worker, Timer]](), set[int](), list[Unreadable]()
    for kv in kvs:
        try:
            record = parse_timers(kv.key, kv.value)
        except StateError as error:
            unreadable.append(Unreadable(kv.key, str(error)))
            continue
        if is_expired_key(kv.key):
            expired.update(timer.token for timer in record.timers)
        else:
            held += [(record.worker, timer) for timer in record.timers]
    found = [_tell(worker, timer, timer.token in expired) for worker, timer in held]
    return sorted(found, key=lambda one: (one.until, one.host, one.pid, one.scope)), unreadable


def _tell(worker: Worker, timer: Timer, is_expired: bool) -> TimerStatus:
    return TimerStatus(
        host=worker.node,
        pid=worker.pid,
        rank=worker.rank if worker.rank >= 0 else None,
        scope=timer.scope,
        standing="expired" if is_expired else "running",
        after=timer.after_ms / 1000,
        until=timer.wall_ms / 1000,
    )
