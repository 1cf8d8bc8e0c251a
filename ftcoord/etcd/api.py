"""The words in which the rest of ftcoord speaks to etcd, and the client (`Etcd`) that it gets as an argument.

Plain values only: no grpc, no protobuf, so that `ftcoord.testing` can offer an etcd in memory behind the same protocol.
Semantics are those of etcd's v3 API, https://etcd.io/docs/v3.5/learning/api/.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

from ftcoord.config import EtcdConfig
from ftcoord.core.layout import Span as Span
from ftcoord.core.layout import decode_key as decode_key
from ftcoord.core.layout import encode_key as encode_key
from ftcoord.core.layout import member_id, member_of
from ftcoord.errors import EtcdError, RequestRefused


class KeyValue(NamedTuple):
    """One key as etcd stored it. A `mod_revision` of 0 with an empty value stands for "no such key"."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int


def is_member(kv: KeyValue) -> bool:
    """Whether the key is a member's, which lies under the lease that it is named for and so will go one day."""
    return kv.lease != 0 and member_of(kv.key) == member_id(kv.lease)


@dataclass(frozen=True, slots=True)
class Get:
    """Read a span. `order` is that of creation, else of the keys; `created_before` keeps older keys only; `revision` is
    a past one to read at, and RequestRefused is raised when etcd has forgotten it."""

    span: Span
    limit: int = 0
    keys_only: bool = False
    count_only: bool = False
    order: Literal["keys", "oldest", "newest"] = "keys"
    created_before: int = 0
    revision: int = 0


@dataclass(frozen=True, slots=True)
class Put:
    """Write one key; `lease` 0 means that it never expires."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete every key of a span."""

    span: Span


Op: TypeAlias = Get | Put | Delete


@dataclass(frozen=True, slots=True)
class Compare:
    """One guard of a transaction: `key`'s `target` stands in `relation` to `operand`. With an `end`, that of all keys
    from `key` on and before `end`, in the order of their bytes."""

    key: str
    target: Literal["create", "mod", "version", "value", "lease"]
    relation: Literal["=", "!=", ">", "<"]
    operand: int | bytes
    end: bytes = b""


def absent(key: str) -> Compare:
    """Guard: the key does not exist."""
    return Compare(key, "create", "=", 0)


def exists(key: str) -> Compare:
    """Guard: the key exists."""
    return Compare(key, "create", ">", 0)


def unchanged(key: str, mod_revision: int) -> Compare:
    """Guard: the key was last written at `mod_revision` (0: it does not exist)."""
    return Compare(key, "mod", "=", mod_revision)


def check_writes(success: Sequence[Op], failure: Sequence[Op]) -> None:
    """Raises RequestRefused for a transaction that only reads: its client could crash etcd, see `etcd/reading.py`."""
    ops = (*success, *failure)
    if ops and all(isinstance(op, Get) for op in ops):
        raise RequestRefused(
            "a transaction that reads must put or delete a key too, in one of its branches: etcd before 3.5.7 crashes"
            " when the client of one that only reads goes away. Read with ftcoord.etcd.reading.read_snapshot"
        )


@dataclass(frozen=True, slots=True)
class RangeResult:
    """The keys of a Get, and the store's revision at which they were read (in a transaction: the transaction's)."""

    kvs: tuple[KeyValue, ...]
    count: int
    revision: int

    @property
    def one(self) -> KeyValue | None:
        """The only key of a single-key Get, or None."""
        return self.kvs[0] if self.kvs else None


@dataclass(frozen=True, slots=True)
class TxnResult:
    """`succeeded` tells which branch ran; `results` has one entry per operation of it: a
    RangeResult for a Get, None for a Put, the number of deleted keys for a Delete."""

    succeeded: bool
    revision: int
    results: tuple[RangeResult | int | None, ...]

    def range(self, index: int) -> RangeResult:
        """The result of the Get at `index`."""
        result = self.results[index]
        if not isinstance(result, RangeResult):
            raise TypeError(f"operation {index} of the transaction is not a Get")
        return result

    def deleted(self, index: int) -> int:
        """How many keys the Delete at `index` removed."""
        result = self.results[index]
        if not isinstance(result, int):
            raise TypeError(f"operation {index} of the transaction is not a Delete")
        return result


@dataclass(frozen=True, slots=True)
class Lease:
    """A granted lease: its id, and the time to live in seconds that etcd granted, which may not be what was asked."""

    id: int
    ttl: int


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """What a member of etcd says of itself, and the time that its answer took.

    Args:
        version: its release.
        member_id, leader_id: in hexadecimal, as etcdctl shows them; the leader's is empty while there is none.
        raft_term: grows with each election.
        db_size, db_size_in_use, db_quota: bytes; the quota is 0 where the release does not tell it (before 3.6).
        is_learner: whether it has no vote yet.
        errors: what it complains of.
        seconds: from the request to the answer.
    """

    version: str
    member_id: str
    leader_id: str
    raft_term: int
    db_size: int
    db_size_in_use: int
    db_quota: int
    is_learner: bool
    errors: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Event:
    """One change: `kv` as written, or for a deletion its key and the revision of the deletion."""

    kind: Literal["put", "delete"]
    kv: KeyValue


