"""Both ends of expiration timers in etcd: torch's client in a worker, and torch's server on its host. Linux only.

Three promises: a timer never ends the agent, never another process, and never a worker that was in time. They rest on
the worker's `Ledger`. A timer ends a process only if that process's own ledger shows it, which is read right before the
kill: so a release takes effect at once, and whatever somebody writes into etcd, no process is killed that does not hold
that very timer. etcd only brings the timers to the server, and shows others what has expired.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final, NamedTuple, TypeAlias

from torch.distributed.elastic.timer import TimerClient, TimerRequest, TimerServer
from torch.distributed.elastic.timer.api import RequestQueue

from ftcoord import concurrency
from ftcoord.config import MAX_SECONDS, EtcdConfig, seconds, whole
from ftcoord.core.layout import KEY_PREFIX, expired_key, is_expired_key, timers_key, timers_span
from ftcoord.core.timers import LONGEST_SCOPE, MOST_TIMERS, HeldTimers, Timer, TimerInfo, Worker, encode, inform
from ftcoord.errors import ClientClosed, ConfigError, EtcdError, LeaseLost, ThreadFailed
from ftcoord.escaping import redacted
from ftcoord.etcd.api import Etcd, KeyValue, Put, unchanged
from ftcoord.etcd.client import Namespace, SharedClient
from ftcoord.log_once import LogOnce
from ftcoord.metrics import process as metrics
from ftcoord.primitives.leased_key import LeasedKey
from ftcoord.primitives.mirror import Feed
from ftcoord.primitives.orphans import bears
from ftcoord.primitives.write_once import write_attempt_timeout
from ftcoord.proc import send_if
from ftcoord.timer import VARIABLE, Ledger, describe, holds, host_id, inherited, this_process, timers_in

log = logging.getLogger(__name__)

ACQUIRE_TIMEOUT: Final = 1.0
"""Seconds that `acquire` waits for etcd by default."""
TIMERS_END_TIMEOUT: Final = 1.0
"""Seconds that etcd may take to revoke a client's lease."""
LATE_AFTER: Final = 1.0
"""Seconds by which a turn of the server may be late. If it is later, the host was suspended, and the workers too."""
TIMER_RETRY_PAUSE: Final = 0.5
"""Seconds until a watch, or a reaping, that failed is tried again."""
STOP_TIMEOUT: Final = 5.0
"""Seconds that `stop()` waits for the watchdog to finish its work."""
_ttl = whole(2, 3600, " (seconds); etcd on default settings grants no lease shorter than 2 s")

Reap: TypeAlias = Callable[[TimerInfo], bool | None]


# -- the client -------------------------------------------------------------------------------------------------------


