"""All timers of a run, readable from any host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

from ftcoord import concurrency
from ftcoord.closing import Closing
from ftcoord.config import EtcdConfig
from ftcoord.core.layout import KEY_PREFIX, timers_span
from ftcoord.core.timer_records import Timer, parse_timer
from ftcoord.core.timers import TimerInfo, inform
from ftcoord.errors import ConfigError, EtcdUnavailable, StateError
from ftcoord.etcd.api import Etcd, Get, KeyValue
from ftcoord.etcd.namespace import Namespace
from ftcoord.primitives.feed import Feed
from ftcoord.primitives.mirror import Change
from ftcoord.primitives.step_thread import StepThread
from ftcoord.timer.process import host_id

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
        found = place.etcd.range(Get(timers_span(place.prefix)))
    timers = [timer for kv in found.kvs if (timer := _timer(kv)) and not timer.expired]
    return sorted(map(_inform, timers), key=lambda info: info.left)


class Subscription(Closing):
    """Reports timers that expire, until `close()`, or until nobody refers to it. A context manager; see `on_expired`.

    It also ends when its etcd client is closed, or its thread fails with an unexpected error. Both are logged as
    errors, and set `failure`.
    """

    def __init__(self, run: Namespace, callback: Callable[[TimerInfo], object]) -> None:
        self._reports = _Reports(run, callback)
        self._cancel_finalizer = concurrency.when_forgotten(self, self._reports.close)

    @property
    def failure(self) -> BaseException | None:
        """The error that ended it; None while it reports, and after `close()`."""
        return self._reports.failure

    def begin(self, timeout: float) -> None:
        """Start. Returns when no later expiry can be missed. Raises EtcdError after `timeout` seconds at most."""
        self._reports.begin(timeout)

    def close(self) -> None:
        """Stop reporting. Waits for a running callback, unless that callback calls this. Idempotent."""
        self._cancel_finalizer()
        self._reports.close()


class _Reports:
    """The thread of a subscription. Does not refer to the subscription, which can so be garbage-collected."""

    def __init__(self, run: Namespace, callback: Callable[[TimerInfo], object]) -> None:
        self.failure: BaseException | None = None  # written once, by the thread
        self._run, self._callback = run, callback  # never change
        # `begin()`'s thread, and from its end on only our thread:
        self._feed = Feed(run.etcd, timers_span(run.prefix))
        self._reported: dict[str, int] = {}  # the token of the timer that was reported last, by key
        self._thread = StepThread(self._step, "ftcoord-expired", self._feed.wake, self._feed.close, self._note_failure)

    def begin(self, timeout: float) -> None:
        deadline = concurrency.now() + timeout
        while not self._feed.synced:
            news = self._feed.next(deadline - concurrency.now())
            if news is None:
                raise EtcdUnavailable(f"etcd began no watch within {timeout:g} s: check that it is up, then try again")
            for change in news.changes:
                self._newly_expired(change)  # before this began: not ours to report
        self._thread.start()

    def close(self) -> None:
        self._thread.close()
        self._feed.close()  # also if the thread was never started
        self._run.close()

    def _step(self) -> None:
        news = self._feed.next(CLOSED_CHECK_INTERVAL)
        for change in news.changes if news else ():
            timer = self._newly_expired(change)
            if timer is not None and not self._thread.closed:
                self._report(_inform(timer))

    def _note_failure(self, error: BaseException) -> None:
        self.failure = error
        log.error("expired timers are not reported any longer: %s; subscribe again", error)

    def _newly_expired(self, change: Change) -> Timer | None:
        """The timer that expired with this change, unless it was already reported."""
        timer = _timer(change.now) if change.now else None
        if change.now is None:
            assert change.was is not None
            self._reported.pop(change.was.key, None)
        elif timer is not None and timer.expired and self._reported.get(change.now.key) != timer.token:
            self._reported[change.now.key] = timer.token
            return timer
        return None

    def _report(self, info: TimerInfo) -> None:
        try:
            self._callback(info)
        except Exception:  # the user's callback: its failure must not cost the next report
            log.exception("the callback for %s failed", info)


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
    subscription = Subscription(Namespace.open(run, etcd, key_prefix), callback)
    with ExitStack() as undo:
        undo.callback(subscription.close)
        subscription.begin(SUBSCRIPTION_BEGIN_TIMEOUT)
        undo.pop_all()
    return subscription


def _timer(kv: KeyValue) -> Timer | None:
    try:
        return parse_timer(kv.key, kv.value)
    except StateError as error:
        log.warning("%s", error)
        return None


def _inform(timer: Timer) -> TimerInfo:
    return inform(timer, _here(), concurrency.now(), concurrency.wall())


def _here() -> str:
    try:
        return host_id()
    except ConfigError:  # not Linux: it has no timers of its own, but may read those of others
        return ""
