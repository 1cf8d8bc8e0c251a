"""A job's history in etcd: events beside a decision, in the same transaction.

Nothing depends on it. If etcd takes no history (no space, no permission, no lease), decisions are made without it.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Final

from ftcoord import concurrency
from ftcoord.core.event_records import KEPT_EVENTS, HistoryEvent, encode
from ftcoord.core.layout import Span, event_key, event_revision, events_span
from ftcoord.errors import ClientClosed, EtcdError, EtcdUnavailable, LeaseLost
from ftcoord.etcd.api import Compare, Delete, EtcdCalls, Get, KeyValue, Lease, Op, Put
from ftcoord.etcd.retry import UNANSWERED, TimeLimit
from ftcoord.primitives.session import KeptLease
from ftcoord.primitives.write_once import WriteOutcome

log = logging.getLogger(__name__)

CALL_TIMEOUT: Final = 1.0
"""Seconds that a call for the history alone may take."""
OFF: Final = 60.0
"""Seconds without writes after etcd has refused the history,"""
AWAY: Final = 1.0
"""and after it has not answered."""
OWED: Final = 40
"""Events that wait meanwhile; the oldest of them are written with the next decision."""
LOOK_AGAIN: Final = KEPT_EVENTS // 4
"""Events written between two reads of what others have written."""


class EventLog:
    """What one writer adds to a history. Not thread-safe.

    Args:
        etcd: the etcd client.
        prefix: the group's prefix.
        ttl: seconds that the history outlives its last decider.
        writer: a unique name, such as a member id.
        keeps: whether to keep the lease alive until `drop()`, as a decider does.
        until: the monotonic time after which requests for the history alone are not waited for: for a writer that has
            little time, and adds its events once.
    """

    def __init__(
        self, etcd: EtcdCalls, prefix: str, ttl: int, writer: str, *, keeps: bool = True, until: float = math.inf
    ) -> None:
        self._etcd, self._prefix, self._writer = etcd, prefix, writer  # never change
        self._within = TimeLimit(CALL_TIMEOUT, until)  # never changes
        self._lease = _HistoryLease(etcd, ttl, keeps=keeps)
        self._counts = itertools.count()
        self._keys: list[str] = []
        """The known keys of the history, in order."""
        self._unseen = LOOK_AGAIN
        """How many events were written since this read what others have written."""
        self._owed: list[HistoryEvent] = []
        self._off_until = 0.0
        self._warned = False

    def writes(self, events: Sequence[HistoryEvent], revision: int) -> list[Op]:
        """The operations that add these events to a transaction and delete the oldest; none if that is impossible.

        Costs one or two requests the first time, and rarely later. `revision` is etcd's highest known revision.
        """
        if not events or concurrency.now() < self._off_until:
            return []
        try:
            lease = self._take_lease()
        except ClientClosed:
            return []  # the transaction will say so
        except EtcdError as error:
            self.refused(error)
            return []
        self._lease.note_used()
        puts = [Put(self._next_key(revision), encode(event), lease) for event in (*self._owed, *events)]
        known = [*self._keys, *(put.key for put in puts)]
        if len(known) <= KEPT_EVENTS:
            return [*puts]
        return [*puts, Delete(Span(events_span(self._prefix).start, stop=known[-KEPT_EVENTS]))]

    def send(
        self, ops: Sequence[Op], events: Sequence[HistoryEvent], write: Callable[[Sequence[Op]], WriteOutcome]
    ) -> WriteOutcome:
        """Have `write` make its transaction with these operations; without them, if etcd refuses them together.

        Args:
            ops: the operations that `writes` returned for these events, or none.
            write: makes a guarded transaction, with additional operations.

        Raises what `write` raises.
        """
        if ops:
            try:
                outcome = write(ops)
            except (*UNANSWERED, ClientClosed):
                raise
            except EtcdError as error:
                self.refused(error)
            else:
                if outcome.done:
                    self._note_written(ops)
                return outcome
        outcome = write(())
        if outcome.done:
            self.owe(events)
        return outcome

    def add(self, events: Sequence[HistoryEvent], guards: Sequence[Compare], revision: int) -> None:
        """Write these events alone, if the guards hold. Events that etcd does not take now go with the next decision.

        Raises ClientClosed.
        """
        ops = self.writes(events, revision)
        try:
            if ops and self._etcd.txn(guards, ops, timeout=self._within.left()).succeeded:
                self._note_written(ops)
        except ClientClosed:
            raise
        except EtcdError as error:
            self.refused(error)
            ops = []
        if not ops:
            self.owe(events)

    def owe(self, events: Sequence[HistoryEvent]) -> None:
        """Write these events with the next ones."""
        self._owed = [*self._owed, *events][-OWED:]

    def _note_written(self, ops: Sequence[Op]) -> None:
        keys = [op.key for op in ops if isinstance(op, Put)]
        self._owed = []
        self._unseen += len(keys)
        self._keys = [*self._keys, *keys][-KEPT_EVENTS:]

    def refused(self, error: EtcdError) -> None:
        """etcd refuses the operations of `writes`, which so returns none for a while. Warns once."""
        if isinstance(error, LeaseLost):  # it expired, or somebody revoked it: the next one is written under another
            self._forget_lease()
            return
        self._off_until = concurrency.now() + (AWAY if isinstance(error, UNANSWERED) else OFF)
        if not self._warned and not isinstance(error, UNANSWERED):
            self._warned = True
            log.warning(
                "etcd takes no history below %s, so the job runs on without one: %s",
                events_span(self._prefix).start,
                error,
            )

    def drop(self) -> None:
        """Stop keeping the history's lease alive: another decider does, or it expires. Idempotent."""
        self._lease.drop()
        self._unseen = LOOK_AGAIN

    def _next_key(self, revision: int) -> str:
        """A key after all existing ones, even if etcd was restored and counts again."""
        last = self._keys[-1] if self._keys else ""
        base = max(revision, event_revision(last) or 0)
        key = event_key(self._prefix, base, self._writer, next(self._counts))
        return key if key > last else event_key(self._prefix, base + 1, self._writer, next(self._counts))

    def _take_lease(self) -> int:
        """The lease to write under. Raises EtcdError."""
        if self._lease.is_lost:
            self._forget_lease()
        if self._unseen >= LOOK_AGAIN:
            newest = self._look()
            if not self._lease.id and newest is not None and newest.lease:
                self._lease.adopt(newest.lease, self._within.left())
        if not self._lease.id:
            if self._within.left() < CALL_TIMEOUT:  # one that is granted too late lives for days
                raise EtcdUnavailable("too little time was left for the lease of the history")
            self._lease.grant()
        return self._lease.id

    def _look(self) -> KeyValue | None:
        """Read the existing events; returns the newest."""
        get = Get(events_span(self._prefix), limit=2 * KEPT_EVENTS, keys_only=True, order="newest")
        found = self._etcd.range(get, timeout=self._within.left())
        self._keys = sorted(kv.key for kv in found.kvs if event_revision(kv.key) is not None)
        self._unseen = 0
        return found.kvs[0] if found.kvs else None

    def _forget_lease(self) -> None:
        self._lease.forget()
        self._unseen = LOOK_AGAIN  # others may have another one by now


