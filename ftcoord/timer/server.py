"""The host's side of expiration timers: reaps workers that stay in a scope too long.

Three promises: a timer never ends the agent, never another process, and never a worker that was in time. They rest on
the ledger in the worker's memory, see `ftcoord.timer.ledger`. etcd only brings the timers to the server, and shows
others what has expired.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from torch.distributed.elastic.timer import TimerRequest, TimerServer
from torch.distributed.elastic.timer.api import RequestQueue

from ftcoord import concurrency
from ftcoord.config import EtcdConfig, seconds
from ftcoord.core.layout import KEY_PREFIX, expired_key, is_expired_key, timers_span
from ftcoord.core.timers import HeldTimers, Timer, TimerInfo, Worker, encode, inform
from ftcoord.errors import ClientClosed, EtcdError, LeaseLost
from ftcoord.etcd.api import Etcd, KeyValue, Put, unchanged
from ftcoord.etcd.namespace import Namespace
from ftcoord.log_once import LogOnce
from ftcoord.metrics import process as metrics
from ftcoord.primitives.mirror import Change, Feed
from ftcoord.primitives.orphans import bears
from ftcoord.primitives.write_once import write_attempt_timeout
from ftcoord.proc import send_if
from ftcoord.timer.ledger import holds, host_id
from ftcoord.timer.listing import timers_in

log = logging.getLogger(__name__)

LATE_AFTER: Final = 1.0
"""Seconds by which the watchdog may be late. If it is later, it was suspended, and perhaps the workers were too."""
TIMER_RETRY_PAUSE: Final = 0.5
"""Seconds until a failed watch, or a failed reaping of a worker, is tried again."""
STOP_TIMEOUT: Final = 5.0
"""Seconds that `stop()` waits for the watchdog to finish its work."""

Reap: TypeAlias = Callable[[TimerInfo], bool | None]


class EtcdTimerRequest(TimerRequest):
    """A timer that was acquired, or that ended, as read from etcd.

    Attributes:
        worker_id: the `Worker`.
        expiration_time: in seconds on this process's wall clock, as torch expects it; -1 when the timer was released,
            replaced, or its lease ended.
        timer: its record.
        lease: the lease of the worker's key.
    """

    __slots__ = ["lease", "timer"]

    def __init__(self, worker: Worker, timer: Timer, lease: int, ended: bool) -> None:
        left = timer.until_ms / 1000 - concurrency.now()
        super().__init__(worker, timer.scope, -1.0 if ended else concurrency.wall() + left)
        self.timer, self.lease = timer, lease


class EtcdRequestQueue(RequestQueue):
    """The timers of one host of a run. Use it in one thread; only `wake()` may be called from others.

    `size` and `get` raise EtcdError when etcd cannot be watched. The next call continues where they stopped.
    """

    def __init__(self, etcd: Etcd, prefix: str, host: str) -> None:
        self._feed = Feed(etcd, timers_span(prefix, host))
        self._ready: deque[TimerRequest] = deque()

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

    def wake(self) -> None:
        """End a `get` that waits. For any thread."""
        self._feed.wake()

    def close(self) -> None:
        """Stop watching; idempotent."""
        self._feed.close()

    def _pump(self, timeout: float) -> bool:
        news = self._feed.next(timeout)
        for change in news.changes if news else ():
            self._ready.extend(_requests(change))
        return news is not None


def _requests(change: Change) -> list[EtcdTimerRequest]:
    """How a worker's timers have changed: those that ended first."""
    was, now = _by_token(change.was), _by_token(change.now)
    ended = [EtcdTimerRequest(*one, ended=True) for token, one in was.items() if token not in now]
    return ended + [EtcdTimerRequest(*one, ended=False) for token, one in now.items() if token not in was]


def _by_token(kv: KeyValue | None) -> dict[int, tuple[Worker, Timer, int]]:
    """The timers in a worker's key, with its lease; none in a mark."""
    if kv is None or is_expired_key(kv.key):
        return {}
    return {timer.token: (worker, timer, kv.lease) for worker, timer in timers_in(kv)}


