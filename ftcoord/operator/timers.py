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
    """The timers that are held, the first to expire first; and the keys that do not count."""
    found, unreadable = list[TimerStatus](), list[Unreadable]()
    for kv in kvs:
        try:
            timer = parse_timer(kv.key, kv.value)
        except StateError as error:
            unreadable.append(Unreadable(kv.key, str(error)))
        else:
            if timer is not None:
                found.append(_tell(timer))
    found.sort(key=lambda one: (one.until, one.host, one.pid, one.scope))
    return found, unreadable


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