class _HistoryLease:
    """The one lease that all of a history is attached to. Not thread-safe.

    The decider keeps it alive. It takes over the existing lease, and grants one only if there is none, or its TTL is
    too short.

    Args:
        etcd: the etcd client.
        ttl: seconds that the history outlives its last decider.
        keeps: whether to keep the lease alive until `drop()`, as a decider does.
    """

    def __init__(self, etcd: EtcdCalls, ttl: int, *, keeps: bool) -> None:
        self._etcd, self._ttl, self._keeps = etcd, ttl, keeps
        self.id = 0
        """0 while no lease is known."""
        self._kept: KeptLease | None = None
        self._is_unused = False
        """Whether this has granted the lease, and nothing has been written under it yet."""

    @property
    def is_lost(self) -> bool:
        """Whether it was kept alive, and no longer is."""
        return self._kept is not None and not self._kept.kept

    def adopt(self, lease: int, timeout: float) -> None:
        """Continue with the lease that others have used, if its TTL is long enough. Raises EtcdError."""
        now = concurrency.now()
        try:
            ttl = self._etcd.renew(lease, timeout=timeout)
        except LeaseLost:
            return
        if ttl >= self._ttl:
            self._use(Lease(lease, ttl), now)

    def grant(self) -> None:
        """Grant a new lease. Raises EtcdError."""
        now, lease = concurrency.now(), self._etcd.grant(self._ttl, timeout=CALL_TIMEOUT)
        self._use(lease, now)
        self._is_unused = True

    def note_used(self) -> None:
        """Note that something is about to be written under it."""
        self._is_unused = False

    def forget(self) -> None:
        """Stop renewing it: it is lost, or useless. Idempotent."""
        if self._kept is not None:
            self._kept.stop()
        self._kept, self.id, self._is_unused = None, 0, False

    def drop(self) -> None:
        """Stop renewing it: another decider does, or it expires. A lease that was never used is revoked. Idempotent."""
        lease, is_unused = self.id, self._is_unused
        self.forget()
        if is_unused:
            try:
                self._etcd.revoke(lease, timeout=CALL_TIMEOUT)
            except EtcdError as error:
                log.debug("the lease of a history that was not written expires by itself: %s", error)

    def _use(self, lease: Lease, now: float) -> None:
        self.id = lease.id
        if self._keeps:
            self._kept = KeptLease(self._etcd, lease, now)
