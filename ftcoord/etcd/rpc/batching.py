"""A group commit: transactions that one client makes at the same time travel in one request.

While a request is under way, others wait; when it is answered, all that wait go together, each nested whole in one
transaction of etcd's (https://etcd.io/docs/v3.5/learning/api/#transaction). Where several came at once the last time,
the first waits for as many, a little, as databases have commits wait for their siblings; one that comes alone does not.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from ftcoord import concurrency
from ftcoord.errors import ClientClosed, EtcdError, EtcdUnavailable, OutcomeUnknown
from ftcoord.etcd.rpc import messages

log = logging.getLogger(__name__)

LIMIT: Final = 32
"""Transactions in one request: etcd takes 128 operations, of which it counts those that stand around others too."""
BYTES: Final = 512 * 1024
"""Of one request, in which more than one travel: etcd takes 1.5 MiB."""
LINGER: Final = 0.005
"""Seconds that the first waits, at the most, for those that came along the last time."""
PATIENCE: Final = 2.0
"""Seconds that `close()` waits for the thread."""

Done: TypeAlias = Callable[[Any, int, "EtcdError | None"], None]
"""Told of the answer (a TxnResponse) and its revision, or of what went wrong."""


@dataclass(frozen=True, slots=True)
class _Entry:
    request: Any
    deadline: float
    done: Done


class Batcher:
    """The transactions of one client that may share requests. Thread-safe.

    Args:
        send: makes one request, in so many seconds. Raises EtcdError.
    """

    def __init__(self, send: Callable[[Any, float], Any]) -> None:
        self._send = send
        self._lock = concurrency.lock("Batcher._lock")
        self._queue: deque[_Entry] = deque()
        self._busy = self._closed = False
        self._came, self._expected = 0, 1
        self._all_here = concurrency.event()
        self._wake: concurrency.Queue[float | None] = concurrency.inbox()
        self._thread: concurrency.Thread | None = None

    def submit(self, request: Any, timeout: float, done: Done) -> None:
        """Make a transaction that writes.

        `done` is called once, on this thread before this returns or on ours, and must not block. It is told
        EtcdUnavailable when the transaction could not be sent in `timeout` seconds (perhaps a little later, when the
        request before it has ended), OutcomeUnknown when it was not answered, and what etcd says of it; another one's
        fault is not told: then each goes alone.
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
                self._carry([entry])
        finally:
            if leads:
                self._hand_over(LINGER if linger else 0)

    def close(self) -> None:
        """Have the thread end; `send` must fail by now. Idempotent."""
        with self._lock:
            thread, self._thread, self._closed = self._thread, None, True
        if thread is not None:
            self._wake.put(None)
            if thread is not concurrency.current_thread():
                thread.join(PATIENCE)

    def _hand_over(self, linger: float) -> None:
        """Have what is queued carried, on the thread: its callers have something else to wait for."""
        with self._lock:
            if not self._queue:
                self._rest()
                return
            if self._thread is None and not self._closed:
                self._thread = self._start()
            if self._thread is not None:
                self._wake.put(linger)
                return
        self._carry_all()

    def _start(self) -> concurrency.Thread | None:
        thread = concurrency.thread(self._run, "ftcoord-writes")
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("writes hold up those who make them, for there is no thread for them: %s", error)
            return None
        return thread

    def _rest(self) -> None:
        self._busy, self._expected = False, self._came

    def _run(self) -> None:
        try:
            while (linger := self._wake.get()) is not None:
                if linger:
                    self._all_here.wait(linger)
                self._carry_all()
        finally:  # after an error of ours another thread goes on
            with self._lock:
                if self._thread is concurrency.current_thread():
                    self._thread = None
            self._hand_over(0)

    def _carry_all(self) -> None:
        while batch := self._take():
            self._carry(batch)

    def _take(self) -> list[_Entry]:
        """Who goes now; nobody, if nobody waits."""
        batch: list[_Entry] = []
        size = 0
        with self._lock:
            while self._queue and len(batch) < LIMIT:
                size += self._queue[0].request.ByteSize()
                if batch and size > BYTES:
                    break
                batch.append(self._queue.popleft())
            if not batch:
                self._rest()
        return batch

    def _carry(self, batch: Sequence[_Entry]) -> None:
        now = concurrency.now()
        untold = deque(entry for entry in batch if entry.deadline > now)
        for entry in batch:
            if entry.deadline <= now:
                late = EtcdUnavailable("etcd did not answer those before in time; this transaction was not sent")
                entry.done(None, 0, late)
        if len(untold) < 2:
            for entry in untold:
                self._carry_alone(entry)
            return
        error: EtcdError = OutcomeUnknown("whoever sent a transaction was interrupted")
        try:
            response = self._send(_nested(untold), max(map(_left, untold)))
            for nested in response.responses:
                untold.popleft().done(nested.response_txn, response.header.revision, None)
        except (ClientClosed, EtcdUnavailable, OutcomeUnknown) as failure:  # each alone would fare no better
            error = failure
        except EtcdError as failure:
            log.debug("etcd refused transactions that went together, now each goes alone: %s", failure)
            while untold:
                self._carry_alone(untold.popleft())
        finally:
            for entry in untold:
                entry.done(None, 0, error)

    def _carry_alone(self, entry: _Entry) -> None:
        error: EtcdError = OutcomeUnknown("whoever sent a transaction was interrupted")
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
    return max(entry.deadline - concurrency.now(), 0.05)
