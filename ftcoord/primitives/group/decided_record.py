"""The decided record as one member knows it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

from ftcoord import concurrency
from ftcoord.core.history import HistoryEvent
from ftcoord.core.layout import Span, decided_key, era_key, record_span, roster_key
from ftcoord.core.verdict import Publish
from ftcoord.errors import ClientClosed, EtcdError, StateError
from ftcoord.etcd.api import (
    Compare,
    Delete,
    Etcd,
    Get,
    KeyValue,
    Lease,
    Op,
    Put,
    TxnResult,
    exists,
    none_newer,
    unchanged,
)
from ftcoord.etcd.retry import UNANSWERED, retry
from ftcoord.primitives.group.events import EventLog, written_with
from ftcoord.primitives.mirror import Mirror, Posted
from ftcoord.primitives.session import KeptLease
from ftcoord.primitives.write_once import WriteOutcome, after_put, write_attempt_timeout, write_once, write_timeout

log = logging.getLogger(__name__)

Listener: TypeAlias = Callable[[KeyValue | None, KeyValue | None], None]
MOST_OPERATIONS: Final = 128
"""Operations per transaction: etcd's default limit (`--max-txn-ops`)."""
MOST_BYTES: Final = 1 << 20
"""Bytes of the keys and values of one transaction: etcd takes 1.5 MiB (`--max-request-bytes`)."""


