"""The worker's side of expiration timers."""

from __future__ import annotations

import contextlib
import functools
import heapq
import logging
import math
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch.distributed.elastic.timer import TimerClient

from ftcoord import concurrency
from ftcoord.config import MAX_SECONDS, EtcdConfig, whole
from ftcoord.core.layout import KEY_PREFIX, timer_key
from ftcoord.core.timer_records import LONGEST_TTL, RELEASED, SLOTS, Timer, Worker, encode
from ftcoord.errors import ClientClosed, ConfigError, ThreadFailed
from ftcoord.escaping import redacted
from ftcoord.etcd.api import Etcd
from ftcoord.etcd.namespace import Namespace
from ftcoord.log_once import LogOnce
from ftcoord.primitives.leased_keys import LeasedKeys, Render
from ftcoord.timer.environment import inherited
from ftcoord.timer.ledger import Ledger
from ftcoord.timer.process import host_id, this_process

log = logging.getLogger(__name__)

ACQUIRE_TIMEOUT: Final = 1.0
"""Seconds that `acquire` waits for etcd by default."""
LONGEST_SCOPE: Final = 1024
"""Characters of a scope's name that are recorded: the last ones, where torch puts the line number."""

_ttl = whole(2, LONGEST_TTL, " (seconds); etcd on default settings grants no lease shorter than 2 s")


