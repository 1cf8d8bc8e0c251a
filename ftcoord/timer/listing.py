"""All timers of a run, seen from any host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final

from ftcoord import concurrency
from ftcoord.config import EtcdConfig
from ftcoord.core.layout import KEY_PREFIX, timers_span
from ftcoord.core.timer_records import Timer, parse_timer
from ftcoord.core.timers import TimerInfo, inform
from ftcoord.errors import ClientClosed, ConfigError, EtcdError, EtcdUnavailable, StateError
from ftcoord.etcd.api import Etcd, Get, KeyValue
from ftcoord.etcd.namespace import Namespace
from ftcoord.primitives.feed import Feed
from ftcoord.primitives.mirror import Change
from ftcoord.timer.process import host_id

log = logging.getLogger(__name__)

RETRY: Final = 0.5
"""Seconds until a watch that failed is tried again."""
PATIENCE: Final = 5.0
"""Seconds that etcd may take to begin a watch."""


def active(
    run: str, etcd: Etcd | EtcdConfig | str | Sequence[str] | None = None, *, key_prefix: str = KEY_PREFIX
) -> list[TimerInfo]:
    """The timers that run now, of all hosts; who has the least time left comes first. Costs one read.

    Args:
        run: the run's id.
        etcd: a client, or endpoints; None takes them from FTCOORD_ENDPOINTS and friends.
        key_prefix: the `key_prefix` of `rdzv_conf`.

    Raises ConfigError for bad arguments, before any socket is opened, and EtcdError when etcd cannot be read.
    """
    with Namespace.open(run, etcd, key_prefix) as place:
        found = place.etcd.range(Get(timers_span(place.prefix)))
    timers = [timer for kv in found.kvs if (timer := _timer(kv)) and not timer.expired]
    return sorted(map(_inform, timers), key=lambda info: info.left)


class Subscription:
    """Tells of timers that expire, until `close()`. A context manager."""

    def __init__(self, run: Namespace, callback: Callable[[TimerInfo], object]) -> None:
        self._run, self._callback = run, callback
        self._feed = Feed(run.etcd, timers_span(run.prefix))
        self._told: dict[str, int] = {}
        self._closed = concurrency.event()
        self._thread = concurrency.thread(self._follow, "ftcoord-expired")

    def begin(self, timeout: float) -> None:
        """Returns when nothing that expires from now on can be missed. Raises EtcdError."""
        deadline = concurrency.now() + timeout
        while not self._feed.synced:
            news = self._feed.next(deadline - concurrency.now())
            if news is None:
                raise EtcdUnavailable(f"etcd began no watch within {timeout:g} s: is it up?")
            for change in news.changes:
                self._expired(change)  # which was told to others
        self._thread.start()

    def close(self) -> None:
        """Tell no more; returns when the callback has. Idempotent."""
        self._closed.set()
        self._feed.wake()
        if self._thread.ident is not None and self._thread is not concurrency.current_thread():
            self._thread.join()
        self._feed.close()
        self._run.close()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _follow(self) -> None:
        while not self._closed.is_set():
            try:
                news = self._feed.next(PATIENCE)
            except ClientClosed:
                return
            except EtcdError as error:
                log.debug("the timers cannot be watched for now: %s", error)
                self._closed.wait(RETRY)
                continue
            for change in news.changes if news else ():
                timer = self._expired(change)
                if timer is not None and not self._closed.is_set():
                    self._tell(_inform(timer))

    def _expired(self, change: Change) -> Timer | None:
        """The timer that has expired with this change, if it was not known."""
        timer = _timer(change.now) if change.now else None
        if change.now is None:
            assert change.was is not None
            self._told.pop(change.was.key, None)
        elif timer is not None and timer.expired and self._told.get(change.now.key) != timer.token:
            self._told[change.now.key] = timer.token
            return timer
        return None

    def _tell(self, info: TimerInfo) -> None:
        try:
            self._callback(info)
        except Exception:  # of the user's; the next one is told of all the same
            log.exception("the callback failed that was told of %s", info)


def on_expired(
    run: str,
    callback: Callable[[TimerInfo], object],
    etcd: Etcd | EtcdConfig | str | Sequence[str] | None = None,
    *,
    key_prefix: str = KEY_PREFIX,
) -> Subscription:
    """Call `callback` with each timer that a server finds expired from now on, on whatever host, until `close()`.

    It is called on a thread of its own, once for each timer; of several timers of one worker that expire together,
    for the one that was first. Through outages of etcd too, but not for what etcd compacted away during one.

    Args:
        run: the run's id.
        etcd: a client, or endpoints; None takes them from FTCOORD_ENDPOINTS and friends.
        key_prefix: the `key_prefix` of `rdzv_conf`.

    Raises ConfigError for bad arguments, before any socket is opened, and EtcdError when etcd is not there.
    """
    if not callable(callback):
        raise TypeError("callback must be something to call with a TimerInfo")
    subscription = Subscription(Namespace.open(run, etcd, key_prefix), callback)
    try:
        subscription.begin(PATIENCE)
    except EtcdError:
        subscription.close()
        raise
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
    except ConfigError:  # no Linux: no host of timers, but one may look from there
        return ""
