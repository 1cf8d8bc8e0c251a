"""The decided record as one member knows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ftcoord import concurrency
from ftcoord.core.layout import Span
from ftcoord.core.verdict import Publish
from ftcoord.errors import StateError
from ftcoord.etcd.api import Compare, Delete, Etcd, KeyValue, Put
from ftcoord.primitives.group.record_lease import RecordLease
from ftcoord.primitives.mirror import Mirror, Posted
from ftcoord.primitives.write_once import write_once

Listener: TypeAlias = Callable[[KeyValue | None], None]


class DecidedRecord:
    """A mirror of `decided`, what its listener made of it, and the lease that the decider keeps for it. The group's
    turn guards all of it but `queued`.

    Args:
        etcd: the etcd client.
        span: the key.
        ttl: seconds that the record outlives the last decider.
        post: takes what the mirror's watch delivers; see `Mirror`.
        listener: called with each new value, and with None after a deletion. Raises StateError when it cannot read it.
    """

    def __init__(
        self, etcd: Etcd, span: Span, ttl: int, post: Callable[[Mirror, Posted], None], listener: Listener
    ) -> None:
        self._etcd = etcd
        self.mirror = Mirror(etcd, span, post)
        self.lease = RecordLease(etcd, ttl)
        self.known: KeyValue | None = None
        """The last value that the listener could read. It stays when the key is deleted."""
        self.known_at = concurrency.now()
        self.queued = self.taken = 0
        """Decisions that were put into the group's inbox (only the watch's thread counts them), and taken out of it."""
        self._listener = listener
        self._told: KeyValue | None = None
        self._unreadable: StateError | None = None

    @property
    def is_behind(self) -> bool:
        """Whether a decision is still in the group's inbox."""
        return self.taken < self.queued

    @property
    def vanished(self) -> bool:
        """Whether a record was decided, but its key is gone from etcd."""
        return self.known is not None and self.mirror.one is None

    def check_readable(self) -> None:
        """Raises StateError while the key holds what nobody may replace."""
        if self._unreadable is not None:
            raise self._unreadable

    def tell(self) -> None:
        """Tell the listener, if there is news."""
        kv = self.mirror.one
        # A deletion is only news where it ends an unreadable value. Values are compared as a whole: an etcd that lost
        # writes gives another record the same revision.
        if (kv is None and self._unreadable is None) or (kv is not None and kv == self._told):
            return
        self._told = kv
        try:
            self._listener(kv)
        except StateError as error:
            self._unreadable = error
            return
        self._unreadable = None
        if kv is not None:
            self.known, self.known_at = kv, concurrency.now()

    def keep_lease(self) -> None:
        """Keep the record's lease alive, as its decider. Raises EtcdError, and may then be repeated."""
        self.lease.keep(self.mirror.one)

    def publish(self, decision: Publish[bytes], *guards: Compare) -> bool:
        """Replace the record that is known, if nobody else did and the guards hold; whether it worked.

        Raises EtcdError; whether it worked is then not known, and it may be repeated.
        """
        lease, current = self.lease.for_publishing(), self.mirror.one
        outcome = write_once(
            self._etcd,
            Put(self.mirror.span.start, decision.record, lease),
            current.mod_revision if current else 0,
            guards=guards,
            also=[
                *(Put(key, value, lease) for key, value in decision.puts),
                *(Delete(span) for span in decision.deletes),
            ],
        )
        self._learn(outcome.kv)
        return outcome.done

    def close(self) -> None:
        """Stop watching, and keep the lease no longer. Idempotent."""
        self.mirror.close()
        self.lease.drop()

    def _learn(self, kv: KeyValue | None) -> None:
        """Take over what a transaction found under the key. The watch will not repeat it."""
        if kv is not None:
            self.mirror.learn(kv)
            self.tell()
        if self.mirror.one != kv:  # etcd has lost what the mirror has: read again
            self.mirror.doubt()
