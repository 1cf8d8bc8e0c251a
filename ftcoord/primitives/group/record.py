"""The two keys that all members of a group watch: `decider`, the office (G2), and `decided`, the record (T3), with the
history beside it.

**Who decides** is the member that holds the office, a key under a lease of its own. The thread that decides renews that
lease itself, between two of its steps; no other thread and no sentinel does. So whoever cannot decide, for whatever
reason, loses the office within a TTL, though its membership goes on. The sentinel only revokes the lease when the
process dies.

**The history** is events in the transaction of a decision, under the lease of the record. Nothing depends on it: if
etcd refuses a decision with its events (space, size, permission), it is made without.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeAlias

from ftcoord import concurrency
from ftcoord.core import layout, office as rules
from ftcoord.core.history import HistoryEvent, encode
from ftcoord.core.layout import Span
from ftcoord.core.verdict import Publish
from ftcoord.errors import ClientClosed, EtcdError, LeaseLost, StateError
from ftcoord.etcd.api import Compare, Delete, Etcd, Get, KeyValue, Lease, Op, Put
from ftcoord.etcd.retry import UNANSWERED
from ftcoord.log_once import LogOnce
from ftcoord.primitives.group.use import Desk
from ftcoord.primitives.mirror import Apply, Mirror
from ftcoord.primitives.sentinel import SentinelFor
from ftcoord.primitives.session import KeptLease
from ftcoord.primitives.write_once import WriteOutcome, write_once

log = logging.getLogger(__name__)

GIVE_UP_TIMEOUT: Final = 0.5
"""Seconds that giving the office up may take; after that its lease expires."""
Listener: TypeAlias = Callable[[KeyValue | None], None]
MOST_OPERATIONS: Final = 128
"""Operations per transaction: etcd's default limit (`--max-txn-ops`)."""
MOST_BYTES: Final = 1 << 20
"""Bytes of the keys and values of one transaction: etcd takes 1.5 MiB (`--max-request-bytes`)."""


# -- who decides -------------------------------------------------------------------------------------------------------


