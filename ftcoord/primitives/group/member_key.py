"""A member's own key in its group: written when the member asks for something. Without it there is no member (G5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ftcoord import concurrency
from ftcoord.core.layout import member_id, member_key
from ftcoord.errors import EtcdUnavailable, LeaseLost
from ftcoord.etcd.api import Etcd, Get, KeyValue, Put, Span, is_member
from ftcoord.etcd.retry import TimeLimit
from ftcoord.primitives.session import Session
from ftcoord.primitives.write_once import WriteOutcome, write_once


class MemberLost(LeaseLost):
    """This member's own key is gone, or is not what it wrote: that is a lost lease, whatever the lease says (G5)."""


class MemberKey:
    """A member's key, attached to the lease that it is named after. Thread-safe; one write at a time.

    Args:
        etcd: the etcd client.
        prefix: the group's prefix.
        session: the member's lease.
    """

    def __init__(self, etcd: Etcd, prefix: str, session: Session) -> None:
        self.id = member_id(session.lease_id)
        self.key = member_key(prefix, self.id)
        self._etcd, self._session = etcd, session
        self._writing = concurrency.lock("MemberKey._writing")
        """Held during a write, so that the next one knows what it replaces."""
        self.kv: KeyValue | None = None  # guarded by _writing; read anywhere
        """Its value, as far as is known; None before the member joined."""
        self._sent: tuple[bytes, ...] = ()  # the same
        """The values that were sent since then. etcd may have any of them: their answers were lost."""

    def put(
        self, value: bytes, within: TimeLimit, first_reads: Sequence[Get], also: Sequence[Put] = ()
    ) -> WriteOutcome:
        """Write a value unlike all earlier ones, and `also` in the same transaction.

        The first time the outcome has the `first_reads`; later there are none. Raises LeaseLost, and EtcdError.
        """
        put = Put(self.key, value, self._session.lease_id)
        with self._turn(within):
            self._sent = *self._sent, value
            reads = first_reads if self.kv is None else ()
            outcome = write_once(self._etcd, put, self.kv, also=also, reads=reads, timeout=within.left())
            if not outcome.done and outcome.kv is not None and outcome.kv.lease == put.lease:
                # Ours after all: an earlier call's, whose outcome was unknown.
                outcome = write_once(self._etcd, put, outcome.kv, also=also, reads=reads, timeout=within.left())
            if not outcome.done:
                raise LeaseLost(f"this member's key {self.key} is gone, or somebody else wrote it: join again")
            self.kv, self._sent = outcome.kv, ()
            return outcome

    def check(self) -> None:
        """Compare it with etcd's. Raises MemberLost, and EtcdError.

        By values: after a restore of etcd from a backup revisions say nothing.
        """
        before = self.kv, self._sent
        now = self._etcd.range(Get(Span(self.key))).one
        kv, sent = before
        if kv is None or (self.kv, self._sent) != before:  # written meanwhile: etcd has just compared it
            return
        if now is None or not is_member(now) or now.value not in (kv.value, *sent):
            raise MemberLost(f"this member's key {self.key} is gone, or somebody else wrote it: it joins again")

    @contextmanager
    def _turn(self, within: TimeLimit) -> Iterator[None]:
        if not self._writing.acquire(timeout=within.left()):
            raise EtcdUnavailable(f"etcd has not answered what was written to {self.key} before")
        try:
            yield
        finally:
            self._writing.release()
