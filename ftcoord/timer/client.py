"""The worker's side of expiration timers."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

from torch.distributed.elastic.timer import TimerClient

from ftcoord import concurrency
from ftcoord.config import MAX_SECONDS, EtcdConfig, whole
from ftcoord.core.layout import KEY_PREFIX, timers_key
from ftcoord.core.timers import LONGEST_SCOPE, MOST_TIMERS, HeldTimers, Timer, encode
from ftcoord.errors import ClientClosed, ConfigError, ThreadFailed
from ftcoord.escaping import redacted
from ftcoord.etcd.api import Etcd
from ftcoord.etcd.client import Namespace
from ftcoord.primitives.leased_key import LeasedKey
from ftcoord.timer.agent import inherited
from ftcoord.timer.ledger import Ledger, host_id, this_process

ACQUIRE_TIMEOUT: Final = 1.0
"""Seconds that `acquire` waits for etcd by default."""
TIMERS_END_TIMEOUT: Final = 1.0
"""Seconds that etcd may take to revoke the lease."""
_ttl = whole(2, 3600, " (seconds); etcd on default settings grants no lease shorter than 2 s")


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
        self._timeout, ttl = _acquire_timeout(timeout), _ttl("ttl", ttl)
        if run is None and etcd is not None:
            raise ConfigError("run", None, "name the run too, where you name its etcd")
        host = host_id()
        with ExitStack() as undo:
            place = inherited() if run is None else Namespace.open(run, etcd, key_prefix)
            undo.callback(place.close)
            self._ledger = Ledger(place.prefix)
            undo.callback(self._ledger.close)
            self._worker, prefix = this_process(self._ledger.fd), place.prefix
            self._key = LeasedKey(
                place.etcd, ttl, lambda lease: timers_key(prefix, host, lease), "timers", deaths=prefix
            )
            undo.pop_all()
        # Guards the next two, and keeps the order of the ledger's entries and of what is to be written. Reentrant: a
        # signal handler may use timers in the middle of a call.
        self._lock = concurrency.rlock("EtcdTimerClient._lock")
        self._held: dict[str, Timer] = {}
        self._closed = False
        self._place = place  # never changes
        self._cancel_finalizer = concurrency.when_forgotten(self, _end, self._ledger, self._key, place)

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
            with contextlib.suppress(ClientClosed, ThreadFailed):  # logged: training goes on without timers
                self._key.wait(self._timeout)

    def release(self, scope_id: str) -> None:
        """End the timer of `scope_id`, if there is one. Does not wait for etcd. Raises ForkedProcessError."""
        self._key.check_process()
        with self._lock:
            if (timer := self._held.pop(scope_id, None)) is not None:
                self._ledger.note(timer.slot, 0)
                self._record()

    def close(self) -> None:
        """Release all timers, and give up the lease. Idempotent; does nothing in a forked child.

        Happens automatically when the process ends, or when nobody refers to the client. Takes a few seconds if etcd is
        unreachable.
        """
        if os.getpid() != self._worker.pid:
            return
        self._cancel_finalizer()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._held.clear()
        _end(self._ledger, self._key, self._place)

    def _record(self) -> None:
        """With the lock held."""
        self._key.put(encode(HeldTimers(self._worker, tuple(self._held.values()))))

    def _free_slot(self) -> int:
        if len(self._held) >= MOST_TIMERS:
            allowed = f"a process holds {MOST_TIMERS} timers at the most: release some first"
            raise ConfigError("scope_id", "<text>", allowed)
        taken = {timer.slot for timer in self._held.values()}
        return next(slot for slot in range(MOST_TIMERS) if slot not in taken)


def _end(ledger: Ledger, key: LeasedKey, place: Namespace) -> None:
    ledger.close()  # first: this releases all timers
    key.close(TIMERS_END_TIMEOUT)
    place.close()


def _ms(seconds: float) -> int:
    return math.ceil(seconds * 1000)


def _from_now(expiration_time: object) -> float:
    """Seconds from now until a time of the wall clock."""
    if isinstance(expiration_time, bool) or not isinstance(expiration_time, (int, float)):
        raise TypeError(f"expiration_time is a number of seconds, not {type(expiration_time).__name__}")
    if not math.isfinite(expiration_time):
        raise ConfigError("expiration_time", expiration_time, "give a time such as time.time() + 60")
    after = max(expiration_time - concurrency.wall(), 0.0)
    if after > MAX_SECONDS:
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
