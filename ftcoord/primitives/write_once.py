"""One write that happens at most once even if answers get lost: guarded by a revision, recognised by its value.

For a key whose values are all different. `ExactlyOnceWriter` is for changes whose values may repeat, such as a store's.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
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
from ftcoord.etcd.api import (
    Compare,
    Etcd,
    EtcdCalls,
    Get,
    KeyValue,
    Op,
    Put,
    RangeResult,
    Span,
    TxnResult,
    exists,
    unchanged,
)
from ftcoord.etcd.reading import SnapshotReader, read_snapshot
from ftcoord.etcd.retry import SHORTEST_TIMEOUT, UNANSWERED, TimeLimit, retry, retry_until_answered
from ftcoord.fork import OwnerProcess
from ftcoord.primitives.session import Session

log = logging.getLogger(__name__)

WRITE_ATTEMPT_TIMEOUT: Final = 1.5
"""Seconds after which an answer counts as lost. A leader that dies loses its proposals, and etcd reports that to the
client only after 7 s; a new leader is elected after 1.5 s."""
WRITE_ATTEMPT_PART: Final = 0.3
"""The part of a longer `request_timeout` that an attempt gets: a user who knows that etcd is slow sets that. A write
that etcd is still busy with must not be sent again."""
WRITE_TIMEOUT: Final = 5.0
"""Seconds that a write may take in all, unless the caller, or a longer `request_timeout`, says otherwise."""


def write_attempt_timeout(etcd: EtcdCalls) -> float:
    """Seconds after which an answer of this etcd counts as lost."""
    return max(WRITE_ATTEMPT_TIMEOUT, _request_timeout(etcd) * WRITE_ATTEMPT_PART)


def write_timeout(etcd: EtcdCalls) -> float:
    """Seconds that a write may take in all, by default."""
    return max(WRITE_TIMEOUT, _request_timeout(etcd))


def _request_timeout(etcd: EtcdCalls) -> float:
    return etcd.config.request_timeout if etcd.config else 0.0


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """How a guarded write ended.

    Args:
        done: whether the key holds the value that was to be written.
        kv: the key as it is now; None if it does not exist.
        reads: the results of `before` and `reads`, in this order.
        revision: etcd's revision of all of this.
    """

    done: bool
    kv: KeyValue | None
    reads: tuple[RangeResult, ...]
    revision: int


def write_once(
    etcd: EtcdCalls,
    put: Put,
    expected: KeyValue | None,
    *,
    guards: Sequence[Compare] = (),
    also: Sequence[Op] = (),
    before: Sequence[Get] = (),
    reads: Sequence[Get] = (),
    timeout: float | None = None,
) -> WriteOutcome:
    """Write `put` if its key was not written since it was as `expected` (None: absent), and the other `guards` hold.

    `also` is done in the same transaction. `reads` are answered at its revision, whether it wrote or not, and `before`
    as of right before it wrote. If the answer is lost, the same transaction is sent again: its guard lets it happen
    only once, and the value, which must differ from all others that were ever written to the key, shows whether an
    earlier attempt wrote it. `before` may then show the state after that attempt. If etcd has no space the key is read,
    since etcd may have made the write anyway.

    Raises OutcomeUnknown or EtcdUnavailable (nothing was written) when there is no answer within `timeout` seconds
    (`write_timeout(etcd)` if None), EtcdNoSpace when etcd had no space and the key does not hold the value, and the
    other errors of `Etcd.txn`.
    """
    compares = [unchanged(put.key, expected.mod_revision if expected else 0), *guards]
    failure = [*before, Get(Span(put.key)), *reads]
    success = [*before, put, *also, *reads]
    whole, longest = TimeLimit.of(write_timeout(etcd) if timeout is None else timeout), write_attempt_timeout(etcd)
    lost: list[EtcdError] = []

    def attempt() -> TxnResult:
        try:
            return etcd.txn(compares, success, failure, timeout=whole.left(longest))
        except OutcomeUnknown as error:
            log.debug("a write of %s is sent again: %s", put.key, error)
            lost.append(error)
            raise

    def read() -> TxnResult:
        return read_snapshot(
            lambda get: etcd.range(get, timeout=whole.left(longest)), lambda then: _as_refused(then, failure)
        )

    never = concurrency.event()
    try:
        try:
            result = retry(attempt, UNANSWERED, whole.deadline, never)
        except EtcdNoSpace as error:
            lost.append(error)  # it may have written all the same
            result = retry(read, UNANSWERED, whole.deadline, never)
            kv = result.range(len(before)).one
            if kv is None or kv.value != put.value:
                raise
    except (ClientClosed, EtcdUnavailable) as error:
        if not lost:
            raise
        raise OutcomeUnknown(f"a write was not answered, and then: {error}") from None
    kv = after_put(put, expected, result.revision) if result.succeeded else result.range(len(before)).one
    done = kv is not None and kv.value == put.value
    at_reads = len(result.results) - len(reads)
    found = [*range(len(before)), *range(at_reads, len(result.results))]
    return WriteOutcome(done, kv, tuple(map(result.range, found)), result.revision)


def after_put(put: Put, before: KeyValue | None, revision: int) -> KeyValue:
    """The key after a put at this revision that was guarded by its state before."""
    if before is None:
        return KeyValue(put.key, put.value, revision, revision, 1, put.lease)
    return before._replace(value=put.value, mod_revision=revision, version=before.version + 1, lease=put.lease)


def _as_refused(then: SnapshotReader, gets: Sequence[Get]) -> TxnResult:
    """What a transaction whose guards do not hold answers, without a transaction. Raises EtcdError."""
    found = then.ranges(gets)
    return TxnResult(False, then.revision, tuple(replace(one, revision=then.revision) for one in found))


# -- changes whose values may repeat ----------------------------------------------------------------------------------

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
