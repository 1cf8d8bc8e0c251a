"""Changes that are made exactly once, even if answers get lost.

    <prefix><id>    how many changes this writer made: empty, its version is the count

Each change is one transaction that also puts the writer's count, guarded by the count's version. If an answer is lost,
the same transaction is sent again: if the first one happened, the guard fails, so no change is made twice. If a
change's own guards fail after an attempt without an answer, that attempt could still arrive. So its count is then
*spent*: put with a value, so that no attempt can use it. If etcd says that it has no space, the count is read, because
etcd also says that of changes that it has made.

Use this for changes whose values may repeat. `write_once` is for a key whose values are all different, and needs no
second key.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from ftcoord import concurrency
from ftcoord.errors import (
    ClientClosed,
    EtcdError,
    EtcdNoSpace,
    EtcdUnavailable,
    LeaseLost,
    OutcomeUnknown,
    RequestRefused,
    RoundOver,
)
from ftcoord.etcd.api import Compare, Etcd, Get, KeyValue, Op, Put, RangeResult, Span, TxnResult, exists
from ftcoord.etcd.retry import SHORTEST_TIMEOUT, TimeLimit, retry_until_answered
from ftcoord.fork import OwnerProcess
from ftcoord.primitives.session import Session
from ftcoord.primitives.write_once import write_timeout

SPENT: Final = b"spent"
"""The value of a count that no attempt may use."""
STORE_CLOSED: Final = "the store was closed; make a new one"
_GONE: Final = "a change was not answered, and etcd key {!r}, which shows whether it was made, is gone: read again"


@dataclass(frozen=True, slots=True)
class Made:
    """Whether the guards held, so that the change was made; and the key that was asked for.

    If it was made, `kv` is the key right after it, without its value (None if etcd has compacted that). Otherwise it is
    the present key.
    """

    done: bool
    kv: KeyValue | None = None


class Fence(NamedTuple):
    """A key that must exist for changes to be made; and with this value, if one is given.

    A fence with a value also refuses the writers of an earlier fence of that name, which was deleted.
    """

    key: str
    value: bytes | None = None

    @property
    def guard(self) -> Compare:
        """It stands."""
        return exists(self.key) if self.value is None else Compare(self.key, "value", "=", self.value)

    def stands(self, kv: KeyValue | None) -> bool:
        """Whether it does, by what was read of its key."""
        return kv is not None and self.value in (None, kv.value)


class ExactlyOnceWriter:
    """A writer of changes. Thread-safe; not usable in a forked child.

    Args:
        etcd: the etcd client.
        prefix: the prefix of the key of its count.
        ttl: seconds that its keys outlive it.
        lease: attach the keys to this lease instead, and never renew it.
        fence: once it is gone, every change raises RoundOver.
        closed: set it to make all calls give up.
    """

    def __init__(
        self, etcd: Etcd, prefix: str, ttl: int, lease: int | None, fence: Fence | None, closed: concurrency.Event
    ) -> None:
        # Never change:
        self._etcd, self._prefix, self._ttl, self._lease, self._fence = etcd, prefix, ttl, lease, fence
        self._closed = closed
        self._owner = OwnerProcess("this store belongs to the parent process")
        # Held during a whole change, with its requests, since changes are counted one by one. Guards all below.
        # Reentrant: a signal handler may make a change in the middle of another.
        self._lock = concurrency.rlock("ExactlyOnceWriter._lock")
        self._changing = False
        self._unanswered = False  # whether it is not known of an attempt of this change if it was made
        self._count, self._made = "", 0  # the key of the count, and what it must be
        self._session: Session | None = None  # `close()` reads it without the lock, after `closed` is set
        self._begin_count()

    def make(self, ops: Sequence[Op], guards: Sequence[Compare], look: str | None, deadline: float) -> Made:
        """Make a change if the guards hold; the result has the key `look` at that moment.

        Raises EtcdUnavailable or OutcomeUnknown after the monotonic `deadline`, EtcdNoSpace when etcd had no space and
        has not made it, RoundOver, ClientClosed, and the errors with which etcd refuses it.
        """
        with self._turn(deadline):
            made = None
            try:
                while made is None:
                    made = self._attempt(ops, guards, look, deadline)
            except EtcdUnavailable as error:  # so says the last attempt; an earlier one may have been made
                if not self._unanswered:
                    raise
                raise OutcomeUnknown(f"a change was not answered, and then: {error}") from None
            finally:
                if made is None:
                    self._begin_count()  # so that a change of unknown outcome cannot be taken for the next one
            return made

    def close(self) -> None:
        """Let the keys expire, `ttl` seconds from now. Set `closed` before."""
        if self._session is not None:
            self._session.orphan()

    @contextmanager
    def _turn(self, deadline: float) -> Iterator[None]:
        """One change at a time. A change made inside another one, in a signal handler, has its own count."""
        self._owner.check()
        busy = EtcdUnavailable("other changes of this store were not answered in time; try again")
        with concurrency.held(self._lock, deadline, busy):
            outer = (self._count, self._made, self._unanswered) if self._changing else None
            if outer is not None:
                self._begin_count()
            self._changing, self._unanswered = True, False
            try:
                if self._closed.is_set():
                    raise ClientClosed(STORE_CLOSED)
                yield
            finally:
                if outer is not None:
                    self._count, self._made, self._unanswered = outer
                self._changing = outer is not None

    def _attempt(self, ops: Sequence[Op], guards: Sequence[Compare], look: str | None, deadline: float) -> Made | None:
        """As `make`; None if it must be repeated, with the new lease or count that it needed."""
        fences = [] if self._fence is None else [self._fence.guard]
        compares = [Compare(self._count, "version", "=", self._made), *guards, *fences]
        try:
            lease = self._lease_id(deadline)
            leased = [Put(op.key, op.value, lease) if isinstance(op, Put) else op for op in ops]
            success = [*leased, Put(self._count, b"", lease), *_gets(look, keys_only=True)]
            failure = [Get(Span(self._count)), *_gets(self._fence and self._fence.key), *_gets(look)]
            result = retry_until_answered(
                lambda left: self._send(compares, success, failure, left), deadline, self._closed
            )
        except LeaseLost as error:
            self._lease_is_gone(error)
            return None
        except EtcdNoSpace:
            if (made := self._made_all_the_same(look, deadline)) is None:
                raise
            return made
        if result.succeeded:
            self._made += 1
            return Made(True, result.range(len(success) - 1).one if look else None)
        judged = self._judge(result, look, deadline)
        if judged is None or judged.done or not self._unanswered:
            return judged
        try:
            return self._spend(judged, look, deadline)
        except LeaseLost as error:
            self._lease_is_gone(error)
            return None

    def _send(self, guards: Sequence[Compare], ops: Sequence[Op], failure: Sequence[Op], left: float) -> TxnResult:
        """As `Etcd.txn`; notes if the outcome is unknown."""
        try:
            return self._etcd.txn(guards, ops, failure, timeout=left)
        except (OutcomeUnknown, EtcdNoSpace):
            self._unanswered = True
            raise

    def _made_all_the_same(self, look: str | None, deadline: float) -> Made | None:
        """The result if etcd made a change although it said that it had no space; None if it did not."""
        count = retry_until_answered(partial(self._read, Get(Span(self._count))), deadline, self._closed).one
        if count is None or count.version != self._made + 1:
            return None
        self._made += 1
        return Made(True, self._look_back(look, count.mod_revision, deadline))

    def _spend(self, judged: Made, look: str | None, deadline: float) -> Made | None:
        """Make sure that a change that was not made cannot be made later."""
        guard = [Compare(self._count, "version", "=", self._made)]
        put, read = Put(self._count, SPENT, self._lease_id(deadline)), Get(Span(self._count))
        result = retry_until_answered(
            lambda left: self._etcd.txn(guard, (put,), (read,), timeout=left), deadline, self._closed
        )
        if not result.succeeded:
            count = result.range(0).one
            if count is None or count.version != self._made + 1:
                raise OutcomeUnknown(_GONE.format(self._count))
            if count.value != SPENT:  # the change arrived after all, before this
                self._made += 1
                return Made(True, self._look_back(look, count.mod_revision, deadline))
        self._made += 1
        return judged

    def _judge(self, result: TxnResult, look: str | None, deadline: float) -> Made | None:
        count = result.range(0).one
        made = count.version if count else 0
        if count and made == self._made + 1:  # an earlier answer was lost
            self._made = made
            return Made(True, self._look_back(look, count.mod_revision, deadline))
        if self._fence is not None and not self._fence.stands(result.range(1).one):
            raise round_over(self._fence)
        if made != self._made:
            if self._unanswered:
                raise OutcomeUnknown(_GONE.format(self._count))
            self._begin_count()
            return None
        return Made(False, result.range(-1).one if look else None)

    def _look_back(self, look: str | None, revision: int, deadline: float) -> KeyValue | None:
        """The key right after a change whose answer was lost."""
        for get in _gets(look, keys_only=True, revision=revision):
            try:
                return retry_until_answered(partial(self._read, get), deadline, self._closed).one
            except RequestRefused:
                return None  # compacted
        return None

    def _read(self, get: Get, left: float) -> RangeResult:
        return self._etcd.range(get, timeout=left)

    def _lease_id(self, deadline: float) -> int:
        if self._lease is not None:
            return self._lease
        if self._session is None:
            within = TimeLimit(write_timeout(self._etcd), max(deadline, concurrency.now() + SHORTEST_TIMEOUT))
            # Not in the short attempts of a change: each grant that etcd answers too late leaves a lease of hours.
            session = retry_until_answered(
                lambda _: Session(self._etcd, self._ttl, timeout=within.left()), deadline, self._closed
            )
            self._session = self._one_of(session, within)
        return self._session.lease_id

    def _one_of(self, session: Session, within: TimeLimit) -> Session:
        """The new session; or that of a change in a signal handler, which was granted one meanwhile and has keys."""
        if (earlier := self._session) is not None:
            with suppress(EtcdError):  # it expires by itself
                session.close(within.left())
            return earlier
        if self._closed.is_set():  # meanwhile: `close()` may have seen no session
            session.orphan()
        return session

    def _lease_is_gone(self, error: LeaseLost) -> None:
        if self._session is None:
            raise RoundOver(
                f"the run of {self._prefix} is gone from etcd, and its store with it: {error}; join again"
            ) from None
        self._session.orphan()
        self._session = None
        if self._unanswered:  # the count, which shows whether it happened, went with the lease
            raise OutcomeUnknown(
                f"a change was not answered, and then its lease was gone: {error}; read again"
            ) from None
        self._begin_count()

    def _begin_count(self) -> None:
        self._count, self._made = f"{self._prefix}{uuid.uuid4().hex}", 0


def round_over(fence: Fence) -> RoundOver:
    """The error when the fence is gone."""
    return RoundOver(f"the round of {fence.key} is over; join the next one and use its store")


def _gets(key: str | None, keys_only: bool = False, revision: int = 0) -> list[Get]:
    return [] if key is None else [Get(Span(key), keys_only=keys_only, revision=revision)]
