"""Requests and results of etcd's v3 API as plain values, and the client protocol (`Etcd`) that ftcoord uses.

No grpc and no protobuf, so `tests/virtual` has an in-memory etcd behind the same protocol. The semantics are those
of etcd's v3 API, https://etcd.io/docs/v3.5/learning/api/.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from ftcoord.config import EtcdConfig
from ftcoord.core.layout import Span as Span, decode_key as decode_key, encode_key as encode_key, member_id, member_of
from ftcoord.errors import RequestRefused

T = TypeVar("T")


class KeyValue(NamedTuple):
    """One key as etcd stored it. A `mod_revision` of 0 with an empty value means that there is no such key.

    Args:
        key: the key.
        value: its value.
        create_revision: etcd's revision when the key was created.
        mod_revision: etcd's revision when the key was last written.
        version: how often the key was written since it was created; 1 after the first write.
        lease: the lease that the key is attached to; 0 for none.
    """

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int


def is_member(kv: KeyValue) -> bool:
    """Whether the key is a member's: it is attached to the lease that it is named after, so it will be deleted."""
    return kv.lease != 0 and member_of(kv.key) == member_id(kv.lease)


@dataclass(frozen=True, slots=True)
class Get:
    """Read the keys of a span.

    Args:
        span: the keys.
        limit: the most keys to return; 0 for all.
        keys_only: leave the values empty.
        count_only: return no keys, only their number.
        order: by the bytes of the keys, or by creation, the oldest or the newest first.
        revision: read as of this past revision; 0 for the newest. RequestRefused is raised if etcd has compacted it.
    """

    span: Span
    limit: int = 0
    keys_only: bool = False
    count_only: bool = False
    order: Literal["keys", "oldest", "newest"] = "keys"
    revision: int = 0


@dataclass(frozen=True, slots=True)
class Put:
    """Write one key.

    Args:
        key: the key.
        value: its value: bytes, at most 1.5 MiB on default settings of etcd.
        lease: the lease to attach the key to; 0 for none: the key then never expires.
    """

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
    """One guard of a transaction: the `target` of `key` must stand in `relation` to `operand`.

    Args:
        key: the key.
        target: its create revision, mod revision, version, value or lease.
        relation: how the two compare.
        operand: bytes for ``value``, else an int.
    """

    key: str
    target: Literal["create", "mod", "version", "value", "lease"]
    relation: Literal["=", "!=", ">", "<"]
    operand: int | bytes


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
    """Raises RequestRefused for a transaction that only reads: it could crash etcd, see `read_snapshot`."""
    ops = (*success, *failure)
    if ops and all(isinstance(op, Get) for op in ops):
        raise RequestRefused(
            "a transaction that reads must put or delete a key too, in one of its branches: etcd before 3.5.7 crashes"
            " when the client of one that only reads goes away. Read with ftcoord.etcd.api.read_snapshot"
        )


@dataclass(frozen=True, slots=True)
class RangeResult:
    """What a Get found.

    Args:
        kvs: the keys.
        count: how many keys the span has, whatever the Get's `limit`.
        revision: etcd's revision at which they were read; in a transaction, that of the transaction.
    """

    kvs: tuple[KeyValue, ...]
    count: int
    revision: int

    @property
    def one(self) -> KeyValue | None:
        """The only key of a single-key Get, or None."""
        return self.kvs[0] if self.kvs else None


@dataclass(frozen=True, slots=True)
class TxnResult:
    """What a transaction did.

    Args:
        succeeded: True if all guards held and `success` ran; False if `failure` ran.
        revision: etcd's revision after the transaction.
        results: one entry per operation of the branch that ran: a RangeResult for a Get, None for a Put, the number of
            deleted keys for a Delete.
    """

    succeeded: bool
    revision: int
    results: tuple[RangeResult | int | None, ...]

    def range(self, index: int) -> RangeResult:
        """The result of the Get at `index`. Raises TypeError if that operation is no Get."""
        result = self.results[index]
        if not isinstance(result, RangeResult):
            raise TypeError(f"operation {index} of the transaction is not a Get")
        return result

    def deleted(self, index: int) -> int:
        """How many keys the Delete at `index` removed. Raises TypeError if that operation is no Delete."""
        result = self.results[index]
        if not isinstance(result, int):
            raise TypeError(f"operation {index} of the transaction is not a Delete")
        return result


