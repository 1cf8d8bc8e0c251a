"""The host's side of expiration timers: reaps workers that stay in a scope too long."""

from __future__ import annotations

import logging
import math
import uuid
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias

from torch.distributed.elastic.timer import TimerRequest, TimerServer

from ftcoord import concurrency
from ftcoord.config import EtcdConfig, seconds
from ftcoord.core.layout import KEY_PREFIX
from ftcoord.core.timer_records import Worker, encode
from ftcoord.core.timers import Book, Entry, TimerInfo, due, inform
from ftcoord.errors import ClientClosed, EtcdError, LeaseLost
from ftcoord.etcd.api import Etcd, Put
from ftcoord.etcd.namespace import Namespace
from ftcoord.log_once import LogOnce
from ftcoord.metrics import process as metrics
from ftcoord.primitives.renewal import Clock
from ftcoord.primitives.write_once import write_attempt_timeout, write_once
from ftcoord.timer.ledger import holds
from ftcoord.timer.process import host_id, is_untouchable, kill, lives
from ftcoord.timer.requests import EtcdRequestQueue, EtcdTimerRequest
from ftcoord.timer.worker_leases import WorkerLeases

log = logging.getLogger(__name__)

NO_EXPIRY_AFTER_GAP: Final = 2.0
"""Seconds without expiries after etcd could not be watched: releases may still be on their way."""
LATE_AFTER: Final = 1.0
"""Seconds by which the watchdog may be late. If it is later, it was suspended, and perhaps the workers were too."""
TIMER_RETRY_PAUSE: Final = 0.5
"""Seconds until a failed watch, or a failed reaping of a worker, is tried again."""
STOP_TIMEOUT: Final = 5.0
"""Seconds that `stop()` waits for the watchdog to finish its work."""

Reap: TypeAlias = Callable[[TimerInfo], bool | None]
MayReap: TypeAlias = Callable[[Worker], bool]


