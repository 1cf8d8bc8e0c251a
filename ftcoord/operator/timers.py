"""The expiration timers of a run, from their keys: who holds which one until when. Pure.

A timer runs on the monotonic clock of its worker's host, which nobody else sees. The times here are on that host's wall
clock: they are for people, and no decision depends on them.
"""

from __future__ import annotations

from collections.abc import Iterable

from ftcoord.core.layout import is_expired_key
from ftcoord.core.timers import HeldTimers, Timer, Worker, parse_timers
from ftcoord.errors import StateError
from ftcoord.etcd.api import KeyValue
from ftcoord.operator.told import TimerStatus, Unreadable


def tell_timers(kvs: Iterable[KeyValue]) -> tuple[list[TimerStatus], list[Unreadable]]:
    """The timers that are held, the one that expires first before the others; and the keys that are not counted."""
    read = [_read(kv) for kv in kvs]
    pairs = [one for one in read if isinstance(one, tuple)]
    expired = {timer.token for is_mark, held in pairs if is_mark for timer in held.timers}
    found = [
        _tell(held.worker, timer, timer.token in expired)
        for is_mark, held in pairs
        if not is_mark
        for timer in held.timers
    ]
    found.sort(key=lambda one: (one.until, one.host, one.pid, one.scope))
    return found, [one for one in read if isinstance(one, Unreadable)]


def _read(kv: KeyValue) -> tuple[bool, HeldTimers] | Unreadable:
    """Whether the key is a mark, and its timers."""
    try:
        return is_expired_key(kv.key), parse_timers(kv.key, kv.value)
    except StateError as error:
        return Unreadable(kv.key, str(error))


def _tell(worker: Worker, timer: Timer, is_expired: bool) -> TimerStatus:
    return TimerStatus(
        worker.node,
        worker.pid,
        worker.rank if worker.rank >= 0 else None,
        timer.scope,
        "expired" if is_expired else "running",
        timer.after_ms / 1000,
        timer.wall_ms / 1000,
    )
