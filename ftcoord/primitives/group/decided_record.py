"""The decided record as one member knows it, and the history: events beside a decision, in the same transaction and
under the lease of the record.

Nothing depends on the history. If etcd refuses a decision with its events (space, size, permission), it is made
without.
"""

from __future__ import annotations

import itertools
import logging
import uuid
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from ftcoord import concurrency
from ftcoord.core.history import HistoryEvent, encode
from ftcoord.core.layout import Span, decided_key, event_key, events_span, is_event_key, record_span
from ftcoord.core.verdict import Publish
from ftcoord.errors import ClientClosed, EtcdError, StateError
from ftcoord.etcd.api import Compare, Delete, Etcd, Get, KeyValue, Lease, Op, Put
from ftcoord.etcd.retry import UNANSWERED
from ftcoord.log_once import LogOnce
from ftcoord.primitives.mirror import Mirror, Posted
from ftcoord.primitives.session import KeptLease
from ftcoord.primitives.write_once import WriteOutcome, write_once

log = logging.getLogger(__name__)

Listener: TypeAlias = Callable[[KeyValue | None], None]
MOST_OPERATIONS: Final = 128
"""Operations per transaction: etcd's default limit (`--max-txn-ops`)."""
MOST_BYTES: Final = 1 << 20
"""Bytes of the keys and values of one transaction: etcd takes 1.5 MiB (`--max-request-bytes`)."""


_NOTHING: Final = object()
"""What the listener received before it was called."""


class DecidedRecord:
    """A mirror of `decided`, its listener's view of it, and the lease that the decider keeps for it.

    Only for the group's thread, once that runs.

    Args:
        etcd: the etcd client.
        prefix: the group's prefix.
        ttl: seconds that the record outlives the last decider.
        post: takes what the mirror's watch delivers; see `Mirror`.
        listener: called with the first value and each new one, None where there is none. Raises StateError when it
            cannot read it.
        writer: the name of this member, in the keys of events.
    """

    def __init__(
        self,
        etcd: Etcd,
        prefix: str,
        ttl: int,
        post: Callable[[Mirror, Posted], None],
        listener: Listener,
        *,
        writer: str,
    ) -> None:
        self._etcd, self._prefix, self._ttl = etcd, prefix, ttl  # never change
        self._events = EventLog(etcd, prefix, writer)
        self.mirror = Mirror(etcd, record_span(prefix), post)
        """Of the office too: one watch, and one read, deliver both."""
        self._kept: KeptLease | None = None
        """The record's lease, while this member decides."""
        self.known: KeyValue | None = None
        """The last value that the listener could read; None while etcd has none."""
        self.known_at = concurrency.now()
        self._listener = listener
        self._told: KeyValue | object | None = _NOTHING
        self._unreadable: StateError | None = None

    @property
    def is_readable(self) -> bool:
        """Whether the key holds no value that nobody may replace."""
        return self._unreadable is None

    def check_readable(self) -> None:
        """Raises StateError while the key holds a value that nobody may replace."""
        if self._unreadable is not None:
            raise self._unreadable

    def tell(self) -> None:
        """Call the listener, if there is something new."""
        kv = self.mirror.one
        if kv == self._told:  # as a whole: an etcd that lost writes gives another record the same revision
            return
        self._told = kv
        try:
            self._listener(kv)
        except StateError as error:
            self._unreadable = error
            return
        self._unreadable = None
        self.known, self.known_at = kv, concurrency.now()

    def keep_lease(self) -> None:
        """Keep the record's lease alive, as its decider, so that the record lives `ttl` seconds longer than its group.
        Costs a request only when it changes. Raises EtcdError, and may then be repeated."""
        lease = self.mirror.one.lease if self.mirror.one else 0
        if self._kept is not None and self._kept.kept and lease in (0, self._kept.id):
            return
        self.drop_lease()
        if lease:
            now = concurrency.now()
            self._kept = KeptLease(self._etcd, Lease(lease, self._etcd.renew(lease)), now)

    def drop_lease(self) -> None:
        """Stop renewing it: another decider does, or it expires. Idempotent."""
        if self._kept is not None:
            self._kept.stop()
            self._kept = None

    def _lease_for_publishing(self) -> int:
        """The lease to attach the next record to; a new one, if there is none. Raises EtcdError."""
        if self._kept is None or not self._kept.kept:
            now = concurrency.now()
            self._kept = KeptLease(self._etcd, self._etcd.grant(self._ttl), now)
        return self._kept.id

    def publish(self, decision: Publish[bytes], guards: Sequence[Compare]) -> bool:
        """Replace the known record, if nobody else did and the guards hold; returns whether that was done. The events
        for the history are written with it, unless etcd does not take them.

        Raises EtcdError; it is then unknown whether it worked, and it may be repeated.
        """
        self.keep_lease()  # a lease of its own would take the record from what lies beside it under the same lease
        lease, current = self._lease_for_publishing(), self.mirror.one
        puts = [Put(key, value, lease) for key, value in decision.puts]
        record = Put(self.mirror.span.start, decision.record, lease)
        also: list[Op] = [*puts, *(Delete(span) for span in decision.deletes)]
        events = self._events.ops(decision.events, lease, self.mirror.revision)
        if not _fits(1 + len(also) + len(events), [record, *puts, *(op for op in events if isinstance(op, Put))]):
            events = []

        def write(more: Sequence[Op]) -> WriteOutcome:
            return write_once(self._etcd, record, current, guards=guards, also=[*also, *more])

        outcome = written_with(events, write, self._prefix)
        self._learn(outcome)
        return outcome.done

    def close(self) -> None:
        """Stop watching, and stop keeping the lease. Idempotent."""
        self.mirror.close()
        self.drop_lease()

    # -- what a transaction found -------------------------------------------------------------------------------

    def _learn(self, outcome: WriteOutcome) -> None:
        """Take over what a transaction wrote, or found. The watch will not repeat it."""
        if not outcome.done or outcome.kv is None:  # what it found is only a part of it
            self.mirror.adopt(self._etcd.range(Get(self.mirror.span)))
            self.tell()
            return
        self.mirror.learn(outcome.kv)
        self.tell()
        if self.mirror.one != outcome.kv:  # etcd has lost what the mirror has: read again
            self.mirror.forget()