class EtcdTimerServer(TimerServer):
    """Watches the timers of this host's workers, and kills a worker (SIGKILL) that holds an expired one.

    Args:
        run: the run's id.
        etcd: a client, or endpoints; None takes them from FTCOORD_ENDPOINTS and related variables.
        reap: called with an expired timer in place of SIGKILL. If it returns False it is called again, 0.5 s later.
            True and None mean that the worker was dealt with. What it raises is logged, and means the same.
        max_interval: the longest time between two turns of the watchdog, in seconds.
        daemon: whether the watchdog's thread is a daemon.
        key_prefix: the `key_prefix` of `rdzv_conf`.
        clock: a monotonic clock in seconds. It must be the clock of the workers' host (`time.monotonic`).
        expiring: called with each timer that has expired, right before its worker is reaped; must not block.
        may_reap: whether a running worker is this server's to reap; the timers of all others are left alone. By default
            all are. Whoever can write below the run's prefix can write a timer with any pid.

    A timer runs from when it was recorded in etcd, on this host's monotonic clock. Before it kills a worker, the server
    makes three checks. It compares the worker's start time, because another process may have its pid. It reads the
    ledger in the worker's memory, because etcd may not know of a release yet. And it marks the timer's key as expired,
    in a transaction that fails if the worker has written the key since.

    SIGKILL never goes to this process, its parent, its sentinel or pid 1, whatever a timer names.

    So a worker that released in time is never killed, only one of several servers reaps a worker, and no worker is
    reaped while etcd is unreachable. To replace a server that was killed, start another one.

    The server also renews the lease of a worker that holds a timer, because a worker stuck in C code cannot.

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
        clock: Clock = concurrency.now,
        expiring: Callable[[TimerInfo], object] = lambda info: None,
        may_reap: MayReap = lambda worker: True,
    ) -> None:
        interval, self._host = seconds("max_interval", max_interval), host_id()
        self._run = run if isinstance(run, Namespace) else Namespace.open(run, etcd, key_prefix)
        self._queue = EtcdRequestQueue(self._run.etcd, self._run.prefix, self._host)
        super().__init__(self._queue, interval, daemon)
        self.id = uuid.uuid4().hex
        self._reap, self._clock, self._expiring, self._may_reap = reap, clock, expiring, may_reap  # never change
        # Only the watchdog's thread (torch calls `register_timers`, `clear_timers` and `get_expired_timers` there), and
        # `stop()` when that has ended:
        self._book: Book[TimerRequest] = Book()
        self._failing: set[Hashable] = set()  # timers that could not be handled, and have their log line
        self._failed_with = ""  # how the last turn failed
        self._leases = WorkerLeases(self._run.etcd)
        self._gaps = _Gaps(self._book, clock)
        self._resources = _ServerResources(self._queue, self._leases, self._run)
        # torch's thread would keep this server for ever.
        setattr(self, "_watchdog_loop", partial(_watch, weakref.ref(self), self._resources))  # noqa: B010
        self._cancel_finalizer = concurrency.when_forgotten(self, self._resources.end)

    # -- torch's interface --------------------------------------------------------------------------------------

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Note timers that were acquired, and timers that ended. torch's watchdog calls this.

        Raises TypeError for timers of torch's LocalTimerClient, before it notes any: their workers are plain pids,
        which another process may have by now. A subclass that overrides `_reap_worker` gets them.
        """
        for request in timer_requests:
            self._refuse_integers(request)
        now = self._clock()
        for request in timer_requests:
            key = _key(request)
            if request.expiration_time < 0:
                self._book.drop(key)
            elif not isinstance(request, EtcdTimerRequest):
                self._book.note(key, request, now + request.expiration_time - concurrency.wall(), now)
            elif self._is_marked_again(request):
                self._book.postpone(key, self._book.entries[key].look_at, request)
            elif request.timer.expired != self.id:
                self._book.note(key, request, due(request.timer, self.id, now, request.listed), now)

    def _is_marked_again(self, request: EtcdTimerRequest) -> bool:
        """Whether the same other server marks a timer again because it could not reap the worker. That does not extend
        the timer: this server may be able to."""
        known = self._book.entries.get(_key(request))
        if known is None or not isinstance(known.item, EtcdTimerRequest):
            return False
        before, now = known.item.timer, request.timer
        return now.expired not in ("", self.id) and (before.token, before.expired) == (now.token, now.expired)

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
        for key, entry in list(self._book.entries.items()):
            if entry.item.worker_id in worker_ids:
                self._book.drop(key)

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """The timers that have expired by `deadline` (as `time.time()`), by worker."""
        latest = self._clock() + deadline - concurrency.wall()
        expired: dict[Any, list[TimerRequest]] = {}
        for entry in self._book.entries.values():
            if entry.due <= latest:
                expired.setdefault(entry.item.worker_id, []).append(entry.item)
        return expired

    def _reap_worker(self, worker_id: Any) -> bool:
        if not isinstance(worker_id, Worker):
            raise TypeError(f"{worker_id!r} is no worker of an EtcdTimerClient; override _reap_worker for others")
        try:
            killed = kill(worker_id)
        except OSError as error:
            log.error("worker %d should be killed, but cannot be: %s; run the server as its user", worker_id.pid, error)
            return False
        if not killed:
            log.info("worker %d has ended by itself", worker_id.pid)
        return True

    def start(self) -> None:
        """Start the watchdog's thread. Raises ThreadNotStarted."""
        super().start()
        self._resources.thread = self._watchdog_thread

    def stop(self) -> None:
        """Stop the watchdog, and wait up to 5 s for it to finish its work. Idempotent.

        Running timers are left to another server.
        """
        self._stop_signaled = True
        self._cancel_finalizer()
        self._resources.end()
        self._watchdog_thread = None

    # -- the watchdog -------------------------------------------------------------------------------------------

    def _turn(self) -> float:
        """One turn of the watchdog's thread; returns the seconds until the next one, if no request comes before."""
        failed_before, self._failed_with = self._failed_with, ""
        try:
            self._run_watchdog()
        except Exception as error:  # of a user's subclass; torch's rule: the watchdog goes on
            self._failed_with = repr(error)
            if self._failed_with != failed_before:
                log.exception("a turn of the timer server failed; it is repeated every %.1f s", TIMER_RETRY_PAUSE)
            self._resources.stopping.wait(TIMER_RETRY_PAUSE)  # what is due stays due
        return self._gaps.plan(self._max_interval)

    def _run_watchdog(self) -> None:
        try:
            requests = self._queue.get(max(1, self._queue.size()), 0)
        except ClientClosed as error:
            self._end(error)
            return
        except EtcdError as error:
            self._wait_for_etcd(error)
            return
        self._gaps.notice(self._queue.began)
        self.register_timers(requests)
        self._leases.keep(self._book.entries.values(), self._clock())
        metrics.TIMERS.set(len(self._book.entries))
        self._failing.intersection_update(self._book.entries)
        for key, entry in self._book.expired(self._clock()):
            if self._resources.stopping.is_set() or not self._try_to_see_to(key, entry):
                break

    def _try_to_see_to(self, key: Hashable, entry: Entry[TimerRequest]) -> bool:
        """A timer that fails in a way that nobody foresaw is postponed by itself: others wrote it, and the workers of
        all other timers must still be reaped."""
        try:
            return self._see_to(key, entry)
        except (OSError, ValueError, OverflowError) as error:
            if key not in self._failing:
                self._failing.add(key)
                log.error("timer %r cannot be handled, and is tried again: %s", entry.item.scope_id, error)
            self._book.postpone(key, self._clock() + TIMER_RETRY_PAUSE)
            return True

    def _wait_for_etcd(self, error: EtcdError) -> None:
        self._gaps.begin(error)
        self._resources.stopping.wait(TIMER_RETRY_PAUSE)

    def _end(self, error: ClientClosed) -> None:
        """The client was closed, which ends the server, perhaps unintentionally."""
        if not self._resources.stopping.is_set():
            log.error("no worker is reaped any longer: %s; start another timer server", error)
        self._stop_signaled = True

    def _see_to(self, key: Hashable, entry: Entry[TimerRequest]) -> bool:
        """Reap the worker, if it still holds the timer. False if etcd is unreachable."""
        request = entry.item
        if not isinstance(request, EtcdTimerRequest):
            self._finish(key, request, self._reap_worker_no_throw(request.worker_id))
            return True
        worker, timer = request.timer.worker, request.timer
        if not lives(worker):
            self._book.drop(key)
        elif (self._reap is None and is_untouchable(worker)) or not self._may_reap(worker):
            log.info("process %d is no worker of this timer server: its timer %r ends nothing", worker.pid, timer.scope)
            self._book.drop(key)
        elif holds(worker.pid, worker.ledger, timer.slot, timer.token) is False:
            self._book.postpone(key, self._clock() + TIMER_RETRY_PAUSE)  # the release is on its way to etcd
        else:
            try:
                self._expire(key, request)
            except ClientClosed as error:
                self._end(error)
                return False
            except EtcdError as error:
                self._wait_for_etcd(error)
                return False
        return True

    def _expire(self, key: Hashable, request: EtcdTimerRequest) -> None:
        claimed = self._mark(request, reaped=False)
        if claimed is None:
            self._book.drop(key)  # the watch will bring what it is now
            return
        metrics.TIMERS_EXPIRED.add()
        info = inform(claimed.timer, self._host, self._clock(), concurrency.wall())
        log.warning(
            "worker %d (rank %s) has been in %r for %.1f s: reaping it", info.pid, info.rank, info.scope, info.age
        )
        self._expiring(info)
        reap = self._reap
        is_reaped = self._reap_worker_no_throw(claimed.worker_id) if reap is None else _no_throw(reap, info)
        self._finish(key, claimed, is_reaped)
        if is_reaped:
            try:
                self._mark(claimed, reaped=True)
            except EtcdError as error:
                log.debug("that worker %d was reaped is not in etcd: %s", info.pid, error)

    def _mark(self, request: EtcdTimerRequest, reaped: bool) -> EtcdTimerRequest | None:
        """Mark the timer as expired in etcd; None if it has changed meanwhile. Raises EtcdError."""
        timer, kv = replace(request.timer, expired=self.id, reaped=reaped), request.kv
        put = Put(kv.key, encode(timer), kv.lease)
        try:
            outcome = write_once(self._run.etcd, put, kv, timeout=write_attempt_timeout(self._run.etcd))
        except LeaseLost:
            return None
        return EtcdTimerRequest(outcome.kv, timer) if outcome.done and outcome.kv else None

    def _finish(self, key: Hashable, request: TimerRequest, is_reaped: bool) -> None:
        if is_reaped:
            self._book.drop(key)
        else:
            self._book.postpone(key, self._clock() + TIMER_RETRY_PAUSE, request)