@dataclass(frozen=True, slots=True)
class _Held:
    """A timer that this process holds. Times are on its monotonic clock."""

    worker: Worker
    scope: str
    slot: int
    token: int
    after: float
    until: float

    def render(self) -> bytes:
        """Its record, as of now."""
        now = concurrency.now()
        return encode(
            Timer(
                worker=self.worker,
                scope=self.scope[-LONGEST_SCOPE:],
                after_ms=_ms(self.after),
                left_ms=_ms(max(self.until - now, 0)),
                at_ms=_ms(now),
                wall_ms=_ms(concurrency.wall()),
                slot=self.slot,
                token=self.token,
            )
        )


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

    Promised: `release` wins if it began before the timer expired, even if etcd does not know yet. Each call costs one
    write. If etcd is unreachable or refuses, neither call raises: `acquire` waits for `timeout` once, and then neither
    call waits until etcd is back. Timers that are still held then are recorded.

    Not promised: that a stuck worker is reaped while it cannot reach etcd. Nor is it reaped after its etcd client was
    closed, or its thread failed with an unexpected error; both are logged as errors.

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
        self._timeout = _acquire_timeout(timeout)
        ttl = _ttl("ttl", ttl)
        if run is None and etcd is not None:
            raise ConfigError("run", None, "name the run too, where you name its etcd")
        host_id()
        self._held: dict[str, int] = {}  # slots, by scope; guarded by _lock, as all below
        self._free: list[int] = []  # a heap of slots below the highest one in use
        with contextlib.ExitStack() as undo:
            run_ = inherited() if run is None else Namespace.open(run, etcd, key_prefix)
            undo.callback(run_.close)
            self._ledger = Ledger()
            undo.callback(self._ledger.close)
            self._worker = worker = this_process(self._ledger.fd, ttl)
            prefix = run_.prefix
            self._keys = LeasedKeys(
                run_.etcd, ttl, lambda slot, lease: timer_key(prefix, worker.host, lease, slot), "timers", prefix
            )
            undo.pop_all()
        self._end = functools.partial(_end, self._ledger, self._held, self._keys, run_, max(self._timeout, 0.1))
        # Also guards the order of the ledger's entries and the keys' writes. Reentrant: a signal handler may use timers
        # in the middle of a call.
        self._lock = concurrency.rlock("EtcdTimerClient._lock")
        self._wall_ahead = concurrency.wall() - concurrency.now()  # of the last call
        self._closed = False
        self._problem = LogOnce(log)
        self._cancel_finalizer = concurrency.when_forgotten(self, self._end)

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Have this process reaped unless `scope_id` is released before `expiration_time`.

        Waits up to the client's `timeout` for etcd, once per outage.

        Args:
            scope_id: the scope's name.
            expiration_time: an absolute time in seconds, as `time.time()` of this host gives it. It is converted to a
                duration from now at once, so later changes of the wall clock do not matter.

        Raises:
            ConfigError: an empty name, a time too far away, or too many timers at once.
            TypeError: an argument of another type.
            ClientClosed: after `close()`.
            ForkedProcessError: in a forked child.
        """
        self._keys.check_process()
        scope, after = _scope(scope_id), self._from_now(expiration_time)
        with self._lock:
            if self._closed:
                raise ClientClosed("these timers were closed: make new ones, with a new EtcdTimerClient")
            slot = self._held.get(scope)
            if slot is None:
                slot = self._held[scope] = self._free_slot()
            token = secrets.randbits(62) + 1
            held = _Held(self._worker, scope, slot, token, after, concurrency.now() + after)
            self._ledger.hold(slot, token)
            recorded = self._record(slot, held.render)
        if self._timeout and recorded:
            with contextlib.suppress(ClientClosed, ThreadFailed):  # the next `_record` says it
                self._keys.wait(str(slot), self._timeout)

    def release(self, scope_id: str) -> None:
        """End the timer of `scope_id`, if there is one. Does not wait for etcd. Raises ForkedProcessError."""
        self._keys.check_process()
        with self._lock:
            slot = self._held.pop(scope_id, None)
            if slot is not None:
                self._ledger.release(slot)
                heapq.heappush(self._free, slot)
                self._record(slot, _released)

    def _record(self, slot: int, render: Render) -> bool:
        """With the lock held: queue the write to etcd; returns whether it will be made. Raises ClientClosed after
        `close()`."""
        try:
            self._keys.put(str(slot), render)
        except (ClientClosed, ThreadFailed) as error:
            if self._closed:
                raise
            self._problem.say(f"timers of this process are not recorded, and nobody guards it: {error}", logging.ERROR)
            return False
        return True

    def close(self) -> None:
        """Release all timers, and give up the lease. Idempotent; does nothing in a forked child.

        Happens automatically when the process ends, or when nobody refers to the client. Takes at most twice `timeout`
        if etcd is unreachable.
        """
        if os.getpid() != self._worker.pid:
            return
        self._cancel_finalizer()
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._end()  # without the lock: it waits for etcd

    def _free_slot(self) -> int:
        """The lowest free slot, so that there are only as many slots as timers at once."""
        slot = heapq.heappop(self._free) if self._free else len(self._held)
        if slot >= SLOTS:
            raise ConfigError("scope_id", "<text>", f"a process holds {SLOTS} timers at the most: release some first")
        return slot

    def _from_now(self, expiration_time: float) -> float:
        """Seconds from now. torch has just added them to the wall clock, which may have been set since."""
        if isinstance(expiration_time, bool) or not isinstance(expiration_time, (int, float)):
            raise TypeError(f"expiration_time is a number of seconds, not {type(expiration_time).__name__}")
        if not math.isfinite(expiration_time):
            raise ConfigError("expiration_time", expiration_time, "give a time such as time.time() + 60")
        wall, monotonic = concurrency.wall(), concurrency.now()
        with self._lock:
            before, self._wall_ahead = self._wall_ahead, wall - monotonic
        after = expiration_time - wall
        if after <= 0:  # the past: or the clock was set forward in between
            after = max(expiration_time - monotonic - before, 0.0)
        if after > MAX_SECONDS:
            raise ConfigError("expiration_time", expiration_time, f"give a time within {MAX_SECONDS:g} s from now")
        return after


def _end(ledger: Ledger, held: dict[str, int], keys: LeasedKeys, run: Namespace, timeout: float) -> None:
    """Release all timers locally at once, then in etcd."""
    for slot in held.values():
        ledger.release(slot)
    held.clear()
    if keys.close(timeout):
        ledger.close()
    run.close()


def _released() -> bytes:
    return RELEASED


def _ms(seconds: float) -> int:
    return math.ceil(seconds * 1000)


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
