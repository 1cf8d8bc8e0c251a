"""A member's own key in its group: written when the member asks for something, and put back when etcd has lost it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from ftcoord import concurrency
from ftcoord.core.layout import member_id, member_key, tail_key
from ftcoord.errors import EtcdError, EtcdUnavailable, LeaseLost
from ftcoord.etcd.api import Compare, Etcd, Get, KeyValue, Put, Span, TxnResult, is_member, unchanged
from ftcoord.etcd.retry import TimeLimit
from ftcoord.primitives.session import Session
from ftcoord.primitives.write_once import WriteOutcome, write_attempt_timeout, write_once, write_timeout

log = logging.getLogger(__name__)


HOLD: Final = 0.05
"""Seconds that a decider holds back its own ask, so that it can be written with the decision: several times as long as
the asks of one step take to come. Otherwise each step would cost one more write. Until then nobody else knows that it
asks; others wait three times as long before they decide in its place (`core.takeover.FIRST_LOOK_DELAY`)."""


class MemberLost(LeaseLost):
    """The lease of this member's own key is gone, and the membership with it."""


@dataclass(frozen=True, slots=True)
class HeldAsk:
    """A value that is still to be written. Times are monotonic seconds.

    Args:
        value: the member's ask.
        timeout: seconds that its write may take.
        done: called with whether it was written, see `MemberKey.put_soon`.
        since: when it was held back.
        over: the revision of the member's key then. A later value is newer, and is not overwritten.
    """

    value: bytes
    timeout: float
    done: Callable[[bool], None]
    since: float
    over: int

    @property
    def until(self) -> float:
        """When it must be written without a decision."""
        return self.since + HOLD


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
        self._tail_key = tail_key(prefix)
        self._etcd, self._session = etcd, session
        self._writing = concurrency.lock("MemberKey._writing")
        """Held during a write, so that the next one knows what it replaces. After `put_soon` another thread releases
        it."""
        self.kv: KeyValue | None = None  # guarded by _writing; read anywhere
        """Its value, as far as is known; None before the member joined."""
        self._sent = b""  # guarded by _writing
        """The value that was sent last. etcd may have it, though its answer was lost."""
        self.doubted = False  # the group's turn guards it
        """Whether etcd may have lost it: `restore` then checks."""
        self.held: HeldAsk | None = None  # the group's turn guards it
        """The value that is to be written soon: with the next decision, or alone."""

    def put(self, value: bytes, within: TimeLimit, first_reads: Sequence[Get]) -> WriteOutcome:
        """Write a value unlike all earlier ones.

        The first time, this member becomes the tail, and the outcome's reads are the tail that it found and then the
        `first_reads`; later there are none. Raises LeaseLost, and EtcdError.
        """
        put = Put(self.key, value, self._session.lease_id)
        with self._turn(within):
            self._sent = value
            joins = self.kv is None
            before, reads = ((Get(Span(self._tail_key)),), first_reads) if joins else ((), ())
            also = (Put(self._tail_key, self.id.encode(), put.lease),) if joins else ()
            expected = self.kv.mod_revision if self.kv else 0
            outcome = write_once(
                self._etcd, put, expected, also=also, before=before, reads=reads, timeout=within.left()
            )
            if not outcome.done and outcome.kv is not None and outcome.kv.lease == put.lease:
                # Ours after all: an earlier call's, whose outcome was unknown.
                found = outcome.kv.mod_revision
                outcome = write_once(self._etcd, put, found, before=before, reads=reads, timeout=within.left())
            if not outcome.done:
                raise LeaseLost(f"this member's key {self.key} is gone, or somebody else wrote it: join again")
            self.kv = outcome.kv
            return outcome

    def put_soon(self, value: bytes, timeout: float, done: Callable[[bool], None], over: int = 0) -> None:
        """Overwrite the key, or only if it is still at revision `over`. `done` is called with whether that worked, and
        must not block.

        Waits at most for the write before it, and for its own request if the client has no other in flight. If it did
        not work, or that is unknown, call `put()`.
        """
        put = Put(self.key, value, self._session.lease_id)
        if not self._writing.acquire(timeout=timeout):
            done(False)
            return
        mine = self.kv
        assert mine is not None
        if over not in (0, mine.mod_revision):
            self._writing.release()
            done(False)
            return
        self._sent = value

        def written(result: TxnResult | EtcdError) -> None:
            is_written = False
            if isinstance(result, EtcdError):
                log.debug("%s is to be written again: %s", self.key, result)
            elif result.succeeded:
                is_written = True
                self.kv = mine._replace(value=value, mod_revision=result.revision, version=mine.version + 1)
            self._writing.release()
            done(is_written)

        limit = min(timeout, write_attempt_timeout(self._etcd))
        self._etcd.submit([unchanged(self.key, mine.mod_revision)], [put], written, timeout=limit)

    def put_with(self, held: HeldAsk, write: Callable[[Compare, Put, Callable[[int], None]], bool]) -> bool:
        """Write the held ask, in a transaction that `write` makes of this guard and this put; returns whether it
        worked.

        `write` calls its third argument with the revision of the transaction. It is not called while another write is
        in progress. Raises what `write` raises.
        """
        if not self._writing.acquire(blocking=False):
            return False
        try:
            mine = self.kv
            assert mine is not None
            if mine.mod_revision != held.over:
                return False
            self._sent = held.value

            def wrote(revision: int) -> None:
                self.kv = mine._replace(value=held.value, mod_revision=revision, version=mine.version + 1)

            put = Put(self.key, held.value, self._session.lease_id)
            return write(unchanged(self.key, mine.mod_revision), put, wrote)
        finally:
            self._writing.release()

    def release_held(self) -> None:
        """Write the held ask alone, if there is one."""
        held, self.held = self.held, None
        if held is not None:
            self.put_soon(held.value, held.timeout, held.done, held.over)

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
                outcome = write_once(self._etcd, put, now.mod_revision if now else 0)
            except LeaseLost as error:  # the key went with it, as it should
                raise MemberLost(str(error)) from None
            if outcome.done:  # else somebody wrote it meanwhile, and the next check finds that
                self.kv = outcome.kv
                # Only now: most keys that are gone are those of members that leave just then.
                log.warning("etcd had lost what member %x asked for: it has it again", self._session.lease_id)

    @contextmanager
    def _turn(self, within: TimeLimit) -> Iterator[None]:
        # What was put soon ends within an attempt.
        longest = TimeLimit(write_attempt_timeout(self._etcd) + within.each, within.deadline)
        if not self._writing.acquire(timeout=longest.left()):
            raise EtcdUnavailable(f"etcd has not answered what was written to {self.key} before")
        try:
            yield
        finally:
            self._writing.release()