class DecidedRecord:
    """A mirror of `decided`, its listener's view of it, and the lease that the decider keeps for it.

    Only for the group's thread, once that runs.

    A record with a roster has two keys, which change in one transaction. So one watch delivers both in one batch, and
    one read returns both at one revision: a reader never sees one without the other.

    It has a third key, its era, which is written with each decision that finds no record. A decision needs the era as
    its decider knows it. So one that comes late does not count where others have decided meanwhile, and somebody has
    deleted that: "there is no record" holds again then, but the era is another one.

    Args:
        etcd: the etcd client.
        prefix: the group's prefix.
        ttl: seconds that the record outlives the last decider.
        post: takes what the mirror's watch delivers; see `Mirror`.
        listener: called with each new value and its roster, and with None after a deletion. Raises StateError when it
            cannot read them.
        has_roster: whether the record has a roster.
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
        has_roster: bool = False,
    ) -> None:
        self._etcd, self._prefix, self._ttl = etcd, prefix, ttl  # never change
        self._events = EventLog(etcd, prefix, writer)
        self._roster_key = roster_key(decided_key(prefix)) if has_roster else None
        self._era_key = era_key(prefix) if has_roster else None
        self.mirror = Mirror(etcd, record_span(prefix), post)
        """Of the office too: one watch, and one read, deliver both."""
        self._kept: KeptLease | None = None
        """The record's lease, while this member decides."""
        self.known: KeyValue | None = None
        """The last value that the listener could read. It stays when the key is deleted."""
        self.known_roster: KeyValue | None = None
        """The roster of that value."""
        self.known_at = concurrency.now()
        self._listener = listener
        self._told: tuple[KeyValue | None, KeyValue | None] = None, None
        self._unreadable: StateError | None = None

    @property
    def vanished(self) -> bool:
        """Whether a record was decided, but its key is gone from etcd."""
        return self.known is not None and self.mirror.one is None

    @property
    def missing_at(self) -> int:
        """Etcd's revision at which it had no record, as far as is known; 0 while it has one."""
        return self.mirror.revision if self.mirror.one is None else 0

    @property
    def has_era(self) -> bool:
        """Whether a record was ever decided, as far as etcd tells: it may be gone. False for one without a roster."""
        return self._era is not None

    def check_readable(self) -> None:
        """Raises StateError while the key holds a value that nobody may replace."""
        if self._unreadable is not None:
            raise self._unreadable

    def tell(self) -> None:
        """Call the listener, if there is something new."""
        kv, roster = self.mirror.one, self._roster
        if roster is None and kv is not None and kv == self.known:
            roster = self.known_roster  # somebody deleted it: the next decision puts it back
        # A deletion is only news where it ends an unreadable value. Values are compared as a whole: an etcd that lost
        # writes gives another record the same revision.
        if (kv is None and self._unreadable is None) or (kv is not None and (kv, roster) == self._told):
            return
        self._told = kv, roster
        try:
            self._listener(kv, roster)
        except StateError as error:
            self._unreadable = error
            return
        self._unreadable = None
        if kv is not None:
            self.known, self.known_roster, self.known_at = kv, roster, concurrency.now()

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
        puts += self._roster_put_back(puts, lease) + self._era_put(lease)
        record = Put(self.mirror.span.start, decision.record, lease)
        guards = [*guards, *self._roster_guards(), *self._era_guards()]
        guards += [none_newer(*one) for one in decision.no_newer]
        if current is not None:  # a restored etcd gives its revision again, to a record that is not known here
            guards.append(Compare(record.key, "value", "=", current.value))
        also: list[Op] = [*puts, *(Delete(span) for span in decision.deletes)]
        beside = [Put(key, value, lease) for key, value in decision.beside]
        events = self._events.ops(decision.events, lease, self.mirror.revision)
        sized = [record, *puts, *(op for op in events if isinstance(op, Put))]
        operations = 1 + len(also) + len(events)
        if beside and not _fits(operations + len(beside), [*sized, *beside]):
            refused = self._write_before(
                beside, [unchanged(record.key, current.mod_revision if current else 0), *guards]
            )
            if refused is not None:
                self._learn(refused, puts)
                return False
            # All of it is deleted together, so a decision that arrives late never names what is gone.
            guards, beside = [*guards, exists(beside[0].key)], []
        if not _fits(operations, sized):
            events = []

        def write(more: Sequence[Op]) -> WriteOutcome:
            return write_once(self._etcd, record, current, guards=guards, also=[*also, *beside, *more])

        outcome = written_with(events, write, self._prefix)
        self._learn(outcome, puts)
        return outcome.done

    def note(self, events: Sequence[HistoryEvent], guards: Sequence[Compare]) -> None:
        """Add events to the history without a decision, if there is a record and the guards hold. Nothing depends on
        it, so no problem is raised but that the client is closed."""
        record = self.mirror.one
        if record is None:
            return
        try:
            self._etcd.txn(guards, self._events.ops(events, record.lease, self.mirror.revision))
        except ClientClosed:
            raise
        except EtcdError as error:
            log.debug("events below %s are not in the history: %s", record.key, error)

    def close(self) -> None:
        """Stop watching, and stop keeping the lease. Idempotent."""
        self.mirror.close()
        self.drop_lease()

    # -- what lies beside ---------------------------------------------------------------------------------------

    def _write_before(self, beside: Sequence[Put], guards: Sequence[Compare]) -> WriteOutcome | None:
        """Write the keys that the record will name, as long as the record could be written. None if that was done, else
        what was found. Raises EtcdError. It may then be repeated, and may arrive late: it always writes the same."""
        look = Get(Span(self.mirror.span.start))
        deadline, never = concurrency.now() + write_timeout(self._etcd), concurrency.event()
        for batch in _batches(beside):

            def once(batch: Sequence[Put] = batch) -> TxnResult:
                return self._etcd.txn(guards, batch, [look], timeout=write_attempt_timeout(self._etcd))

            result = retry(once, UNANSWERED, deadline, never)
            if not result.succeeded:
                return WriteOutcome(False, result.range(0).one, (), result.revision)
        return None

    # -- the roster ---------------------------------------------------------------------------------------------

    @property
    def _roster(self) -> KeyValue | None:
        return None if self._roster_key is None else self.mirror.kvs.get(self._roster_key)

    def _roster_guards(self) -> list[Compare]:
        """A decision belongs to the roster that its decider knows, so nobody else may have written the roster."""
        if self._roster_key is None:
            return []
        return [unchanged(self._roster_key, self._roster.mod_revision if self._roster else 0)]

    def _roster_put_back(self, puts: Sequence[Put], lease: int) -> list[Put]:
        """A put of the known roster, for a decision that does not change it, if etcd would not keep it as long as the
        record: because somebody deleted it, or the record gets another lease."""
        known, now = self.known_roster, self._roster
        if known is None or any(put.key == known.key for put in puts):
            return []
        if now is not None and (now.value, now.lease) == (known.value, lease):
            return []
        return [Put(known.key, known.value, lease)]

    # -- the era ------------------------------------------------------------------------------------------------

    @property
    def _era(self) -> KeyValue | None:
        return None if self._era_key is None else self.mirror.kvs.get(self._era_key)

    def _era_guards(self) -> list[Compare]:
        """Nobody else may have begun an era since."""
        return [] if self._era_key is None else [unchanged(self._era_key, self._era.mod_revision if self._era else 0)]

    def _era_put(self, lease: int) -> list[Put]:
        """A put of the era, for a decision that begins one, or where etcd would not keep it as long as the record."""
        if self._era_key is None or (self.mirror.one and self._era and self._era.lease == lease):
            return []
        return [Put(self._era_key, b"", lease)]

    # -- what a transaction found -------------------------------------------------------------------------------

    def _learn(self, outcome: WriteOutcome, puts: Sequence[Put]) -> None:
        """Take over what a transaction wrote, or found under the key. The watch will not repeat it."""
        kv = outcome.kv
        if not outcome.done:  # what it found is only a part of it
            self.mirror.adopt(self._etcd.range(Get(self.mirror.span)))
            self.tell()
            return
        if kv is not None:
            mine = [put for put in puts if put.key in self.mirror.span]
            self.mirror.learn(kv, *(after_put(put, self.mirror.kvs.get(put.key), kv.mod_revision) for put in mine))
            self.tell()
        if self.mirror.one != kv:  # etcd has lost what the mirror has: read again
            self.mirror.doubt()


# Keys beside a record that is too large for one key mean something only through the record that names them. So it does
# not matter in which order they are written, nor how many there are at a time, as long as all exist when the record
# does.


def _fits(operations: int, puts: Sequence[Put]) -> bool:
    """Whether etcd takes a transaction of so many operations, with these puts among them."""
    return operations <= MOST_OPERATIONS and _size(puts) <= MOST_BYTES


def _batches(puts: Sequence[Put]) -> Iterator[list[Put]]:
    """The puts in order, in parts that each fit into one transaction."""
    batch: list[Put] = []
    for put in puts:
        if batch and not _fits(len(batch) + 1, [*batch, put]):
            yield batch
            batch = []
        batch.append(put)
    if batch:
        yield batch


def _size(puts: Sequence[Put]) -> int:
    return sum(len(put.key) + len(put.value) for put in puts)