class _Entry(NamedTuple):
    """A timer that the server watches, and when it is due, on the server's clock."""

    request: TimerRequest
    due: float


class EtcdTimerServer(TimerServer):
    """Watches the timers of this host's workers, and kills a worker (SIGKILL) that holds an expired one.

    Args:
        run: the run's id.
        etcd: a client, or endpoints; None takes them from FTCOORD_ENDPOINTS and related variables.
        reap: called with an expired timer in place of SIGKILL. If it returns False it is called again, 0.5 s later.
            True and None mean that the worker was dealt with, and its other timers with it. What it raises is logged,
            and means the same.
        max_interval: the longest time between two turns of the watchdog, in seconds.
        daemon: whether the watchdog's thread is a daemon.
        key_prefix: the `key_prefix` of `rdzv_conf`.
        clock: the monotonic clock of the workers' host, in seconds (`time.monotonic`).
        expiring: called with each timer that has expired, right before its worker is reaped; must not block.
        mark: reap only workers with this mark in their environment (`ftcoord.primitives.orphans`); empty: all.

    A timer runs on the host's monotonic clock. Nothing but the worker's own memory ends it before: the server reads the
    ledger there when the time is over, and once more right before it kills, so that it kills only the very process that
    holds that very timer, and never this process. Before, it marks the timer as expired in etcd. So a worker that
    released in time is never killed, and no worker is reaped while etcd is unreachable. A worker whose lease has ended,
    because C code holds its interpreter or it is stopped, is reaped as any other.

    Of several servers each sees all workers of the host, and may kill them. To replace a server that was killed, start
    another one.

    Keep a reference: a server that nobody refers to is stopped.

    Raises ConfigError (a ValueError) for bad arguments, before any socket is opened.
    """

    def __init__(
        self,
        run: str | Namespace,
        etcd: Etcd | EtcdConfig | str | Sequence[str] | None = None,
        *,
        reap: Reap | None = None,
        max_interval: float = 0.5,
        daemon: bool = True,
        key_prefix: str = KEY_PREFIX,
        clock: Callable[[], float] = concurrency.now,
        expiring: Callable[[TimerInfo], object] = lambda info: None,
        mark: str = "",
    ) -> None:
        interval, self._host = seconds("max_interval", max_interval), host_id()
        self._run = run if isinstance(run, Namespace) else Namespace.open(run, etcd, key_prefix)
        self._queue = EtcdRequestQueue(self._run.etcd, self._run.prefix, self._host)
        super().__init__(self._queue, interval, daemon)
        self._reap, self._clock, self._expiring, self._mark = reap, clock, expiring, mark  # never change
        # Only the watchdog's thread, on which torch calls the methods of its interface:
        self._book: dict[Hashable, _Entry] = {}
        self._retry_at: dict[Any, float] = {}  # of workers that could not be reaped
        self._problem = LogOnce(log)
        self._stopping = concurrency.event()
        self._threads: list[concurrency.Thread] = []
        # torch's thread would keep this server for ever.
        setattr(self, "_watchdog_loop", partial(_watch, weakref.ref(self), self._stopping))  # noqa: B010
        self._cancel_finalizer = concurrency.when_forgotten(
            self, _end, self._stopping, self._queue, self._threads, self._run
        )

    # -- torch's interface --------------------------------------------------------------------------------------

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Note timers that were acquired, and timers that ended. torch's watchdog calls this.

        Raises TypeError for timers of torch's LocalTimerClient, before it notes any: their workers are plain pids,
        which another process may have by now. A subclass that overrides `_reap_worker` gets them.
        """
        for request in timer_requests:
            self._refuse_integers(request)
        ahead = self._clock() - concurrency.wall()
        for request in timer_requests:
            key: Hashable = (request.worker_id, request.scope_id)
            due, is_end = request.expiration_time + ahead, request.expiration_time < 0
            if isinstance(request, EtcdTimerRequest):
                key = request.worker_id, request.timer.token
                known = self._book.get(key)  # one that is written under a new lease keeps its time
                due = known.due if known else request.timer.until_ms / 1000
                if is_end and self._guards(request):  # only the lease has ended: of a worker that could not renew it
                    continue
            if is_end:
                self._book.pop(key, None)
            else:
                self._book[key] = _Entry(request, due)

    def _refuse_integers(self, request: TimerRequest) -> None:
        """Raise at once: a timer whose worker cannot be reaped guards nobody."""
        unknown = type(self)._reap_worker is EtcdTimerServer._reap_worker and isinstance(request.worker_id, int)
        if unknown and request.expiration_time >= 0:
            raise TypeError(
                f"the timer {request.scope_id!r} is of worker {request.worker_id}, a plain integer, which is no worker"
                " of an EtcdTimerClient: have the worker call configure(ftcoord.timer.EtcdTimerClient()), or serve its"
                " LocalTimerClient with torch's LocalTimerServer"
            )

    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Forget all timers of these workers."""
        for key, entry in list(self._book.items()):
            if entry.request.worker_id in worker_ids:
                del self._book[key]

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """The timers that have expired by `deadline` (as `time.time()`), by worker: those that are still held."""
        latest = self._clock() + deadline - concurrency.wall()
        expired: dict[Any, list[TimerRequest]] = {}
        for key, (request, due) in sorted(self._book.items(), key=lambda item: item[1].due):
            if due > latest:
                break
            if isinstance(request, EtcdTimerRequest) and not self._guards(request):
                self._book.pop(key, None)
            else:
                expired.setdefault(request.worker_id, []).append(request)
        return expired

    def _reap_worker(self, worker_id: Any) -> bool:
        if not isinstance(worker_id, Worker):
            raise TypeError(f"{worker_id!r} is no worker of an EtcdTimerClient; override _reap_worker for others")
        entries = (entry for entry in self._book.values() if entry.request.worker_id == worker_id)
        request = min(entries, key=lambda entry: entry.due).request
        assert isinstance(request, EtcdTimerRequest)
        info = inform(worker_id, request.timer, self._host, self._clock(), concurrency.wall())
        try:
            self._mark_expired(worker_id, request)
        except EtcdError as error:
            self._problem.say(f"etcd is unreachable, and no worker is reaped until it is back: {error}")
            return False
        if worker_id not in self._retry_at:
            metrics.TIMERS_EXPIRED.add()
            log.warning(
                "worker %d (rank %s) has been in %r for %.1f s: reaping it", info.pid, info.rank, info.scope, info.age
            )
            self._expiring(info)
        return self._kill(request) if self._reap is None else self._reap(info) is not False

    def start(self) -> None:
        """Start the watchdog's thread. Raises ThreadNotStarted."""
        super().start()
        assert self._watchdog_thread is not None
        self._threads.append(self._watchdog_thread)

    def stop(self) -> None:
        """Stop the watchdog, and wait up to 5 s for it to finish its work. Idempotent.

        Running timers are left to another server.
        """
        self._stop_signaled = True
        self._cancel_finalizer()
        _end(self._stopping, self._queue, self._threads, self._run)
        self._watchdog_thread = None

    # -- the watchdog -------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """One turn of the watchdog's thread."""
        try:
            self._run_watchdog()
        except ClientClosed as error:  # which ends the server, perhaps unintentionally
            if not self._stopping.is_set():
                log.error("no worker is reaped any longer: %s; start another timer server", error)
            self._stopping.set()
        except EtcdError as error:
            self._problem.say(f"timers cannot be watched for now, and no worker is reaped: {error}")
            self._stopping.wait(TIMER_RETRY_PAUSE)
        except Exception as error:  # of a user's subclass; torch's rule: the watchdog goes on
            log.debug("a turn of the timer server failed", exc_info=True)
            again = f"it is repeated every {TIMER_RETRY_PAUSE:g} s"
            self._problem.say(f"a turn of the timer server failed, and {again}: {error!r}", logging.ERROR)
            self._stopping.wait(TIMER_RETRY_PAUSE)

    def _run_watchdog(self) -> None:
        now = self._clock()
        looks = (max(due, self._retry_at.get(request.worker_id, due)) for request, due in self._book.values())
        look_at = now + min(max(min(looks, default=math.inf) - now, 0), self._max_interval)
        requests = self._queue.get(max(1, self._queue.size()), look_at - now)
        late = self._clock() - look_at
        if late > LATE_AFTER:
            log.info("the timer server was not run for %.1f s: all timers have so much more time", late)
            self._book = {key: entry._replace(due=entry.due + late) for key, entry in self._book.items()}
        if requests:
            self._problem.forget()
        self.register_timers(requests)
        metrics.TIMERS.set(len(self._book))
        workers = {entry.request.worker_id for entry in self._book.values()}
        self._retry_at = {worker: at for worker, at in self._retry_at.items() if worker in workers}
        reaped = set()
        for worker in self.get_expired_timers(concurrency.wall()):
            if self._stopping.is_set():
                break
            if self._retry_at.get(worker, -math.inf) > self._clock():
                continue
            if self._reap_worker_no_throw(worker):
                reaped.add(worker)
            else:
                self._retry_at[worker] = self._clock() + TIMER_RETRY_PAUSE
        self.clear_timers(reaped)

    def _guards(self, request: EtcdTimerRequest) -> bool:
        """Whether a timer may end its worker: that holds it, and is this server's to reap."""
        worker: Worker = request.worker_id
        try:
            return (
                worker.host == self._host
                and (self._reap is not None or worker.pid != os.getpid())
                and holds(self._run.prefix, worker, request.timer)
                and (not self._mark or bears(worker.pid, self._mark))
            )
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            return False
        except OSError as error:
            self._problem.say(f"timers of worker {worker.pid} guard nobody: {error}; run the server as its user")
            return False

    def _mark_expired(self, worker: Worker, request: EtcdTimerRequest) -> None:
        """Show others that a timer has expired, unless another server has. Raises EtcdError, also if etcd does not
        answer: then no worker is reaped."""
        etcd, timer = self._run.etcd, request.timer
        key = expired_key(self._run.prefix, worker.host, timer.token)
        put = Put(key, encode(HeldTimers(worker, (timer,))), request.lease)
        try:
            etcd.txn([unchanged(key, 0)], [put], timeout=write_attempt_timeout(etcd))
        except LeaseLost:  # of a worker that could not renew it: nothing shows its timers any more
            log.debug("timer %r expires under a lease that has ended", timer.scope)

    def _kill(self, request: EtcdTimerRequest) -> bool:
        """Whether the worker was killed, or has ended. Not if it has just released the timer."""
        pid = request.worker_id.pid
        try:
            return send_if(pid, signal.SIGKILL, lambda: self._guards(request))
        except ProcessLookupError:
            return True
        except OSError as error:
            log.error("worker %d should be killed, but cannot be: %s; run the server as its user", pid, error)
            return False


def _end(
    stopping: concurrency.Event, queue: EtcdRequestQueue, threads: list[concurrency.Thread], run: Namespace
) -> None:
    """Idempotent."""
    stopping.set()
    queue.wake()
    for thread in threads:
        if thread is not concurrency.current_thread():
            thread.join(STOP_TIMEOUT)
    queue.close()
    run.close()


def _watch(reference: weakref.ref[EtcdTimerServer], stopping: concurrency.Event) -> None:
    """The watchdog's thread. It refers to the server only for one turn at a time."""
    while not stopping.is_set() and (server := reference()) is not None:
        server._turn()
        del server