class _Gaps:
    """Periods in which a server did not get all changes, or did not run: timers get more time then. For the watchdog's
    thread.

    Args:
        book: the server's timers.
        clock: its monotonic clock.
    """

    def __init__(self, book: Book[TimerRequest], clock: Clock) -> None:
        self._book, self._clock = book, clock
        self._planned = math.inf  # when the watchdog meant to look again
        self._began = 0  # the queue's `began` that is in the book
        self._problem = LogOnce(log)

    def plan(self, max_interval: float) -> float:
        """Seconds until the watchdog's next turn. If that comes much later, the watchdog was suspended."""
        now = self._clock()
        self._planned = now + min(max(self._book.look_at() - now, 0), max_interval)
        return self._planned - now

    def notice(self, began: int) -> None:
        """Give timers more time if there was a gap since the last turn. `began`: how often the queue's watch began."""
        now = self._clock()
        late = now - self._planned
        if late > LATE_AFTER:
            log.info("the timer server was not run for %.1f s: all timers have so much more time", late)
            self._book.shift(late)
        if began != self._began:
            self._began = began
            self._problem.forget()
            self._book.hold(now + NO_EXPIRY_AFTER_GAP)

    def begin(self, error: EtcdError) -> None:
        """etcd is unreachable: no timer expires now, nor right after etcd is back."""
        self._problem.say(f"timers cannot be watched for now, and no worker is reaped: {error}")
        self._book.hold(self._clock() + NO_EXPIRY_AFTER_GAP)


