"""Writes that happen at most once even if answers get lost: guarded by a key's revision, recognised by its value.

`write_once` writes a key whose values are all different, such as a record. `ExactlyOnceWriter` makes changes whose
values may repeat, such as a store's: each goes beside a `write_once` of a key of the writer's own, its *count*.
"""

from __future__ import annotations

import itertools
import logging
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from ftcoord import concurrency, errors
from ftcoord.etcd import api
from ftcoord.etcd.api import Compare, Etcd, Get, KeyValue, Op, Put, Span
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


def write_attempt_timeout(etcd: Etcd) -> float:
    """Seconds after which an answer of this etcd counts as lost."""
    return max(WRITE_ATTEMPT_TIMEOUT, _request_timeout(etcd) * WRITE_ATTEMPT_PART)


def write_timeout(etcd: Etcd) -> float:
    """Seconds that a write may take in all, by default."""
    return max(WRITE_TIMEOUT, _request_timeout(etcd))


def _request_timeout(etcd: Etcd) -> float:
    return etcd.config.request_timeout if etcd.config else 0.0


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """How a guarded write ended.

    Args:
        done: whether the key holds the value that was to be written.
        kv: the key as it is now; None if it does not exist.
        reads: the results of the `reads`.
        revision: etcd's revision of all of this.
    """

    done: bool
    kv: KeyValue | None
    reads: tuple[api.RangeResult, ...]
    revision: int


def write_once(
    etcd: Etcd,
    put: Put,
    expected: KeyValue | None,
    *,
    guards: Sequence[Compare] = (),
    also: Sequence[Op] = (),
    reads: Sequence[Get] = (),
    timeout: float | None = None,
    cancelled: concurrency.Event | None = None,
    lost: list[errors.EtcdError] | None = None,
) -> WriteOutcome:
    """Write `put` if its key was not written since it was as `expected` (None: absent), and the other `guards` hold.

    `also` is done in the same transaction. `reads` are answered at its revision, whether it wrote or not. If the answer
    is lost, the same transaction is sent again: its guard lets it happen only once, and the value, which must differ
    from all others that were ever written to the key, shows whether an earlier attempt wrote it. If etcd has no space
    the key is read, since etcd may have made the write anyway. `cancelled` ends the repetitions. `lost` gets the errors
    of attempts that may have been made, or may still be.

    Raises OutcomeUnknown or EtcdUnavailable (nothing was written) when there is no answer within `timeout` seconds
    (`write_timeout(etcd)` if None), EtcdNoSpace when etcd had no space and the key does not hold the value, and the
    other errors of `Etcd.txn`.
    """
    compares = [api.unchanged(put.key, expected.mod_revision if expected else 0), *guards]
    failure = [Get(Span(put.key)), *reads]
    success = [put, *also, *reads]
    whole, longest = TimeLimit.of(write_timeout(etcd) if timeout is None else timeout), write_attempt_timeout(etcd)
    lost = [] if lost is None else lost

    def attempt() -> api.TxnResult:
        try:
            return etcd.txn(compares, success, failure, timeout=whole.left(longest))
        except errors.OutcomeUnknown as error:
            log.debug("a write of %s is sent again: %s", put.key, error)
            lost.append(error)
            raise

    def read() -> api.TxnResult:
        return api.read_snapshot(
            lambda get: etcd.range(get, timeout=whole.left(longest)), lambda then: _as_refused(then, failure)
        )

    never = cancelled or concurrency.event()
    try:
        try:
            result = retry(attempt, UNANSWERED, whole.deadline, never)
        except errors.EtcdNoSpace as error:
            lost.append(error)  # it may have written all the same
            result = retry(read, UNANSWERED, whole.deadline, never)
            kv = result.range(0).one
            if kv is None or kv.value != put.value:
                raise
    except (errors.ClientClosed, errors.EtcdUnavailable) as error:
        if not lost:
            raise
        raise errors.OutcomeUnknown(f"a write was not answered, and then: {error}") from None
    kv = after_put(put, expected, result.revision) if result.succeeded else result.range(0).one
    done = kv is not None and kv.value == put.value
    found = range(len(result.results) - len(reads), len(result.results))
    return WriteOutcome(done, kv, tuple(map(result.range, found)), result.revision)


