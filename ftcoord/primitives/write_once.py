"""Writes whose lost answers are settled: guarded by a revision and recognisable by their value."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from ftcoord import concurrency
from ftcoord.errors import ClientClosed, EtcdUnavailable, OutcomeUnknown
from ftcoord.etcd.api import Compare, Etcd, Get, KeyValue, Op, Put, RangeResult, Span, TxnResult, unchanged
from ftcoord.etcd.retry import UNANSWERED, retry

log = logging.getLogger(__name__)

ATTEMPT: Final = 1.5
"""Seconds after which an answer counts as lost. A leader that dies takes with it what was proposed to it, and etcd says
so to the client only after 7 s; by now there is a new one."""
LEAST: Final = 0.05
"""Seconds that a try may take in any case."""
PATIENCE: Final = 5.0
"""Seconds that a write may take, where nothing else is said."""


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """How a guarded write ended: whether the key now holds our value, what it holds, and the reads made with it."""

    done: bool
    kv: KeyValue | None
    reads: tuple[RangeResult, ...]
    revision: int


def write_once(
    etcd: Etcd,
    put: Put,
    expected: int,
    *,
    guards: Sequence[Compare] = (),
    also: Sequence[Op] = (),
    reads: Sequence[Get] = (),
    timeout: float | None = None,
) -> WriteOutcome:
    """Write `put` if its key is still at mod revision `expected` (0: absent) and the other `guards` hold.

    `also` is done in the same transaction; `reads` are answered at its revision, whether it wrote or not.
    When the answer is lost, the same transaction is sent again: its guard lets it happen only once, and the value,
    which must be unlike all others ever written to the key, tells whether an earlier one did.

    Raises OutcomeUnknown or EtcdUnavailable (nothing was written) when there is no answer within `timeout` seconds, and
    what else `Etcd.txn` raises.
    """
    compares = [unchanged(put.key, expected), *guards]
    look = [Get(Span(put.key)), *reads]
    success, failure = [put, *also, *look], look
    deadline = concurrency.now() + (PATIENCE if timeout is None else timeout)
    lost: list[OutcomeUnknown] = []

    def attempt() -> TxnResult:
        try:
            left = max(deadline - concurrency.now(), LEAST)
            return etcd.txn(compares, success, failure, timeout=min(left, ATTEMPT))
        except OutcomeUnknown as error:
            log.debug("settling a write of %s: %s", put.key, error)
            lost.append(error)
            raise

    try:
        result = retry(attempt, UNANSWERED, deadline, concurrency.event())
    except (ClientClosed, EtcdUnavailable) as error:
        if not lost:
            raise
        raise OutcomeUnknown(f"a write was not answered, and then: {error}") from None
    first = len(success) - len(look) if result.succeeded else 0
    kv = result.range(first).one
    done = kv is not None and kv.value == put.value
    answers = tuple(result.range(first + 1 + i) for i in range(len(reads)))
    return WriteOutcome(done, kv, answers, result.revision)


Amendment: TypeAlias = tuple[bytes, Sequence[Op]]
"""A key's new value, and what to do in the same transaction."""


def amend(
    etcd: Etcd, key: str, ttl: int, change: Callable[[KeyValue | None], Amendment | None], timeout: float
) -> None:
    """Replace a key by what `change` makes of it; None leaves it. Under its lease, or a new one of `ttl` seconds.

    Raises OutcomeUnknown and EtcdUnavailable when etcd cannot be reached in `timeout` seconds.
    """
    done = False
    while not done:
        now = etcd.range(Get(Span(key)), timeout=timeout).one
        amendment = change(now)
        if amendment is None:
            return
        value, also = amendment
        lease = now.lease if now and now.lease else etcd.grant(ttl).id
        expected = now.mod_revision if now else 0
        done = write_once(etcd, Put(key, value, lease), expected, also=also, timeout=timeout).done
