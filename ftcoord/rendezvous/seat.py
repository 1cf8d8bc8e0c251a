"""What a node says of its seat while its workers run: that it holds it through another lease (R9 in `core.rendezvous`),
or that a worker failed (R3)."""

from __future__ import annotations

import logging

from ftcoord import concurrency
from ftcoord.core.rendezvous_records import AnyRound, JoinRequest
from ftcoord.errors import EtcdError, StateError
from ftcoord.primitives.group.participant import Left, Participant

log = logging.getLogger(__name__)


class SeatHolder:
    """Says so for one node, each time on a thread of its own. Thread-safe.

    Args:
        participant: the node's.
        timeout: seconds that one try may take.
    """

    def __init__(self, participant: Participant[AnyRound, JoinRequest], timeout: float) -> None:
        self._participant, self._timeout = participant, timeout
        self._lock = concurrency.lock("SeatHolder._lock")  # guards what follows; never held while it waits
        self._thread: concurrency.Thread | None = None
        self._cancelled = concurrency.event()
        self._has_seat = False

    def allow(self) -> None:
        """The node has a seat from now on."""
        with self._lock:
            self._has_seat = True

    def begin(self, ask: JoinRequest) -> None:
        """Write this ask, through another lease if the last one is lost, unless a try is under way, or the node has
        ended its round.

        Raises ThreadNotStarted.
        """
        with self._lock:
            if not self._has_seat or (self._thread is not None and self._thread.is_alive()):
                return
            self._cancelled = concurrency.event()
            thread = concurrency.thread(self._say, "ftcoord-seat", ask, self._cancelled)
            thread.start()
            self._thread = thread

    def end(self) -> None:
        """Say no more: whatever the node asks next must not be overwritten. Waits for an attempt under way."""
        with self._lock:
            self._has_seat = False
            self._cancelled.set()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _say(self, ask: JoinRequest, cancelled: concurrency.Event) -> None:
        try:
            self._participant.say(ask, concurrency.now() + self._timeout, cancelled)
        except (EtcdError, StateError, TimeoutError, Left) as error:  # the next look at the lease tries again
            log.debug("of the seat in round %d nothing was said: %s", ask.seated, error)
            return
        if not ask.failed:
            log.warning(
                "this node lost its lease, as happens when etcd is away for long; it is in round %d again under another"
                " one, and its workers run on unless the others went on without it",
                ask.seated,
            )
