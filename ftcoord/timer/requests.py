"""Timers as torch's TimerServer takes them: a queue of requests, fed by a watch."""

from __future__ import annotations

import logging
from collections import deque

from torch.distributed.elastic.timer import TimerRequest
from torch.distributed.elastic.timer.api import RequestQueue

from ftcoord import concurrency
from ftcoord.core.layout import timers_span
from ftcoord.core.timer_records import Timer, parse_timer
from ftcoord.errors import EtcdError, StateError
from ftcoord.etcd.api import Etcd, KeyValue
from ftcoord.primitives.feed import Feed
from ftcoord.primitives.mirror import Change

log = logging.getLogger(__name__)


class EtcdTimerRequest(TimerRequest):
    """A timer that was acquired, or that ended, as read from etcd.

    Attributes:
        worker_id: the `Worker`.
        expiration_time: in seconds on this process's wall clock, as torch expects it; -1 when the timer was released,
            its lease ended, or a server has reaped its worker.
        kv: the timer's key.
        timer: its record; if it ended, the last one.
        listed: whether it already existed when the watch started or restarted.
    """

    __slots__ = ["kv", "listed", "timer"]

    def __init__(self, kv: KeyValue, timer: Timer, listed: bool = False, ended: bool = False) -> None:
        super().__init__(timer.worker, timer.scope, -1.0 if ended else concurrency.wall() + timer.left_ms / 1000)
        self.kv, self.timer, self.listed = kv, timer, listed


class EtcdRequestQueue(RequestQueue):
    """The timers of one host of a run. Use it in one thread; only `wake()` may be called from others.

    `size` and `get` raise EtcdError when etcd cannot be watched. The next call continues where they stopped.
    """

    def __init__(self, etcd: Etcd, prefix: str, host: str) -> None:
        self._feed = Feed(etcd, timers_span(prefix, host))
        self._ready: deque[TimerRequest] = deque()
        self._began = 0
        self._problem: EtcdError | None = None  # what `wait` met, for the next call to raise

    @property
    def began(self) -> int:
        """How often the watch has started. After each start, requests may have been late."""
        return self._began

    def size(self) -> int:
        """How many requests `get` returns without waiting."""
        while self._pump(0):
            pass
        return len(self._ready)

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Up to `size` requests, as soon as there is one; none after `timeout` seconds, or on `wake()`."""
        deadline = concurrency.now() + timeout
        while not self._ready and self._pump(deadline - concurrency.now()):
            pass
        return [self._ready.popleft() for _ in range(min(size, len(self._ready)))]

    def wait(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for a request, an error that `get` will raise, or `wake()`."""
        deadline = concurrency.now() + timeout
        try:
            while not self._ready and self._pump(deadline - concurrency.now()):
                pass
        except EtcdError as error:
            self._problem = error

    def wake(self) -> None:
        """End a `get` or `wait` that waits. For any thread."""
        self._feed.wake()

    def close(self) -> None:
        """Stop watching; idempotent."""
        self._feed.close()

    def _take_problem(self) -> EtcdError:
        """No frame of the traceback may refer to the error: the cycle would keep the server alive until the garbage
        collector runs."""
        assert self._problem is not None
        problem, self._problem = self._problem, None
        return problem

    def _pump(self, timeout: float) -> bool:
        if self._problem is not None:
            raise self._take_problem()
        news = self._feed.next(timeout)
        if news is None:
            return False
        self._began += news.restarted
        self._ready.extend(request for change in news.changes if (request := _request(change, news.restarted)))
        return True


def _request(change: Change, listed: bool) -> EtcdTimerRequest | None:
    kv = change.now or change.was
    assert kv is not None
    timer = _timer(change.now)
    if timer is not None:
        return EtcdTimerRequest(kv, timer, listed, ended=timer.reaped)
    before = _timer(change.was)
    return EtcdTimerRequest(kv, before, listed, ended=True) if before else None


def _timer(kv: KeyValue | None) -> Timer | None:
    try:
        return parse_timer(kv.key, kv.value) if kv else None
    except StateError as error:
        log.warning("no timer: %s", error)
        return None
