"""A member's own key in its group: written when the member asks for something, and put back when etcd has lost it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ftcoord import concurrency
from ftcoord.core.layout import member_id, member_key
from ftcoord.errors import EtcdUnavailable, LeaseLost
from ftcoord.etcd.api import Etcd, Get, KeyValue, Put, Span, is_member
from ftcoord.etcd.retry import TimeLimit
from ftcoord.primitives.session import Session
from ftcoord.primitives.write_once import WriteOutcome, write_once, write_timeout

log = logging.getLogger(__name__)


class MemberLost(LeaseLost):
    """The lease of this member's own key is gone, and the membership with it."""


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
        self._sent = b""  # guarded by _writing
        """The value that was sent last. etcd may have it, though its answer was lost."""
        self.doubted = False  # only the group's thread
        """Whether etcd may have lost it: `restore` then checks."""

    def put(
        self, value: bytes, within: TimeLimit, first_reads: Sequence[Get], also: Sequence[Put] = ()
    ) -> WriteOutcome:
        """Write a value unlike all earlier ones, and `also` in the same transaction.

        The first time the outcome has the `first_reads`; later there are none. Raises LeaseLost, and EtcdError.
        """
        put = Put(self.key, value, self._session.lease_id)
        with self._turn(within):
            self._sent = value
            reads = first_reads if self.kv is None else ()
            outcome = write_once(self._etcd, put, self.kv, also=also, reads=reads, timeout=within.left())
            if not outcome.done and outcome.kv is not None and outcome.kv.lease == put.lease:
                # Ours after all: an earlier call's, whose outcome was unknown.
                outcome = write_once(self._etcd, put, outcome.kv, also=also, reads=reads, timeout=within.left())
            if not outcome.done:
                raise LeaseLost(f"this member's key {self.key} is gone, or somebody else wrote it: join again")
            self.kv = outcome.kv
            return outcome

    def restore(self) -> None:
        """Put the key back if etcd has lost it: in an outage, because somebody deleted it, or because etcd was restored
        from a backup, which may have an earlier value of it.

        Values tell that, and revisions do not: the backup's may be higher than what was written after another restore.
        A resting member asks for nothing, so its key is not put back, and its membership is over.

        Raises MemberLost when its lease is gone or rests, and EtcdError.
        """
        with self._turn(TimeLimit(write_timeout(self._etcd))):
            mine, now = self.kv, self._etcd.range(Get(Span(self.key))).one
            if mine is None:
                return
            if now is not None and is_member(now) and now.value in (mine.value, self._sent):
                self.kv = now
                return
            if self._session.rests:
                raise MemberLost(f"the key {self.key} is gone, and its member rests")
            put = Put(self.key, mine.value, self._session.lease_id)
            try:
                outcome = write_once(self._etcd, put, now)
            except LeaseLost as error:  # the key went with it, as it should
                raise MemberLost(str(error)) from None
            if outcome.done:  # else somebody wrote it meanwhile, and the next check finds that
                self.kv = outcome.kv
                # Only now: most keys that are gone are those of members that leave just then.
                log.warning("etcd had lost what member %x asked for: it has it again", self._session.lease_id)

    @contextmanager
    def _turn(self, within: TimeLimit) -> Iterator[None]:
        if not self._writing.acquire(timeout=within.left()):
            raise EtcdUnavailable(f"etcd has not answered what was written to {self.key} before")
        try:
            yield
        finally:
            self._writing.release()
