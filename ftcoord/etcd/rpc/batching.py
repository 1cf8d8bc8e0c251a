"""Group commit: transactions that one client makes at the same time share one request.

While a request is in flight, further transactions queue. When it is answered they go together, each nested in one etcd
transaction (https://etcd.io/docs/v3.5/learning/api/#transaction). If several came together the last time, the first one
waits up to `LINGER` for as many, as commits in databases wait for their siblings. A transaction that comes alone does
not wait.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from ftcoord import concurrency
from ftcoord.errors import ClientClosed, EtcdError, EtcdUnavailable, OutcomeUnknown, ThreadNotStarted
from ftcoord.etcd.rpc import messages

log = logging.getLogger(__name__)

BATCH_SIZE: Final = 32
"""Transactions per request. etcd takes 128 operations, and counts the nested transactions too."""
BATCH_BYTES: Final = 512 * 1024
"""Bytes of a request with more than one transaction. etcd takes 1.5 MiB."""
SHORTEST_WRITE_CALL: Final = 0.05
"""The fewest seconds for a request, even if less is left: with none, it could not be answered at all."""
LINGER: Final = 0.005
"""Seconds that the first transaction waits for as many as came the last time."""
BATCHER_CLOSE_TIMEOUT: Final = 2.0
"""Seconds that `close()` waits for the thread."""

_INTERRUPTED: Final = "the thread that sent this transaction was interrupted: read again before you repeat it"

Done: TypeAlias = Callable[[Any, int, "EtcdError | None"], None]
"""Called with the answer (a TxnResponse) and its revision, or with the error."""


@dataclass(frozen=True, slots=True)
class _Entry:
    request: Any
    deadline: float
    done: Done


class Batcher:
    """The transactions of one client that may share requests. Thread-safe.

    A caller that finds no sender becomes the sender (`_busy`): it sends its own transaction, and hands the queue to the
    thread. If the thread fails with an unexpected error, each transaction of the failed request ends with
    OutcomeUnknown, and another thread continues with the queue.

    Args:
        send: makes one request, within so many seconds. Raises EtcdError.
    """

    def __init__(self, send: Callable[[Any, float], Any]) -> None:
        self._send = send  # never changes
        # Guards the next paragraph. Never held during a request or a callback.
        self._lock = concurrency.lock("Batcher._lock")
        self._queue: deque[_Entry] = deque()
        self._busy = False  # whether somebody sends, or lingers
        self._closed = False
        self._came, self._expected = 0, 1  # transactions of this burst, and of the last one
        self._thread: concurrency.Thread | None = None
        self._all_here = concurrency.event()  # as many came as were expected: the thread need not linger
        self._wake: concurrency.Queue[float | None] = concurrency.inbox()  # seconds to linger; None ends the thread

    def submit(self, request: Any, timeout: float, done: Done) -> None:
        """Make a transaction that writes.

        `done` is called once, on this thread before this returns or on the batcher's, and must not block. It gets
        EtcdUnavailable if the transaction could not be sent within `timeout` seconds (perhaps a little later, when the
        previous request has ended), OutcomeUnknown if it was not answered, or etcd's error. If etcd refuses a batch,
        each transaction is sent alone, so none gets an error that another one caused.
        """
        entry, linger, leads = _Entry(request, concurrency.now() + timeout, done), False, False
        try:
            with self._lock:
                self._came = self._came + 1 if self._busy else 1
                if self._came == self._expected:
                    self._all_here.set()
                if not self._busy:
                    linger, leads = self._expected > 1, True
                    self._all_here.clear()
                if self._busy or linger:
                    self._queue.append(entry)
                self._busy = True
            if leads and not linger:
                self._send_batch([entry])
        finally:
            if leads:
                self._hand_over(LINGER if linger else 0)

    def close(self) -> None:
        """End the thread; `send` must fail from now on. Idempotent."""
        with self._lock:
            thread, self._thread, self._closed = self._thread, None, True
        if thread is not None:
            self._wake.put(None)
            if thread is not concurrency.current_thread():
                thread.join(BATCHER_CLOSE_TIMEOUT)

    def _hand_over(self, linger: float) -> None:
        """Have the queue sent, by the thread if there can be one: callers do not wait for it."""
        with self._lock:
            if not self._queue:
                self._rest()
                return
            if self._thread is None and not self._closed:
                self._thread = self._start()
            if self._thread is not None:
                self._wake.put(linger)
                return
        self._send_all()

    def _start(self) -> concurrency.Thread | None:
        thread = concurrency.thread(self._run, "ftcoord-writes")
        try:
            thread.start()
        except ThreadNotStarted as error:
            log.warning("those who write wait for their writes: %s", error)
            return None
        return thread

    def _rest(self) -> None:
        self._busy, self._expected = False, self._came

    def _run(self) -> None:
        try:
            while (linger := self._wake.get()) is not None:
                if linger:
                    self._all_here.wait(linger)
                self._send_all()
        finally:  # after an error that nobody foresaw, another thread goes on
            with self._lock:
                if self._thread is concurrency.current_thread():
                    self._thread = None
            self._hand_over(0)

    def _send_all(self) -> None:
        while batch := self._take():
            self._send_batch(batch)

    def _take(self) -> list[_Entry]:
        """The next batch; empty if nothing is queued: then there is no sender any more."""
        batch: list[_Entry] = []
        size = 0
        with self._lock:
            while self._queue and len(batch) < BATCH_SIZE:
                size += self._queue[0].request.ByteSize()
                if batch and size > BATCH_BYTES:
                    break
                batch.append(self._queue.popleft())
            if not batch:
                self._rest()
        return batch

    def _send_batch(self, batch: Sequence[_Entry]) -> None:
        now = concurrency.now()
        untold = deque(entry for entry in batch if entry.deadline > now)
        for entry in batch:
            if entry.deadline <= now:
                late = EtcdUnavailable(
                    "etcd did not answer earlier writes in time, and this one was not sent: try again"
                )
                entry.done(None, 0, late)
        if len(untold) < 2:
            for entry in untold:
                self._send_alone(entry)
            return
        error: EtcdError = OutcomeUnknown(_INTERRUPTED)
        try:
            response = self._send(_nested(untold), max(map(_left, untold)))
            for nested in response.responses:
                untold.popleft().done(nested.response_txn, response.header.revision, None)
        except (ClientClosed, EtcdUnavailable, OutcomeUnknown) as failure:  # each alone would fare no better
            error = failure
        except EtcdError as failure:
            log.debug("etcd refused a batch, so each transaction goes alone: %s", failure)
            while untold:
                self._send_alone(untold.popleft())
        finally:
            for entry in untold:
                entry.done(None, 0, error)

    def _send_alone(self, entry: _Entry) -> None:
        error: EtcdError = OutcomeUnknown(_INTERRUPTED)
        answer, revision = None, 0
        try:
            answer = self._send(entry.request, _left(entry))
            revision = answer.header.revision
        except EtcdError as failure:
            error = failure
        finally:
            entry.done(answer, revision, None if answer is not None else error)


def _nested(batch: Iterable[_Entry]) -> Any:
    request = messages.message("TxnRequest")()
    for entry in batch:
        request.success.add().request_txn.CopyFrom(entry.request)
    return request


def _left(entry: _Entry) -> float:
    return max(entry.deadline - concurrency.now(), SHORTEST_WRITE_CALL)