def after_put(put: Put, before: KeyValue | None, revision: int) -> KeyValue:
    """The key after a put at this revision that was guarded by its state before."""
    if before is None:
        return KeyValue(put.key, put.value, revision, revision, 1, put.lease)
    return before._replace(value=put.value, mod_revision=revision, version=before.version + 1, lease=put.lease)


def _as_refused(then: api.SnapshotReader, gets: Sequence[Get]) -> api.TxnResult:
    """What a transaction whose guards do not hold answers, without a transaction. Raises EtcdError."""
    found = then.ranges(gets)
    return api.TxnResult(False, then.revision, tuple(replace(one, revision=then.revision) for one in found))


# -- changes whose values may repeat -----------------------------------------------------------------------------------

_Lost: TypeAlias = list[errors.EtcdError]
"""The errors of attempts that may have been made, or may still be."""
STORE_CLOSED: Final = "the store was closed; make a new one"
_GONE: Final = "a change was not answered, and etcd key {!r}, which shows whether it was made, is gone: read again"


@dataclass(frozen=True, slots=True)
class Made:
    """Whether the guards held, so that the change was made; and the key that was asked for.

    If it was made, `kv` is the key right after it (None if etcd has compacted that). Otherwise it is the present key.
    """

    done: bool
    kv: KeyValue | None = None