@dataclass(frozen=True, slots=True)
class Lease:
    """A granted lease.

    Args:
        id: the lease's id.
        ttl: the TTL that etcd granted, in seconds. It may be longer than the one requested.
    """

    id: int
    ttl: int


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """The status that an etcd member reports, and how long its answer took.

    Args:
        version: its version.
        member_id, leader_id: in hexadecimal, as etcdctl shows them; `leader_id` is empty while there is no leader.
        raft_term: grows with each election.
        db_size, db_size_in_use, db_quota: bytes; the quota is 0 if etcd does not report it (before 3.6).
        is_learner: whether it has no vote yet.
        errors: the errors that it reports.
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
    """One change: `kv` as written; for a deletion, its key and the revision of the deletion."""

    kind: Literal["put", "delete"]
    kv: KeyValue


@dataclass(frozen=True, slots=True)
class Batch:
    """Changes in revision order. All changes of one revision are in one batch."""

    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Began:
    """A watch is established, for the first time or again after an interruption. It has missed no change.

    Args:
        revision: etcd's revision. A watch from now on delivers every change after it.
    """

    revision: int


WatchItem: TypeAlias = "Began | Batch | Exception"
"""What a watch delivers: Began whenever it is established, batches, then at most one exception (Compacted, Rewound,
EtcdAuthError ...), which ends it. See `Etcd.watch` for the order."""


class Watch(Protocol):
    """A running watch."""

    def cancel(self) -> None:
        """Stop it; idempotent. Nothing is delivered after this returns, except by a call already in progress."""


class Etcd(abc.ABC):
    """A client of etcd. Reads are linearizable.

    Every call ends within `timeout` seconds; None stands for the client's default. Calls raise subclasses of EtcdError:
    EtcdUnavailable when the call had no effect, OutcomeUnknown when a write may have had one, EtcdAuthError when etcd
    refuses the login or a permission, RequestRefused when the request is too large or malformed, ClientClosed when the
    client was closed.
    """

    config: EtcdConfig | None
    """How another process reaches the same etcd; None if none can."""

    @abc.abstractmethod
    def range(self, get: Get, *, timeout: float | None = None) -> RangeResult:
        """Read a span of keys. Raises RequestRefused when etcd has compacted the revision that `get` names."""

    @abc.abstractmethod
    def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Op],
        failure: Sequence[Op] = (),
        *,
        timeout: float | None = None,
    ) -> TxnResult:
        """Run `success` if all `compares` hold, else `failure`, as one atomic transaction.

        With an empty `failure`, a guard that does not hold changes nothing: the result is not `succeeded`, and has no
        `results`. Raises OutcomeUnknown (the write may have happened: read before you repeat it), EtcdNoSpace,
        LeaseLost when a Put names a lease that is gone, and RequestRefused also for a transaction of Gets only, which
        could crash etcd before 3.5.7.
        """

    @abc.abstractmethod
    def grant(self, ttl: int, *, timeout: float | None = None) -> Lease:
        """Take a new lease of `ttl` seconds; etcd may grant a longer TTL, see the result. Nobody renews it: see
        `Session`. If the answer is lost, that lease holds no keys, and expires."""

    @abc.abstractmethod
    def renew(self, lease_id: int, *, timeout: float | None = None) -> int:
        """Renew a lease once; returns the TTL granted, in seconds. Raises LeaseLost when it expired or was revoked."""

    @abc.abstractmethod
    def revoke(self, lease_id: int, *, timeout: float | None = None) -> None:
        """Revoke a lease, which deletes its keys. Revoking a lease that is already gone is no error."""

    @abc.abstractmethod
    def watch(
        self, span: Span, start_revision: int, deliver: Callable[[WatchItem], None], *, deletes_only: bool = False
    ) -> Watch:
        """Deliver every change of `span` from `start_revision` on, each once and in order, until cancelled.

        Args:
            span: the keys.
            start_revision: the first revision; 0 for changes from now on. For changes without delay, watch from now on,
                and read when the watch is established: etcd serves watches that start in the past only ten times a
                second.
            deliver: called with Began whenever the watch is established, with each Batch of changes, and at most once
                with the error that ends the watch (Compacted, Rewound, EtcdAuthError, ClientClosed). Runs on the
                client's thread, and must not block. If the client already watches the same span, the confirmation
                comes on the caller's thread before this returns; a change may then come before it.
            deletes_only: whether to leave out puts.

        The watch survives outages of etcd and missing members. Call `cancel()` of the result to end it.
        """

    def get(self, key: str, *, timeout: float | None = None) -> RangeResult:
        """Read one key; `.one` of the result is its KeyValue, or None. Raises as `range`."""
        return self.range(Get(Span(key)), timeout=timeout)

    def put(self, key: str, value: bytes, lease: int = 0, *, timeout: float | None = None) -> TxnResult:
        """Write one key. Raises as `txn`."""
        return self.txn((), (Put(key, value, lease),), timeout=timeout)

    def delete(self, span: Span, *, timeout: float | None = None) -> int:
        """Delete all keys of a span, such as `Span("/key")`, not of a key; returns how many. Raises as `txn`."""
        return self.txn((), (Delete(span),), timeout=timeout).deleted(0)


ATTEMPTS: Final = 3
"""How often a snapshot is read before giving up: etcd may compact its revision meanwhile."""
PAGE: Final = 1000
"""Keys per request: a few hundred kilobytes."""


class SnapshotReader:
    """Reads etcd at the revision of the first read. Not thread-safe. See `read_snapshot`."""

    def __init__(self, read: Callable[[Get], RangeResult]) -> None:
        self._read = read
        self.revision = 0
        """The revision of all reads; 0 before the first."""

    def range(self, get: Get) -> RangeResult:
        """The result of one read; the Get's own `revision` is ignored. Raises EtcdError."""
        found = self._read(replace(get, revision=self.revision))
        self.revision = self.revision or found.revision
        return found

    def ranges(self, gets: Iterable[Get]) -> list[RangeResult]:
        """The result of each read, with one request for each. Raises EtcdError."""
        return [self.range(get) for get in gets]

    def pages(self, span: Span) -> list[KeyValue]:
        """All keys of a span, one request for each thousand. Raises EtcdError."""
        kvs = list[KeyValue]()
        rest = span
        while True:
            found = self.range(Get(rest, limit=PAGE))
            kvs += found.kvs
            if found.count <= len(found.kvs):
                return kvs
            rest = Span(f"{kvs[-1].key}\0", stop=decode_key(span.end))