@dataclass(frozen=True, slots=True)
class Batch:
    """Changes in revision order; all changes of one revision are in one batch."""

    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Began:
    """A watch stands, for the first time or, after an interruption, once more; nothing was missed of what etcd has.

    Args:
        revision: where etcd is. A watch from now on delivers all that changes after this.
    """

    revision: int


WatchItem: TypeAlias = "Began | Batch | Exception"
"""What a watch delivers: Began whenever it stands, batches, then at most one exception (Compacted, Rewound,
EtcdAuthError ...), after which it is over. See `Etcd.watch` for the order."""


class Watch(Protocol):
    """A running watch."""

    def cancel(self) -> None:
        """Stop it; idempotent. Nothing is delivered after this returns, but for a call already under way."""


class Renews(Protocol):
    """Keeps leases alive: the part of `Etcd` that a kept lease needs."""

    def renew(self, lease_id: int, *, timeout: float | None = None) -> int: ...


class EtcdCalls(Protocol):
    """The calls that are answered once: the part of `Etcd` that a small client has too. See there."""

    @property
    def config(self) -> EtcdConfig | None:
        """How another process reaches the same etcd; None if none can."""

    def range(self, get: Get, *, timeout: float | None = None) -> RangeResult: ...

    def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Op],
        failure: Sequence[Op] = (),
        *,
        timeout: float | None = None,
    ) -> TxnResult: ...

    def grant(self, ttl: int, *, timeout: float | None = None) -> Lease:
        """A new lease of `ttl` seconds. One whose answer was lost holds nothing, and expires."""

    def renew(self, lease_id: int, *, timeout: float | None = None) -> int:
        """Keep a lease alive; the TTL granted, in seconds. Raises LeaseLost."""

    def revoke(self, lease_id: int, *, timeout: float | None = None) -> None:
        """Revoke a lease; one that is already gone is no error."""


class Etcd(EtcdCalls, Protocol):
    """A client of etcd. Every call has a deadline, is linearizable, and raises the EtcdError family: EtcdUnavailable
    when it had no effect, OutcomeUnknown when a write may have had one, ClientClosed after the client was closed."""

    def submit(
        self,
        compares: Sequence[Compare],
        success: Sequence[Op],
        done: Callable[[TxnResult | EtcdError], None],
        *,
        timeout: float,
    ) -> None:
        """A transaction that writes, for a caller that does not wait for it. It may share a request, and a revision,
        with others that are made at the same time.

        `done` is called once with the result, or with what `txn` would raise, on this thread before this returns or on
        the client's. It must not block."""

    def watch(
        self, span: Span, start_revision: int, deliver: Callable[[WatchItem], None], *, deletes_only: bool = False
    ) -> Watch:
        """Deliver every change of `span` from `start_revision` on, each once and in order, until cancelled.

        A `start_revision` of 0 is from now on. To hear of changes at once, watch first and read when the watch stands:
        etcd serves watches that begin in its past only ten times a second. With `deletes_only` etcd sends no puts.

        `deliver` is called on the client's own thread and must not block. If the client watches the same already, the
        confirmation (Began) comes on the caller's thread before this returns; a change may then come before it."""


class KeyCalls(abc.ABC):
    """The short forms of reads and writes of single keys, on top of the two calls of `Etcd` that they stand for."""

    @abc.abstractmethod
    def range(self, get: Get, *, timeout: float | None = None) -> RangeResult: ...

    @abc.abstractmethod
    def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Op],
        failure: Sequence[Op] = (),
        *,
        timeout: float | None = None,
    ) -> TxnResult: ...

    def get(self, key: str, *, timeout: float | None = None) -> RangeResult:
        """Read one key; `.one` of the result is its KeyValue or None."""
        return self.range(Get(Span(key)), timeout=timeout)

    def put(self, key: str, value: bytes, lease: int = 0, *, timeout: float | None = None) -> TxnResult:
        """Write one key. Raises OutcomeUnknown when the answer was lost."""
        return self.txn((), (Put(key, value, lease),), timeout=timeout)

    def delete(self, span: Span, *, timeout: float | None = None) -> int:
        """Delete a span; the number of keys that were deleted. Raises OutcomeUnknown when the answer was lost."""
        return self.txn((), (Delete(span),), timeout=timeout).deleted(0)
