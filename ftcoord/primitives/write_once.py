"""One write that happens at most once even if answers get lost: guarded by a revision, recognised by its value.

For a key whose values are all different. `exactly_once` is for changes whose values may repeat, such as a store's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ftcoord import concurrency
from ftcoord.errors import ClientClosed, EtcdError, EtcdNoSpace, EtcdUnavailable, OutcomeUnknown
from ftcoord.etcd.api import (
    Compare,
    EtcdCalls,
    Get,
    KeyValue,
    Op,
    Put,
    RangeResult,
    SnapshotReader,
    Span,
    TxnResult,
    read_snapshot,
    unchanged,
)
from ftcoord.etcd.retry import UNANSWERED, TimeLimit, retry

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