class ExactlyOnceWriter:
    """A writer of changes. Thread-safe; not usable in a forked child.

    Its count, `<prefix><id>`, holds the number of its last change. If a change's own guards fail after an attempt
    without an answer, that attempt could still arrive. So the count is then written once more, alone, and no attempt
    can use what it was before.

    Args:
        etcd: the etcd client.
        prefix: the prefix of the key of its count.
        ttl: seconds that its keys outlive it.
        lease: attach the keys to this lease instead, and never renew it.
        fence: a key that must exist; once it is gone, every change raises RoundOver.
        closed: set it to make all calls give up.
    """

    def __init__(
        self, etcd: Etcd, prefix: str, ttl: int, lease: int | None, fence: str | None, closed: concurrency.Event
    ) -> None:
        # Never change:
        self._etcd, self._prefix, self._ttl, self._lease = etcd, prefix, ttl, lease
        self._fences, self._closed = () if fence is None else (fence,), closed
        self._owner = OwnerProcess("this store belongs to the parent process")
        # Held during a whole change, with its requests, since changes are counted one by one. Guards all below.
        # Reentrant: a signal handler may make a change in the middle of another.
        self._lock = concurrency.rlock("ExactlyOnceWriter._lock")
        self._changing = False
        self._numbers = itertools.count(1)
        self._count: tuple[str, KeyValue | None] = self._new_count()  # its key, and what that must be
        self._session: Session | None = None  # `close()` reads it without the lock, after `closed` is set

    def make(self, ops: Sequence[Op], guards: Sequence[Compare], look: str | None, deadline: float) -> Made:
        """Make a change if the guards hold; the result has the key `look` at that moment.

        Raises EtcdUnavailable or OutcomeUnknown after the monotonic `deadline`, EtcdNoSpace when etcd had no space and
        has not made it, RoundOver, ClientClosed, and the errors with which etcd refuses it.
        """
        with self._turn(deadline):
            made, lost = None, list[errors.EtcdError]()
            try:
                while made is None:
                    made = self._attempt(ops, guards, look, deadline, lost)
            except errors.EtcdUnavailable as error:  # so says the last attempt; an earlier one may have been made
                if not lost:
                    raise
                raise errors.OutcomeUnknown(f"a change was not answered, and then: {error}") from None
            finally:
                if made is None:
                    self._count = self._new_count()  # a change of unknown outcome must not be taken for the next one
            return made

    def close(self) -> None:
        """Let the keys expire, `ttl` seconds from now. Set `closed` before."""
        if self._session is not None:
            self._session.orphan()

    @contextmanager
    def _turn(self, deadline: float) -> Iterator[None]:
        """One change at a time. A change made inside another one, in a signal handler, has its own count."""
        self._owner.check()
        busy = errors.EtcdUnavailable("other changes of this store were not answered in time; try again")
        with concurrency.held(self._lock, deadline, busy):
            is_nested, outer = self._changing, self._count
            if is_nested:
                self._count = self._new_count()
            self._changing = True
            try:
                if self._closed.is_set():
                    raise errors.ClientClosed(STORE_CLOSED)
                yield
            finally:
                self._changing = is_nested
                if is_nested:
                    self._count = outer

    def _attempt(
        self,
        ops: Sequence[Op],
        guards: Sequence[Compare],
        look: str | None,
        deadline: float,
        lost: list[errors.EtcdError],
    ) -> Made | None:
        """As `make`; None if it must be repeated, with the new lease or count that it needed."""
        key, before = self._count
        try:
            lease = self._lease_id(deadline)
            change = Put(key, b"%d" % next(self._numbers), lease)
            outcome = self._write(
                change,
                deadline,
                lost,
                guards=[*guards, *map(api.exists, self._fences)],
                also=[Put(op.key, op.value, lease) if isinstance(op, Put) else op for op in ops],
                reads=[Get(Span(name)) for name in (*self._fences, look) if name],
            )
            if outcome.done:
                return self._made(outcome, look, deadline)
            for fence, found in zip(self._fences, outcome.reads, strict=False):
                if found.one is None:
                    raise round_over(fence)
            if _revision(outcome.kv) != _revision(before):
                if lost:
                    raise errors.OutcomeUnknown(_GONE.format(key))
                self._count = self._new_count()  # its lease has ended, as the next attempt shows
                return None
            refused = Made(False, outcome.reads[-1].one if look else None)
            if not lost:
                return refused
            spent = self._write(Put(key, b"%d" % next(self._numbers), lease), deadline, [])
            if spent.kv is not None and spent.kv.value == change.value:  # the change arrived after all, before this
                return self._made(spent, look, deadline)
            if not spent.done:
                raise errors.OutcomeUnknown(_GONE.format(key))
            self._count = key, spent.kv
            return refused
        except errors.LeaseLost as error:
            self._lease_is_gone(error, is_unknown=bool(lost))
            return None

    def _write(self, put: Put, deadline: float, lost: _Lost, **beside: Any) -> WriteOutcome:
        """Write the count."""
        left = max(deadline - concurrency.now(), SHORTEST_TIMEOUT)
        return write_once(self._etcd, put, self._count[1], timeout=left, cancelled=self._closed, lost=lost, **beside)

    def _made(self, outcome: WriteOutcome, look: str | None, deadline: float) -> Made:
        """The change was made when the count was written."""
        assert outcome.kv is not None
        self._count = outcome.kv.key, outcome.kv
        if look is None:
            return Made(True)
        if outcome.reads and outcome.kv.mod_revision == outcome.revision:
            return Made(True, outcome.reads[-1].one)
        get = Get(Span(look), revision=outcome.kv.mod_revision)  # an answer was lost: the key may have changed since
        try:
            read = retry_until_answered(lambda left: self._etcd.range(get, timeout=left), deadline, self._closed)
        except errors.RequestRefused:
            return Made(True)  # compacted
        return Made(True, read.one)

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
            with suppress(errors.EtcdError):  # it expires by itself
                session.close(within.left())
            return earlier
        if self._closed.is_set():  # meanwhile: `close()` may have seen no session
            session.orphan()
        return session

    def _lease_is_gone(self, error: errors.LeaseLost, is_unknown: bool) -> None:
        """Begin a new count, which goes with the next lease."""
        if self._session is None:
            raise errors.RoundOver(
                f"the run of {self._prefix} is gone from etcd, and its store with it: {error}; join again"
            ) from None
        self._session.orphan()
        self._session = None
        if is_unknown:  # the count, which shows whether it happened, went with the lease
            raise errors.OutcomeUnknown(
                f"a change was not answered, and then its lease was gone: {error}; read again"
            ) from None
        self._count = self._new_count()

    def _new_count(self) -> tuple[str, None]:
        return f"{self._prefix}{uuid.uuid4().hex}", None


def round_over(fence: str) -> errors.RoundOver:
    """The error when the fence is gone."""
    return errors.RoundOver(f"the round of {fence} is over; join the next one and use its store")


def _revision(kv: KeyValue | None) -> int:
    return 0 if kv is None else kv.mod_revision