def read_snapshot(read: Callable[[Get], RangeResult], look: Callable[[SnapshotReader], T]) -> T:
    """What `look` returns for etcd at one revision. It is called again if etcd compacts that revision meanwhile.

    etcd answers a transaction of several reads at one revision. But versions before 3.5.7 crash when the client of such
    a transaction goes away before the answer (https://github.com/etcd-io/etcd/issues/14110 and /14891). So the first
    read here fixes the revision, and the others name it.

    Args:
        read: `Etcd.range`, or a function that repeats it until it is answered.
        look: reads, and changes nothing.

    Raises EtcdError, and what `read` and `look` raise.
    """
    for left in reversed(range(ATTEMPTS)):
        try:
            return look(SnapshotReader(read))
        except RequestRefused:
            if not left:
                raise
    raise AssertionError("no attempt was made")


FLOORS: Final[dict[tuple[int, ...], tuple[int, ...]]] = {(3, 5): (3, 5, 28), (3, 6): (3, 6, 9)}
"""The oldest version of each minor version in which the lease, watch and stale-read bugs that matter here are fixed."""

EMBEDDED_NAMES: Final = "ftcoord-"
"""The prefix of the names of members that ftcoord started. Clients in other processes recognize them by it."""


def newer_wanted(version: str) -> str | None:
    """The version to use instead of this one in real runs; None if this one is new enough."""
    numbers = tuple(int(part) for part in version.split("-")[0].split(".") if part.isdigit())
    floor = FLOORS.get(numbers[:2], (3, 5, 28))
    return ".".join(map(str, floor)) if numbers < floor else None
