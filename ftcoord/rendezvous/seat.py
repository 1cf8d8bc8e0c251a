"""What a node writes about its seat while its workers run: that it holds the seat under another lease (R9 in
`core.rendezvous`), or that a worker failed (R3)."""

from __future__ import annotations

import logging
import sys
from typing import Final

from ftcoord import concurrency
from ftcoord.core.rendezvous_records import AnyRound, JoinRequest
from ftcoord.errors import ClientClosed, EtcdError, StateError, ThreadFailed, ThreadNotStarted
from ftcoord.primitives.group.membership import Left
from ftcoord.primitives.group.participant import Participant

log = logging.getLogger(__name__)

SAY_RETRY_PAUSE: Final = 0.5
"""Seconds until a failed write is tried again."""


class SeatHolder:
    """Writes it for one node, on its own thread, until etcd has taken it or the node asks for something else.
    Thread-safe.

    Args:
        participant: the node's participant.
        timeout: seconds that one attempt may take.
    """

    def __init__(self, participant: Participant[AnyRound, JoinRequest], timeout: float) -> None:
        self._participant, self._timeout = participant, timeout
        self._lock = concurrency.lock("SeatHolder._lock")  # guards what follows; never held while it waits
        self._thread: concurrency.Thread | None = None
        """The thread that has something to write."""
        self._cancelled = concurrency.event()
        self._has_seat = False
        self._ask: JoinRequest | None = None
        """What to write about this seat; without a thread, what was written last."""
        self._failure: BaseException | None = None

    @property
    def failure(self) -> ThreadFailed | None:
        """The unexpected error that ended a thread of this seat."""
        failure = self._failure
        return None if failure is None else ThreadFailed("says that this node holds its seat", failure)

    def allow(self) -> None:
        """The node has a seat from now on."""
        with self._lock:
            self._has_seat, self._ask, self._failure = True, None, None

    def begin(self, ask: JoinRequest) -> None:
        """Write this ask, under another lease if the last one is lost, unless the node has ended its round.

        A worker's failure is written again with each later ask, whatever that is for, because the others must learn of
        it.

        Raises ThreadNotStarted.
        """
        with self._lock:
            if not self._has_seat:
                return
            if self._ask is None or not self._ask.failed:
                self._ask = ask
            if self._thread is not None:
                return  # which says it next
            self._cancelled = concurrency.event()
            thread = concurrency.thread(self._run, "ftcoord-seat", self._cancelled)
            thread.start()
            self._thread = thread

    def end(self) -> None:
        """Stop writing: the node's next request must not be overwritten. Waits for an attempt in progress."""
        with self._lock:
            self._has_seat = False
            self._cancelled.set()
            thread, self._thread = self._thread, None
        if thread is not None:
            concurrency.join(thread)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self, cancelled: concurrency.Event) -> None:
        said: JoinRequest | None = None
        try:
            while not cancelled.is_set() and (ask := self._next(said)) is not None:
                said = ask if self._say(ask, cancelled) else None
        except (Left, ClientClosed):  # the node was stopped
            self._end_thread()
        finally:
            failure = sys.exc_info()[1]
            if failure is not None:
                log.exception("nobody says of this node's seat what has changed: the thread failed")
                self._end_thread(failure)

    def _next(self, said: JoinRequest | None) -> JoinRequest | None:
        """What to write next. None if it was just written: the thread has then ended for `begin`.

        Not None if the lease that it was written under is already lost: `begin` was called for that while this thread
        was busy.
        """
        with self._lock:
            if self._ask != said or not self._participant.joined:
                return self._ask
            self._thread = None
            return None

    def _end_thread(self, failure: BaseException | None = None) -> None:
        with self._lock:
            if self._thread is concurrency.current_thread():
                self._thread, self._failure = None, failure

    def _say(self, ask: JoinRequest, cancelled: concurrency.Event) -> bool:
        """Whether etcd has taken it. Raises Left, ClientClosed."""
        try:
            self._participant.say(ask, concurrency.now() + self._timeout, cancelled)
        except ClientClosed:
            raise
        except (EtcdError, StateError, ThreadNotStarted, TimeoutError) as error:
            log.debug("of the seat in round %d nothing was said: %s", ask.seated, error)
            cancelled.wait(SAY_RETRY_PAUSE)
            return False
        if not ask.failed:
            log.warning(
                "this node lost its lease, as happens when etcd is away for long; it is in round %d again under another"
                " one, and its workers run on unless the others went on without it",
                ask.seated,
            )
        return True