class Office:
    """The office as one member sees it, or holds it. Only for the group's thread, once that runs.

    Args:
        etcd: the etcd client.
        prefix: the group's prefix.
        member: this member's id.
        ttl: of the office's lease, in seconds.
        record: the mirror that has `decided` and `decider`.
        rank: returns this member's place in the last record; None without one.
        desk: where members ask who holds the office.
        wake: called on any thread when somebody has asked there.
    """

    def __init__(
        self,
        etcd: Etcd,
        prefix: str,
        member: str,
        *,
        ttl: int,
        record: Mirror,
        rank: Callable[[], int | None],
        desk: Desk,
        wake: Callable[[], None],
    ) -> None:
        self._etcd, self._member, self._ttl, self._record, self._rank = etcd, member, ttl, record, rank
        self.key, self._desk, self._wake = layout.decider_key(prefix), desk, wake
        # As this member sees it:
        self._told: tuple[KeyValue | None, float] = None, math.inf
        """The key, as the desk knows it, and etcd's revision at which it had that; infinite before it is read."""
        self._tries_at: float | None = -math.inf  # who joins tries at once
        """When this member tries to take it; None until it is seen vacant."""
        # As it holds it, or is about to:
        self._lease: KeptLease | None = None
        """Granted for the office. It rests: the sentinel gives it up, and nobody renews it but this object."""
        self._value = b""
        """What is written under that lease. Nobody else writes the same."""
        self._renew_at = math.inf
        self.took_at = -math.inf
        """Since when this member decides, as far as it knows; minus infinity while it does not."""

    @property
    def is_held(self) -> bool:
        """Whether this member decides, as far as it knows. Only a transaction with `guard` shows that it does."""
        return self.took_at != -math.inf

    @property
    def guard(self) -> Compare:
        """Holds in etcd as long as this member has the office that it took. By its value, which no other taking has."""
        return Compare(self.key, "value", "=", self._value)

    def tell(self) -> None:
        """Have the desk know who decides, if that is new."""
        kv, (known, known_at) = self._record.kvs.get(self.key), self._told
        if kv == known and known_at != math.inf:
            return
        revision = kv.mod_revision if kv is not None else self._record.revision
        anew, self._told = revision < known_at, (kv, revision)
        with suppress(StateError):  # it is replaced
            office = rules.parse_office(kv.key, kv.value) if kv is not None else None
            self._desk.office_is(office, revision, anew=anew)

    def step(self, *, tries: bool) -> float:
        """Renew the office, or take it if nobody has it; when to call this again, unless something comes in.

        Args:
            tries: whether this member may take it.

        Raises OtherLayout for a decider of another release, and EtcdError; it may then be repeated.
        """
        now, found = concurrency.now(), self._record.kvs.get(self.key)
        if found is not None and found.value == self._value != b"":  # also if the answer to T2 was lost
            self._hold()
            return self._keep(now)
        if self.is_held:
            self._lose("another member decides" if found else "its lease ended")
        if found is not None and not rules.is_vacant(found.lease, self.key, found.value):
            self._tries_at = None
            return math.inf
        if self._tries_at is None:
            self._tries_at = now + rules.first_try(self._rank(), random.random())
        if not tries:
            return math.inf
        if now < self._tries_at:
            return self._tries_at
        try:
            self._take(found)
        except EtcdError:  # nobody else was faster
            self._tries_at = now + rules.first_try(self._rank(), random.random())
            raise
        if not self.is_held:
            self._tries_at = now + rules.next_try(self._rank(), random.random())
        return now  # and decide, or look who does

    def give_up(self) -> None:
        """Have others decide from now on. Idempotent; does not raise if etcd is unreachable: the lease expires."""
        if (lease := self._end()) is not None:
            with suppress(EtcdError):
                lease.give_up(GIVE_UP_TIMEOUT)

    def _take(self, found: KeyValue | None) -> None:
        """T2. What it reads is the last word of all deciders before."""
        if self._lease is None:
            sent_at, sentinel = concurrency.now(), SentinelFor.of(self._etcd.config, "", ())
            self._lease = KeptLease(self._etcd, self._etcd.grant(self._ttl), sent_at, sentinel=sentinel, rests=True)
            key = uuid.uuid4().hex
            self._value = rules.encode_office(rules.OfficeRecord(self._member, self._desk.open(key), key))
        put, get = Put(self.key, self._value, self._lease.id), Get(self._record.span)
        try:
            outcome = write_once(self._etcd, put, found, reads=(get,))
        except LeaseLost:
            self._lose("its lease ended")
            raise
        self._record.adopt(outcome.reads[0])
        if outcome.done:
            self._hold()
        else:  # another one was faster
            self.give_up()

    def _hold(self) -> None:
        if not self.is_held and self._lease is not None:
            self.took_at, self._renew_at, self._tries_at = concurrency.now(), self._lease.times.renew_at(), None
            self._desk.serve(self._wake)

    def _keep(self, now: float) -> float:
        """An etcd that does not answer ends no lease, so the next step repeats a renewal."""
        if now >= self._renew_at and self._lease is not None:
            self._renew_at = self._lease.times.renew_at(now)
            try:
                self._lease.renew(self._lease.times.renewal_timeout(now))
            except LeaseLost:
                self._lose("its lease ended")
                self._record.forget()  # a watch that lost the deletion will not bring it
                raise
            self._renew_at = self._lease.times.renew_at()
        return self._renew_at

    def _lose(self, why: str) -> None:
        log.debug("member %s decides no longer: %s", self._member, why)
        if (lease := self._end()) is not None:
            lease.stop()

    def _end(self) -> KeptLease | None:
        self._value, self.took_at = b"", -math.inf
        self._desk.close()  # before the lease ends: who asked here asks the next one then
        lease, self._lease = self._lease, None
        return lease