def _fits(operations: int, puts: Sequence[Put]) -> bool:
    """Whether etcd takes a transaction of so many operations, with these puts among them."""
    return operations <= MOST_OPERATIONS and sum(len(put.key) + len(put.value) for put in puts) <= MOST_BYTES


# -- the history ------------------------------------------------------------------------------------------------------

_refusals: Final = LogOnce(log)
"""Of any thread: at worst, one of them repeats a line."""

KEPT_EVENTS: Final = 300
"""The most events of one run, or of one job's quorums. The oldest are deleted first."""
READ_TIMEOUT: Final = 1.0
"""Seconds that a read for the history alone may take."""


def event_puts(prefix: str, events: Sequence[HistoryEvent], lease: int, *, revision: int, writer: str) -> list[Put]:
    """The operations that write these events.

    Args:
        prefix: the prefix of the group whose history it is.
        lease: that of the group's record.
        revision: etcd's highest known revision.
        writer: a name that is unique to these events.
    """
    return [Put(event_key(prefix, revision, writer, at), encode(one), lease) for at, one in enumerate(events)]


def written_with(events: Sequence[Op], write: Callable[[Sequence[Op]], WriteOutcome], prefix: str) -> WriteOutcome:
    """Have `write` make its transaction with these operations; once more without them, if etcd refuses it.

    Raises what `write` raises.
    """
    try:
        return write(events)
    except (*UNANSWERED, ClientClosed):
        raise
    except EtcdError as error:
        if not events:
            raise
        refused = error
    outcome = write(())
    _refusals.say(f"etcd takes no history below {prefix}, so the job runs on without one: {refused}")
    return outcome


class EventLog:
    """What one decider adds to a history, and the bound of that. Not thread-safe.

    Args:
        etcd: the etcd client.
        prefix: the group's prefix.
        writer: a unique name, such as a member id.
    """

    def __init__(self, etcd: Etcd, prefix: str, writer: str) -> None:
        self._etcd, self._prefix, self._writer = etcd, prefix, writer  # never change
        self._calls = itertools.count()
        self._keys: list[str] | None = None
        """The known keys of the history, in order; None before the first event."""

    def ops(self, events: Sequence[HistoryEvent], lease: int, revision: int) -> list[Op]:
        """The operations that add these events to a transaction and delete the oldest. The first time costs a read."""
        if not events:
            return []
        if self._keys is None:
            self._keys = self._existing()
        puts = event_puts(self._prefix, events, lease, revision=revision, writer=f"{self._writer}-{next(self._calls)}")
        known = [*self._keys, *(put.key for put in puts)]
        self._keys = known[-KEPT_EVENTS:]
        too_many = len(known) > KEPT_EVENTS
        return [*puts, Delete(Span(events_span(self._prefix).start, stop=self._keys[0]))] if too_many else [*puts]

    def _existing(self) -> list[str]:
        get = Get(events_span(self._prefix), limit=2 * KEPT_EVENTS, keys_only=True, order="newest")
        try:
            found = self._etcd.range(get, timeout=READ_TIMEOUT).kvs
        except EtcdError as error:
            log.debug("the history below %s cannot be read: %s", self._prefix, error)
            return []
        return sorted(kv.key for kv in found if is_event_key(kv.key))


def ordered(etcd: Etcd, prefix: str, what: str, *, target: str, by: str) -> list[Put]:
    """The operations that record, in a transaction, what somebody does by hand; none where nothing was decided yet.

    Args:
        prefix: the prefix of the group whose history it is.
        what: in one line, with the target's name and the reason.
        target: the node or replica that it is about; empty for all.
        by: who does it.

    Raises EtcdError.
    """
    record = etcd.range(Get(Span(decided_key(prefix)))).one
    if record is None:
        return []
    event = HistoryEvent("ordered", 0, target, "", what, by=by, wall_ms=int(concurrency.wall() * 1000))
    return event_puts(prefix, [event], record.lease, revision=record.mod_revision, writer=uuid.uuid4().hex)
