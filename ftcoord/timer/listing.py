"""All timers of a run, readable from any host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

from ftcoord import concurrency
from ftcoord.closing import Closing
from ftcoord.concurrency import StepThread
from ftcoord.config import EtcdConfig
from ftcoord.core.layout import KEY_PREFIX, is_expired_key, timers_span
from ftcoord.core.timers import Timer, TimerInfo, Worker, inform, parse_timers
from ftcoord.errors import ConfigError, EtcdUnavailable, StateError
from ftcoord.etcd.api import Etcd, Get, KeyValue
from ftcoord.etcd.namespace import Namespace
from ftcoord.primitives.mirror import Feed
from ftcoord.timer.ledger import host_id

log = logging.getLogger(__name__)

SUBSCRIPTION_BEGIN_TIMEOUT: Final = 5.0
"""Seconds that etcd may take to start a watch."""
CLOSED_CHECK_INTERVAL: Final = 60.0
"""Seconds after which a watch without events checks whether it was closed; `close()` wakes it too."""


def active(
    run: str, etcd: Etcd | EtcdConfig | str | Sequence[str] | None = None, *, key_prefix: str = KEY_PREFIX
) -> list[TimerInfo]:
    """The running timers of all hosts, the one with the least time left first. Costs one read.

    Args:
        run: the run's id.
        etcd: a client, or endpoints; None takes them from FTCOORD_ENDPOINTS and related variables.
        key_prefix: the `key_prefix` of `rdzv_conf`.

    Raises ConfigError for bad arguments, before any socket is opened, and EtcdError when etcd cannot be read within the
    client's default timeout (5 s).
    """
    with Namespace.open(run, etcd, key_prefix) as place:
        found = place.etcd.range(Get(timers_span(place.prefix))).kvs
    marks = (timer for kv in found if is_expired_key(kv.key) for _, timer in timers_in(kv))
    expired = {timer.token for timer in marks}
    running = (pair for kv in found if not is_expired_key(kv.key) for pair in timers_in(kv))
    infos = (_inform(worker, timer) for worker, timer in running if timer.token not in expired)
    return sorted(infos, key=lambda info: info.left)


class Subscription(Closing):
    """Reports timers that expire, until `close()`, or until nobody refers to it. A context manager; see `on_expired`.

    It also ends when its etcd client is closed, or its thread fails with an unexpected error. Both are logged as
    errors, and set `failure`.
    """

    def __init__(self, run: Namespace, feed: Feed, callback: Callable[[TimerInfo], object]) -> None:
        self._failures: list[BaseException] = []
        # Neither the thread nor what it calls may refer to this object, which could not be forgotten then.
        step, failed = partial(_report_next, feed, callback), partial(_note_failure, self._failures)
        self._thread, self._run = StepThread(step, "ftcoord-expired", feed.wake, feed.close, failed), run
        self._cancel_finalizer = concurrency.when_forgotten(self, _end, self._thread, run)
        self._thread.start()

    @property
    def failure(self) -> BaseException | None:
        """The error that ended it; None while it reports, and after `close()`."""
        return self._failures[0] if self._failures else None

    def close(self) -> None:
        """Stop reporting. Waits for a running callback, unless that callback calls this. Idempotent."""
        self._cancel_finalizer()
        _end(self._thread, self._run)


def on_expired(
    run: str,
    callback: Callable[[TimerInfo], object],
    etcd: Etcd | EtcdConfig | str | Sequence[str] | None = None,
    *,
    key_prefix: str = KEY_PREFIX,
) -> Subscription:
    """Call `callback` with each timer that a server, on any host, finds expired from now on, until `close()`.

    Keep the result: a subscription that nobody refers to is closed.

    The callback runs on a thread of its own, once for each timer. If several timers of one worker expire together, it
    is called for the first. Its exceptions are logged. The subscription survives outages of etcd, but misses changes
    that etcd compacts away during one.

    Args:
        run: the run's id.
        callback: called with a `TimerInfo`.
        etcd: a client, or endpoints; None takes them from FTCOORD_ENDPOINTS and related variables.
        key_prefix: the `key_prefix` of `rdzv_conf`.

    Raises ConfigError or TypeError for bad arguments, before any socket is opened, and EtcdError when etcd does not
    answer within 5 s.
    """
    if not callable(callback):
        raise TypeError("callback must be something to call with a TimerInfo")
    with ExitStack() as undo:
        place = undo.enter_context(Namespace.open(run, etcd, key_prefix))
        feed = Feed(place.etcd, timers_span(place.prefix))
        undo.callback(feed.close)
        deadline = concurrency.now() + SUBSCRIPTION_BEGIN_TIMEOUT
        while not feed.synced:  # what it brings until then expired before
            if feed.next(deadline - concurrency.now()) is None:
                raise EtcdUnavailable(
                    f"etcd began no watch within {SUBSCRIPTION_BEGIN_TIMEOUT:g} s: check that it is up, then try again"
                )
        subscription = Subscription(place, feed, callback)
        undo.pop_all()
    return subscription


def _report_next(feed: Feed, callback: Callable[[TimerInfo], object]) -> None:
    """A step of a subscription's thread."""
    news = feed.next(CLOSED_CHECK_INTERVAL)
    for change in news.changes if news else ():
        if change.was is None and change.now is not None and is_expired_key(change.now.key):
            for info in (_inform(worker, timer) for worker, timer in timers_in(change.now)):
                try:
                    callback(info)
                except Exception:  # the user's callback: its failure must not cost the next report
                    log.exception("the callback for %s failed", info)


def _note_failure(failures: list[BaseException], error: BaseException) -> None:
    failures.append(error)
    log.error("expired timers are not reported any longer: %s; subscribe again", error)


def _end(thread: StepThread, run: Namespace) -> None:
    thread.close()
    run.close()


def timers_in(kv: KeyValue) -> list[tuple[Worker, Timer]]:
    """The timers in a key; none, with a warning, if it holds something else."""
    try:
        held = parse_timers(kv.key, kv.value)
    except StateError as error:
        log.warning("no timer: %s", error)
        return []
    return [(held.worker, timer) for timer in held.timers]


def _inform(worker: Worker, timer: Timer) -> TimerInfo:
    try:
        here = host_id()
    except ConfigError:  # not Linux: it has no timers of its own, but may read those of others
        here = ""
    return inform(worker, timer, here, concurrency.now(), concurrency.wall())