# -- what was decided --------------------------------------------------------------------------------------------------

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
        self, etcd: Etcd, prefix: str, ttl: int, *, post: Callable[[Apply], None], listener: Listener, writer: str
    ) -> None:
        self._etcd, self._prefix, self._ttl, self._listener = etcd, prefix, ttl, listener  # never change
        self._events = EventLog(etcd, prefix, writer)
        self.mirror = Mirror(etcd, layout.record_span(prefix), post)
        """Of the office too: one watch, and one read, deliver both."""
        self._kept: KeptLease | None = None
        """The record's lease, while this member decides."""
        self._told: KeyValue | object | None = _NOTHING
        self.known: KeyValue | None = None
        """The last value that the listener could read; None while etcd has none."""
        self.known_at = concurrency.now()
        self.unreadable: StateError | None = None
        """Why it can read no value now: nobody may replace what the key holds."""

    def tell(self) -> None:
        """Call the listener, if there is something new."""
        kv = self.mirror.one
        if kv == self._told:  # as a whole: an etcd that lost writes gives another record the same revision
            return
        self._told = kv
        try:
            self._listener(kv)
        except StateError as error:
            self.unreadable = error
        else:
            self.unreadable, self.known, self.known_at = None, kv, concurrency.now()

    def keep_lease(self, *, needs_one: bool = False) -> int:
        """Keep the record's lease alive, as its decider, so that the record lives `ttl` seconds longer than its group;
        a new one, if there is none and it `needs_one`. Returns it, 0 for none. Costs a request only when it changes.
        Raises EtcdError, and may then be repeated."""
        lease = self.mirror.one.lease if self.mirror.one else 0
        if self._kept is None or not self._kept.kept or lease not in (0, self._kept.id):
            self.drop_lease()
            now = concurrency.now()
            if lease:  # another one would take the record from what lies beside it under the same lease
                self._kept = KeptLease(self._etcd, Lease(lease, self._etcd.renew(lease)), now)
            elif needs_one:
                self._kept = KeptLease(self._etcd, self._etcd.grant(self._ttl), now)
        return self._kept.id if self._kept is not None else 0

    def drop_lease(self) -> None:
        """Stop renewing it: another decider does, or it expires. Idempotent."""
        if self._kept is not None:
            self._kept.stop()
            self._kept = None

    def publish(self, decision: Publish[bytes], guards: Sequence[Compare]) -> bool:
        """T3: replace the known record, if nobody else did and the guards hold; returns whether that was done. The
        events for the history are written with it, unless etcd does not take them.

        Raises EtcdError; it is then unknown whether it worked, and it may be repeated.
        """
        lease, current = self.keep_lease(needs_one=True), self.mirror.one
        puts = [Put(key, value, lease) for key, value in decision.puts]
        record = Put(self.mirror.span.start, decision.record, lease)
        also: list[Op] = [*puts, *(Delete(span) for span in decision.deletes)]
        events = self._events.ops(decision.events, lease, self.mirror.revision)
        if not _fits(1 + len(also) + len(events), [record, *puts, *(op for op in events if isinstance(op, Put))]):
            events = []
        write = partial(write_once, self._etcd, record, current, guards=guards)
        outcome = written_with(events, lambda more: write(also=[*also, *more]), self._prefix)
        if outcome.done and outcome.kv is not None:  # the watch will not repeat it
            self.mirror.learn(outcome.kv)
            if self.mirror.one != outcome.kv:  # etcd has lost what the mirror has: read again
                self.mirror.forget()
        else:  # what it found is only a part of it
            self.mirror.adopt(self._etcd.range(Get(self.mirror.span)))
        self.tell()
        return outcome.done

    def close(self) -> None:
        """Stop watching, and stop keeping the lease. Idempotent."""
        self.mirror.close()
        self.drop_lease()


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
    return [Put(layout.event_key(prefix, revision, writer, at), encode(one), lease) for at, one in enumerate(events)]


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
        return (
            [*puts, Delete(Span(layout.events_span(self._prefix).start, stop=self._keys[0]))] if too_many else [*puts]
        )

    def _existing(self) -> list[str]:
        get = Get(layout.events_span(self._prefix), limit=2 * KEPT_EVENTS, keys_only=True, order="newest")
        try:
            found = self._etcd.range(get, timeout=READ_TIMEOUT).kvs
        except EtcdError as error:
            log.debug("the history below %s cannot be read: %s", self._prefix, error)
            return []
        return sorted(kv.key for kv in found if layout.is_event_key(kv.key))


def ordered(etcd: Etcd, prefix: str, what: str, *, target: str, by: str) -> list[Put]:
    """The operations that record, in a transaction, what somebody does by hand; none where nothing was decided yet.

    Args:
        prefix: the prefix of the group whose history it is.
        what: in one line, with the target's name and the reason.
        target: the node or replica that it is about; empty for all.
        by: who does it.

    Raises EtcdError.
    """
    record = etcd.range(Get(Span(layout.decided_key(prefix)))).one
    if record is None:
        return []
    event = HistoryEvent("ordered", 0, target, "", what, by=by, wall_ms=int(concurrency.wall() * 1000))
    return event_puts(prefix, [event], record.lease, revision=record.mod_revision, writer=uuid.uuid4().hex)