class EtcdTimerClient(TimerClient):
    """Timers of this process, for torch's own `configure()` and `with expires(after=60)`.

    Args:
        run: the run's id; None takes run, etcd and login from the agent, under torchrun with `timers=1` in `rdzv_conf`.
        etcd: a client, or endpoints; None takes them from FTCOORD_ENDPOINTS and related variables.
        key_prefix: the `key_prefix` of `rdzv_conf`.
        timeout: seconds that `acquire` may wait until etcd has the timer; 0 never waits.
        ttl: whole seconds, from 2 to 3600, after which the timers of a lost host are deleted. If only the worker dies,
            its sentinel deletes them at once.

    As with torch's clients, each scope of a process has one timer: acquiring it again replaces it, and one release ends
    it. Timers of different scopes run side by side. A client that nobody refers to is closed. Thread-safe; not usable
    in a forked child.

    Promised: `release` wins if it began before the timer expired, even if etcd does not know yet. Each call costs at
    most one write. If etcd is unreachable or refuses, neither call raises: `acquire` waits for `timeout` once, and then
    neither call waits until etcd is back. Timers that are still held then are recorded.

    Not promised: that a stuck worker is reaped while it cannot reach etcd. Nor is it reaped for a timer that it
    acquired after its etcd client was closed, or its thread failed with an unexpected error; both are logged as errors.

    Raises ConfigError (a ValueError) for bad arguments, before any socket is opened.
    """

    def __init__(
        self,
        run: str | None = None,
        etcd: Etcd | EtcdConfig | str | Sequence[str] | None = None,
        *,
        key_prefix: str = KEY_PREFIX,
        timeout: float = ACQUIRE_TIMEOUT,
        ttl: int = 10,
    ) -> None:
        super().__init__()
        self._timeout, ttl, host = _acquire_timeout(timeout), _ttl("ttl", ttl), host_id()
        if run is None and etcd is not None:
            raise ConfigError("run", None, "name the run too, where you name its etcd")
        with ExitStack() as ends:
            place = inherited() if run is None else Namespace.open(run, etcd, key_prefix)
            ends.callback(place.close)
            prefix, self._ledger = place.prefix, Ledger(place.prefix)
            key_of = lambda lease: timers_key(prefix, host, lease)  # noqa: E731
            self._key = LeasedKey(place.etcd, ttl, key_of, "timers", deaths=prefix)
            ends.callback(self._key.close, TIMERS_END_TIMEOUT)
            ends.callback(self._ledger.close)  # first: this releases all timers
            self._worker = this_process(self._ledger.fd)
            self._ends = ends.pop_all()
        # Guards the next two, and keeps the order of the ledger's entries and of what is to be written. Reentrant: a
        # signal handler may use timers in the middle of a call.
        self._lock = concurrency.rlock("EtcdTimerClient._lock")
        self._held: dict[str, Timer] = {}
        self._closed = False
        self._cancel_finalizer = concurrency.when_forgotten(self, self._ends.close)

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Have this process reaped unless `scope_id` is released before `expiration_time`.

        Waits up to the client's `timeout` for etcd, once per outage.

        Args:
            scope_id: the scope's name.
            expiration_time: seconds as `time.time()` of this host gives them; later, that clock may be set.

        Raises ConfigError for an empty name, a time too far away, or too many timers at once, TypeError for other
        types, ClientClosed after `close()`, and ForkedProcessError in a forked child.
        """
        self._key.check_process()
        scope, after = _scope(scope_id), _from_now(expiration_time)
        with self._lock:
            if self._closed:
                raise ClientClosed("these timers were closed: make new ones, with a new EtcdTimerClient")
            slot = self._held[scope].slot if scope in self._held else self._free_slot()
            timer = self._held[scope] = Timer(
                scope=scope[-LONGEST_SCOPE:],
                after_ms=_ms(after),
                until_ms=_ms(concurrency.now() + after),
                wall_ms=_ms(concurrency.wall() + after),
                slot=slot,
                token=secrets.randbits(62) + 1,
            )
            self._ledger.note(slot, timer.token)
            self._record()
        if self._timeout:
            with suppress(ClientClosed, ThreadFailed):  # logged: training goes on without timers
                self._key.wait(self._timeout)

    def release(self, scope_id: str) -> None:
        """End the timer of `scope_id`, if there is one. Does not wait for etcd. Raises ForkedProcessError."""
        self._key.check_process()
        with self._lock:
            if (timer := self._held.pop(scope_id, None)) is not None:
                self._ledger.note(timer.slot, 0)
                self._record()

    def close(self) -> None:
        """Release all timers, and give up the lease. Idempotent; does nothing in a forked child. Takes a few seconds if
        etcd is unreachable."""
        if os.getpid() == self._worker.pid:
            self._cancel_finalizer()
            with self._lock:
                self._closed = True
                self._held.clear()
            self._ends.close()

    def _record(self) -> None:
        """With the lock held."""
        self._key.put(encode(HeldTimers(self._worker, tuple(self._held.values()))))

    def _free_slot(self) -> int:
        taken = {timer.slot for timer in self._held.values()}
        if len(taken) >= MOST_TIMERS:
            allowed = f"a process holds {MOST_TIMERS} timers at the most: release some first"
            raise ConfigError("scope_id", "<text>", allowed)
        return next(slot for slot in range(MOST_TIMERS) if slot not in taken)


def _ms(seconds: float) -> int:
    return math.ceil(seconds * 1000)


def _from_now(expiration_time: object) -> float:
    """Seconds from now until a time of the wall clock."""
    if isinstance(expiration_time, bool) or not isinstance(expiration_time, (int, float)):
        raise TypeError(f"expiration_time is a number of seconds, not {type(expiration_time).__name__}")
    after = max(expiration_time - concurrency.wall(), 0.0)
    if not math.isfinite(expiration_time) or after > MAX_SECONDS:
        raise ConfigError("expiration_time", expiration_time, f"give a time within {MAX_SECONDS:g} s from now")
    return after


def _scope(scope_id: object) -> str:
    if not isinstance(scope_id, str):
        raise TypeError(f"scope_id is a text, not {type(scope_id).__name__}")
    if not scope_id:
        raise ConfigError("scope_id", scope_id, "give the scope a name")
    return scope_id


def _acquire_timeout(timeout: object) -> float:
    if isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and 0 <= timeout <= MAX_SECONDS:
        return float(timeout)
    raise ConfigError("timeout", redacted(timeout), "give the seconds that acquire may wait, 0 or more, such as 0.5")


# -- the server -------------------------------------------------------------------------------------------------------


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

    def __init__(self, worker: Worker, timer: Timer, lease: int, *, ended: bool) -> None:
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
        self.wake, self.close = self._feed.wake, self._feed.close

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

    def _pump(self, timeout: float) -> bool:
        news = self._feed.next(timeout)
        for change in news or ():
            was, now = _by_token(change.was), _by_token(change.now)
            self._ready += (EtcdTimerRequest(*was[token], ended=True) for token in was if token not in now)
            self._ready += (EtcdTimerRequest(*now[token], ended=False) for token in now if token not in was)
        return news is not None


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
    another one. A server that was started runs until `stop()`, or until the process ends.

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
        self._announced: set[Any] = set()  # workers that are being reaped: one line each, however often that fails
        self._reaps_at = -math.inf  # not before, because it failed just now
        self._problem = LogOnce(log)
        self._stopping = concurrency.event()
        self._cancel_stop = concurrency.when_forgotten(self, self.stop)  # at the end of the process

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Note timers that were acquired, and timers that ended. torch's watchdog calls this.

        Raises TypeError for timers of torch's LocalTimerClient, before it notes any: their workers are plain pids,
        which another process may have by now.
        """
        if pids := [one.worker_id for one in timer_requests if isinstance(one.worker_id, int)]:
            raise TypeError(
                f"a timer of worker {pids[0]}, a plain integer, is none of an EtcdTimerClient: have the worker call"
                " configure(ftcoord.timer.EtcdTimerClient()), or serve it with torch's LocalTimerServer"
            )
        ahead = self._clock() - concurrency.wall()  # once: timers that expire together stay in their order
        for request in timer_requests:
            is_end = request.expiration_time < 0
            if isinstance(request, EtcdTimerRequest):
                key: Hashable = (request.worker_id, request.timer.token)
                known = self._book.get(key)  # one that is written under a new lease keeps its time
                due = known.due if known else request.timer.until_ms / 1000
                if is_end and self._guards(request):  # only the lease has ended: of a worker that could not renew it
                    continue
            else:
                key = (request.worker_id, request.scope_id)
                due = request.expiration_time + ahead
            if is_end:
                self._book.pop(key, None)
            else:
                self._book[key] = _Entry(request, due)

    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Forget all timers of these workers."""
        self._book = {key: one for key, one in self._book.items() if one.request.worker_id not in worker_ids}

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """The timers that have expired by `deadline` (as `time.time()`), by worker: those that are still held."""
        latest = self._clock() + deadline - concurrency.wall()
        expired: dict[Any, list[TimerRequest]] = {}
        for key, (request, due) in sorted(self._book.items(), key=lambda item: item[1].due):
            if due <= latest:
                if isinstance(request, EtcdTimerRequest) and not self._guards(request):
                    self._book.pop(key, None)  # a test, or a subclass, may call this beside the watchdog
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
        if worker_id not in self._announced:
            self._announced.add(worker_id)
            metrics.TIMERS_EXPIRED.add()
            log.warning(
                "worker %d (rank %s) has been in %r for %.1f s: reaping it", info.pid, info.rank, info.scope, info.age
            )
            self._expiring(info)
        return self._kill(request) if self._reap is None else self._reap(info) is not False

    def stop(self) -> None:
        """Stop the watchdog, and wait up to 5 s for it to finish. Idempotent. Timers are left to another server."""
        self._cancel_stop()
        self._stop_signaled = True
        self._stopping.set()
        self._queue.wake()
        thread, self._watchdog_thread = self._watchdog_thread, None
        if thread is not None and thread is not concurrency.current_thread():
            thread.join(STOP_TIMEOUT)
        self._queue.close()
        self._run.close()

    def _run_watchdog(self) -> None:
        """One turn of torch's thread."""
        try:
            self._turn()
        except ClientClosed as error:  # which ends the server, perhaps unintentionally
            if not self._stop_signaled:
                log.error("no worker is reaped any longer: %s; start another timer server", error)
            self._stop_signaled = True
        except EtcdError as error:
            self._problem.say(f"timers cannot be watched for now, and no worker is reaped: {error}")
            self._stopping.wait(TIMER_RETRY_PAUSE)

    def _turn(self) -> None:
        count, began = max(1, self._queue.size()), self._clock()
        wait = min([self._max_interval, *(one.due - began for one in self._book.values() if one.due > began)])
        requests = self._queue.get(count, wait)
        late = self._clock() - began - wait
        if late > LATE_AFTER:
            log.info("the timer server was not run for %.1f s: all timers get as much more time", late)
            self._book = {key: entry._replace(due=entry.due + late) for key, entry in self._book.items()}
        if requests:
            self._problem.forget()
        self.register_timers(requests)
        metrics.TIMERS.set(len(self._book))
        expired = self.get_expired_timers(concurrency.wall())
        self._announced &= expired.keys()
        for worker in expired if self._clock() >= self._reaps_at else ():
            if self._stop_signaled:
                return
            if self._reap_worker_no_throw(worker):
                self.clear_timers({worker})
            else:
                self._reaps_at = self._clock() + TIMER_RETRY_PAUSE

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


# -- under torchrun ---------------------------------------------------------------------------------------------------


def serve_timers(
    prefix: str, etcd: SharedClient, expiring: Callable[[TimerInfo], object], is_embedded: bool, *, mark: str
) -> Callable[[], None]:
    """Start a timer server for the workers with this agent's `mark`, and let workers started from now on find the run;
    returns the function that ends both. `expiring`: see EtcdTimerServer.

    They find it in this process's environment, which torch's agent copies when it starts them: torch gives a handler no
    other way to reach them. So a process can serve only one run with timers.
    """
    server = EtcdTimerServer(Namespace(prefix, etcd), expiring=expiring, mark=mark)
    server.start()
    os.environ[VARIABLE] = describe(prefix, etcd.config, with_password=is_embedded)

    def end() -> None:
        os.environ.pop(VARIABLE, None)
        server.stop()

    return end
