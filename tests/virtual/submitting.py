"""Transactions of a `MemoryClient` for which nobody waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from ftcoord import concurrency
from ftcoord.errors import EtcdError
from ftcoord.etcd.api import TxnResult
from virtual.keyspace import Transaction

LAST_ATTEMPT: Final = 0.05
"""Seconds that a transaction gets though those before it took all its time."""

CLOSE_TIMEOUT: Final = 2.0
"""Seconds that `close()` waits for the thread: in a scheduler, its process may be paused."""


class _Submitted(NamedTuple):
    asked: Transaction
    deadline: float
    done: Callable[[TxnResult | EtcdError], None]


class Submitter:
    """Makes one on its caller's thread, and those that come meanwhile on a thread of its own, as the real client does.

    Args:
        send: makes a transaction in so many seconds. Raises EtcdError.
    """

    def __init__(self, send: Callable[[Transaction, float | None], TxnResult]) -> None:
        self._send = send
        self._lock = concurrency.lock("Submitter._lock")
        self._queue = concurrency.inbox()
        self._under_way = 0  # guarded by _lock, as all below
        self._closed = False
        self._thread: concurrency.Thread | None = None

    def submit(self, asked: Transaction, done: Callable[[TxnResult | EtcdError], None], timeout: float) -> None:
        """See `ftcoord.etcd.api.Etcd.submit`."""
        entry = _Submitted(asked, concurrency.now() + timeout, done)
        with self._lock:
            here = self._under_way == 0 or self._closed
            self._under_way += 1
            if not here:
                self._start()
                self._queue.put(entry)
        if here:
            self._carry(entry)

    def close(self) -> None:
        """End the thread, after what is queued: `send` must fail by now. Idempotent."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            if thread is not concurrency.current_thread():
                thread.join(CLOSE_TIMEOUT)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = concurrency.thread(self._run, "ftcoord-writes")
            self._thread.start()

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            self._carry(entry)

    def _carry(self, entry: _Submitted) -> None:
        result: TxnResult | EtcdError
        try:
            result = self._send(entry.asked, max(entry.deadline - concurrency.now(), LAST_ATTEMPT))
        except EtcdError as error:
            result = error
        with self._lock:
            self._under_way -= 1
        entry.done(result)
