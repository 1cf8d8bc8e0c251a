"""The expiration timers of a run, from their keys: who holds which one until when. Pure.

A timer runs on the monotonic clock of its worker's host, which nobody else sees. The times here are on that host's wall
clock: they are for people, and no decision depends on them.
"""

from __future__ import annotations

from collections.abc import Iterable

from ftcoord.core.timer_records import Timer, parse_timer
from ftcoord.errors import StateError
from ftcoord.etcd.api import KeyValue
from ftcoord.operator.told import TimerStatus, Unreadable


def tell_timers(kvs: Iterable[KeyValue]) -> tuple[list[TimerStatus], list[Unreadable]]:
    """The timers that are held, the one that expires first before the others; and the keys that are not counted."""
    read = [_read(kv) for kv in kvs]
    found = [one for one in read if isinstance(one, TimerStatus)]
    found.sort(key=lambda one: (one.until, one.host, one.pid, one.scope))
    return found, [one for one in read if isinstance(one, Unreadable)]


def _read(kv: KeyValue) -> TimerStatus | Unreadable | None:
    """None for a slot that is empty."""
    try:
        timer = parse_timer(kv.key, kv.value)
    except StateError as error:
        return Unreadable(kv.key, str(error))
    return None if timer is None else _tell(timer)


def _tell(timer: Timer) -> TimerStatus:
    worker = timer.worker
    return TimerStatus(
        worker.node,
        worker.pid,
        worker.rank if worker.rank >= 0 else None,
        timer.scope,
        "reaped" if timer.reaped else "expired" if timer.expired else "running",
        timer.after_ms / 1000,
        (timer.wall_ms + timer.left_ms) / 1000,
    )