class _ServerResources:
    """The resources that a server must release. Does not refer to the server."""

    def __init__(self, queue: EtcdRequestQueue, leases: WorkerLeases, run: Namespace) -> None:
        self.queue, self._leases, self._run = queue, leases, run  # never change
        self.stopping = concurrency.event()
        self.thread: concurrency.Thread | None = None  # set once, by `start()`

    def end(self) -> None:
        """Idempotent."""
        self.stopping.set()
        self.queue.wake()
        if self.thread is not None and self.thread is not concurrency.current_thread():
            self.thread.join(STOP_TIMEOUT)
        self.queue.close()
        self._leases.close()
        self._run.close()


def _watch(reference: weakref.ref[EtcdTimerServer], resources: _ServerResources) -> None:
    """The watchdog's thread. It refers to the server only while it works."""
    timeout = 0.0
    while not resources.stopping.is_set():
        resources.queue.wait(timeout)
        server = reference()
        if server is None or server._stop_signaled:
            return
        timeout = server._turn()
        del server


def _key(request: TimerRequest) -> Hashable:
    return request.kv.key if isinstance(request, EtcdTimerRequest) else (request.worker_id, request.scope_id)


def _no_throw(reap: Reap, info: TimerInfo) -> bool:
    try:
        return reap(info) is not False
    except Exception:  # the user's callback; torch's rule: a worker whose reaping failed is not tried again
        log.exception("the reap callback failed for worker %d; its timer counts as done", info.pid)
        return True
