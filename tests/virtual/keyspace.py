"""etcd's data model in memory: keys with their revisions, transactions, history and compaction.

No lock, no clock and no thread: `virtual.etcd` guards it. The rules are etcd's own
(https://etcd.io/docs/v3.5/learning/data_model/), and tests/contract/test_etcd_contract.py holds both to them.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from ftcoord.errors import LeaseLost, RequestRefused
from ftcoord.etcd import api

MAX_OPS: Final = 128
"""Guards, and operations of a branch, that one transaction may have."""
MAX_BYTES: Final = 3 << 19
"""1.5 MiB: what one request may hold."""

_RELATIONS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


class Transaction(NamedTuple):
    """What one request asks for."""

    compares: Sequence[api.Compare]
    success: Sequence[api.Op]
    failure: Sequence[api.Op] = ()

    @property
    def puts(self) -> bool:
        """Whether one of its branches puts a key: an etcd that is out of space refuses it then."""
        return any(isinstance(op, api.Put) for branch in (self.success, self.failure) for op in branch)


class KeySpace:
    """The keys of one etcd and their history. A new one is at revision 1, as an empty etcd is."""

    def __init__(self) -> None:
        self.revision = 1
        self.compacted = 0
        self._kvs: dict[str, api.KeyValue] = {}
        self._base: dict[str, api.KeyValue] = {}  # what there was before the oldest revision of the log
        self._log: list[tuple[int, tuple[api.Event, ...]]] = []

    def copy(self) -> KeySpace:
        """A copy to go back to."""
        twin = KeySpace()
        twin.revision, twin.compacted = self.revision, self.compacted
        twin._kvs, twin._base, twin._log = dict(self._kvs), dict(self._base), list(self._log)
        return twin

    def range(self, get: api.Get) -> api.RangeResult:
        """Answer a read. Raises RequestRefused for a revision that was compacted, or is yet to come."""
        kvs = self._at(get.revision) if get.revision > 0 else self._kvs
        return _select(kvs, get, self.revision)

    def txn(self, asked: Transaction, is_lease: Callable[[int], bool]) -> tuple[api.TxnResult, tuple[api.Event, ...]]:
        """Run a transaction; its answer, and what it changed. All that it changes has one revision.

        Raises RequestRefused, and LeaseLost for a put under a lease that `is_lease` does not know. Nothing is changed
        then.
        """
        _check(asked)
        succeeded = all(_fits(compare, self._kvs.get(compare.key)) for compare in asked.compares)
        ops = asked.success if succeeded else asked.failure
        for op in ops:
            if isinstance(op, api.Put) and op.lease and not is_lease(op.lease):
                raise LeaseLost("etcdserver: requested lease not found; it expired or was revoked: take a new one")
        for op in ops:
            if isinstance(op, api.Get) and op.revision > 0:
                self._at(op.revision)  # raises before anything is written
        events: list[api.Event] = []
        results = [self._run(op, events) for op in ops]
        self._commit(events)
        revision = self.revision
        if events:  # what it read, it read at the revision of what it wrote
            results = [
                api.RangeResult(r.kvs, r.count, revision) if isinstance(r, api.RangeResult) else r for r in results
            ]
        return api.TxnResult(succeeded, revision, tuple(results)), tuple(events)

    def drop_lease(self, lease: int) -> tuple[api.Event, ...]:
        """Delete the keys under a lease, at one revision and in the order of the keys; what was deleted."""
        events: list[api.Event] = []
        for key in sorted((kv.key for kv in self._kvs.values() if kv.lease == lease), key=api.encode_key):
            self._delete(key, events)
        self._commit(events)
        return tuple(events)

    def since(self, span: api.Span, revision: int, deletes_only: bool) -> tuple[api.Event, ...]:
        """What changed in `span` from `revision` on, which must not be compacted."""
        first = bisect.bisect_left(self._log, revision, key=lambda entry: entry[0])
        return tuple(event for _, events in self._log[first:] for event in concerning(events, span, deletes_only))

    def compact(self, revision: int) -> None:
        """Forget what was before `revision`. Raises RequestRefused if that is done already, or for a future one."""
        if revision <= self.compacted:
            raise RequestRefused("etcdserver: mvcc: required revision has been compacted")
        if revision > self.revision:
            raise RequestRefused("etcdserver: mvcc: required revision is a future revision")
        kept = bisect.bisect_left(self._log, revision, key=lambda entry: entry[0])
        self._base = _replay(self._base, self._log[:kept])
        self._log = self._log[kept:]
        self.compacted = revision

    def _at(self, revision: int) -> dict[str, api.KeyValue]:
        """The keys as they were at a revision."""
        if revision < self.compacted:
            raise RequestRefused("etcdserver: mvcc: required revision has been compacted")
        if revision > self.revision:
            raise RequestRefused("etcdserver: mvcc: required revision is a future revision")
        last = bisect.bisect_right(self._log, revision, key=lambda entry: entry[0])
        return _replay(self._base, self._log[:last])

    def _run(self, op: api.Op, events: list[api.Event]) -> api.RangeResult | int | None:
        if isinstance(op, api.Get):
            kvs = self._at(op.revision) if op.revision > 0 else self._kvs
            return _select(kvs, op, self.revision)
        if isinstance(op, api.Put):
            self._put(op, events)
            return None
        doomed = sorted((key for key in self._kvs if key in op.span), key=api.encode_key)
        for key in doomed:
            self._delete(key, events)
        return len(doomed)

    def _put(self, put: api.Put, events: list[api.Event]) -> None:
        revision, before = self.revision + 1, self._kvs.get(put.key)
        created, version = (before.create_revision, before.version) if before else (revision, 0)
        kv = api.KeyValue(put.key, put.value, created, revision, version + 1, put.lease)
        self._kvs[put.key] = kv
        events.append(api.Event("put", kv))

    def _delete(self, key: str, events: list[api.Event]) -> None:
        del self._kvs[key]
        events.append(api.Event("delete", api.KeyValue(key, b"", 0, self.revision + 1, 0, 0)))

    def _commit(self, events: Sequence[api.Event]) -> None:
        if events:
            self.revision += 1
            self._log.append((self.revision, tuple(events)))


def _fits(compare: api.Compare, kv: api.KeyValue | None) -> bool:
    if kv is None and compare.target == "value":
        return False  # a key that does not exist has no value, not even an empty one
    if compare.target == "value":
        actual: int | bytes = kv.value if kv else b""
    else:
        actual = getattr(kv, _FIELDS[compare.target]) if kv else 0
    return _RELATIONS[compare.relation](actual, compare.operand)


def concerning(events: Iterable[api.Event], span: api.Span, deletes_only: bool) -> tuple[api.Event, ...]:
    """Those of the events that a watch of `span` delivers."""
    return tuple([event for event in events if event.kv.key in span and not (deletes_only and event.kind == "put")])


_FIELDS: Final = {"create": "create_revision", "mod": "mod_revision", "version": "version", "lease": "lease"}


def _replay(base: dict[str, api.KeyValue], log: Iterable[tuple[int, Sequence[api.Event]]]) -> dict[str, api.KeyValue]:
    kvs = dict(base)
    for _, events in log:
        for event in events:
            if event.kind == "put":
                kvs[event.kv.key] = event.kv
            else:
                kvs.pop(event.kv.key, None)
    return kvs


def _select(kvs: dict[str, api.KeyValue], get: api.Get, revision: int) -> api.RangeResult:
    """As etcd does it: the count is that of the span, whatever `limit` leaves of it."""
    if get.span.is_prefix or get.span.stop:
        found = sorted((kv for kv in kvs.values() if kv.key in get.span), key=lambda kv: api.encode_key(kv.key))
    else:
        found = [kvs[get.span.start]] if get.span.start in kvs else []
    count = len(found)
    if get.count_only:
        return api.RangeResult((), count, revision)
    if get.order != "keys":
        found.sort(key=lambda kv: kv.create_revision, reverse=get.order == "newest")
    if get.limit:
        found = found[: get.limit]
    if get.keys_only:
        found = [kv._replace(value=b"") for kv in found]
    return api.RangeResult(tuple(found), count, revision)


def _check(asked: Transaction) -> None:
    """Raises RequestRefused for what etcd never takes, and for what `EtcdClient` does not send."""
    api.check_writes(asked.success, asked.failure)
    if max(map(len, asked)) > MAX_OPS:
        raise _refused("too many operations in txn request")
    for compare in asked.compares:
        if not compare.key:
            raise _refused("key is not provided")
    if _size(asked.success) + _size(asked.failure) > MAX_BYTES:
        raise _refused("request is too large")


def _size(branch: Sequence[api.Op]) -> int:
    """How many bytes it writes. Raises RequestRefused for what etcd never takes in one branch."""
    puts = [op for op in branch if isinstance(op, api.Put)]
    size = 0
    for put in puts:
        if not put.key:
            raise _refused("key is not provided")
        size += len(put.key) + len(put.value)
    deleted = [op.span for op in branch if isinstance(op, api.Delete)]
    if len({put.key for put in puts}) < len(puts) or any(put.key in span for span in deleted for put in puts):
        raise _refused("duplicate key given in txn request")
    return size


def _refused(problem: str) -> RequestRefused:
    return RequestRefused(f"etcdserver: {problem}; etcd takes at most 128 operations and 1.5 MiB a request")
