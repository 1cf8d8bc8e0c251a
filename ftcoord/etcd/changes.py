"""Changes that are made once each, though answers get lost.

    <prefix><id>    how many changes this writer made: empty, its version is the count

Each change is one transaction that also puts the writer's count, guarded by the count's version. When an answer
is lost the same transaction is sent again: if the first one happened the guard fails, so no change is made twice.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from ftcoord.errors import EtcdUnavailable, LeaseLost, OutcomeUnknown, RequestRefused, RoundOver
from ftcoord.etcd.api import Compare, Etcd, Get, KeyValue, Op, Put, RangeResult, Span, TxnResult, exists
from ftcoord.etcd.patience import persist
from ftcoord.etcd.session import Session


@dataclass(frozen=True, slots=True)
class Made:
    """Whether the guards held, so that the change was made; and the key that was asked for.

    When it was made, `kv` is the key right after it, without its value; else as it is.
    """

    done: bool
    kv: KeyValue | None = None


class Changes:
    """A writer of changes, for the threads of one process.

    Args:
        etcd: the door to etcd.
        prefix: its count is a key that starts with this.
        ttl: seconds that its keys outlive it.
        lease: put the keys under this lease instead, and never renew it.
        fence: a key; once it is gone, every change raises RoundOver.
        closed: set it to make it give up.
    """

    def __init__(
        self, etcd: Etcd, prefix: str, ttl: int, lease: int | None, fence: str | None, closed: threading.Event
    ) -> None:
        self._etcd, self._prefix, self._ttl, self._lease, self._fence = etcd, prefix, ttl, lease, fence
        self._closed = closed
        self._session: Session | None = None
        self._lock = threading.Lock()
        self._count, self._made = "", 0
        self._begin_count()

    def make(self, ops: Sequence[Op], guards: Sequence[Compare], look: str | None, deadline: float) -> Made:
        """Make a change if the guards hold, and tell what became of the key `look`.

        Raises EtcdUnavailable or OutcomeUnknown after the deadline, RoundOver, and what etcd refuses it with.
        """
        with self._lock:
            while True:
                try:
                    made = self._attempt(ops, guards, look, deadline)
                except (EtcdUnavailable, OutcomeUnknown):
                    self._begin_count()  # one of unknown outcome must not be taken for the next one
                    raise
                if made is not None:
                    return made

    def close(self) -> None:
        """The keys expire after `ttl` from now on."""
        if self._session is not None:
            self._session.orphan()

    def _attempt(self, ops: Sequence[Op], guards: Sequence[Compare], look: str | None, deadline: float) -> Made | None:
        """As `make`, with None for "again": the lease or the count had to be made anew."""
        fences = [] if self._fence is None else [exists(self._fence)]
        compares = [Compare(self._count, "version", "=", self._made), *guards, *fences]
        try:
            lease = self._lease_id(deadline)
            leased = [replace(op, lease=lease) if isinstance(op, Put) else op for op in ops]
            success = [*leased, Put(self._count, b"", lease), *_gets(look, keys_only=True)]
            failure = [Get(Span(self._count)), Get(Span(self._fence or self._count)), *_gets(look)]
            result = persist(
                lambda left: self._etcd.txn(compares, success, failure, timeout=left), deadline, self._closed
            )
        except LeaseLost as error:
            self._lease_is_gone(error)
            return None
        if result.succeeded:
            self._made += 1
            return Made(True, result.range(len(success) - 1).one if look else None)
        return self._judge(result, look, deadline)

    def _judge(self, result: TxnResult, look: str | None, deadline: float) -> Made | None:
        count = result.range(0).one
        made = count.version if count else 0
        if count and made == self._made + 1:  # an earlier answer was lost
            self._made = made
            return Made(True, self._look_back(look, count.mod_revision, deadline))
        if self._fence is not None and result.range(1).one is None:
            raise RoundOver(f"the round of {self._fence} is over; join the next one and use its store")
        if made != self._made:
            self._begin_count()
            return None
        return Made(False, result.range(2).one if look else None)

    def _look_back(self, look: str | None, revision: int, deadline: float) -> KeyValue | None:
        """What the key was right after a change whose answer was lost."""
        for get in _gets(look, keys_only=True, revision=revision):
            try:
                return persist(partial(self._read, get), deadline, self._closed).one
            except RequestRefused as error:
                raise OutcomeUnknown(f"the change was made, but etcd forgot what it made of {look}: {error}") from error
        return None

    def _read(self, get: Get, left: float) -> RangeResult:
        return self._etcd.range(get, timeout=left)

    def _lease_id(self, deadline: float) -> int:
        if self._lease is not None:
            return self._lease
        if self._session is None:
            self._session = persist(lambda left: Session(self._etcd, self._ttl), deadline, self._closed)
        return self._session.lease_id

    def _lease_is_gone(self, error: LeaseLost) -> None:
        if self._session is None:
            raise RoundOver(f"the run of {self._prefix} is gone from etcd, and its store with it: {error}") from error
        self._session.orphan()
        self._session = None
        self._begin_count()

    def _begin_count(self) -> None:
        self._count, self._made = f"{self._prefix}{uuid.uuid4().hex}", 0


def _gets(key: str | None, keys_only: bool = False, revision: int = 0) -> list[Get]:
    return [] if key is None else [Get(Span(key), keys_only=keys_only, revision=revision)]
