"""EtcdStore: a c10d Store whose keys live in etcd.

    <prefix>data/<key>   the value, as it was given
    <prefix>ops/<id>     how many changes a client made here: what makes a lost answer harmless

Each change is one transaction that also counts up the client's `ops` key, guarded by its version. When an answer
is lost the same transaction is sent again: if the first one happened the guard fails, so no change is made twice.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Final, TypeVar

import tenacity
from torch.distributed import DistNetworkError, DistStoreError, Store

from ftcoord.config import EtcdConfig
from ftcoord.errors import (
    EtcdAuthError,
    EtcdNoSpace,
    EtcdUnavailable,
    LeaseLost,
    OutcomeUnknown,
    RequestRefused,
    RoundOver,
)
from ftcoord.etcd.api import (
    Batch,
    Compare,
    Delete,
    Etcd,
    Get,
    KeyValue,
    Op,
    Put,
    Span,
    TxnResult,
    WatchItem,
    exists,
    unchanged,
)
from ftcoord.etcd.client import EtcdClient
from ftcoord.etcd.session import Session

T = TypeVar("T")
DEFAULT_TIMEOUT: Final = timedelta(seconds=300)
CHUNK: Final = 100
"""Keys in one transaction; etcd allows 128 operations."""
CHUNK_BYTES: Final = 2**20
"""Values in one transaction; etcd allows 1.5 MiB a request, keys included."""
PATIENCE: Final = 2.0
"""Seconds that etcd itself may take at the least: a short time-out is about the keys, not about the network."""

_in_use: set[EtcdStore] = set()
# C++ (PrefixStore, process groups) holds only the C++ half of a store; this keeps the Python half until close().


class EtcdStore(Store):
    """A `torch.distributed.Store` on etcd.

    Args:
        etcd: a client, or endpoints such as "h1:2379,h2:2379"; None takes them from FTCOORD_ENDPOINTS and friends.
        prefix: all keys start with it; stores with the same prefix on the same etcd are one store.
        timeout: how long operations wait (default 300 s), also through an outage of etcd.
        ttl: seconds that the keys written here outlive this store; it is kept up as long as the store is open.
        lease: put all keys under this lease instead, and never renew it.
        fence: a key; once it is gone, every change raises RoundOver.

    Raises `torch.distributed.DistStoreError` when a key did not appear in time, `DistNetworkError` when etcd could not
    be reached in time. Semantics are those of TCPStore; keys are str, values str or bytes, and bytes come back.
    A change is made at most once, and exactly once when the call returns. `multi_set` of more than 100 keys
    (or 1 MiB of values) is not atomic. Usable from several threads, not in a forked child.
    """

    def __init__(
        self,
        etcd: Etcd | str | Sequence[str] | None = None,
        prefix: str = "/ftcoord/v1/store/",
        timeout: timedelta | None = None,
        *,
        ttl: int = 3600,
        lease: int | None = None,
        fence: str | None = None,
    ) -> None:
        super().__init__()
        self._client = EtcdClient(EtcdConfig.load(etcd)) if etcd is None or isinstance(etcd, (str, Sequence)) else None
        self._etcd: Etcd = self._client if self._client is not None else etcd  # type: ignore[assignment]
        self._data, self._ops = f"{prefix}data/", f"{prefix}ops/{uuid.uuid4().hex}"
        self._ttl, self._lease, self._fence = ttl, lease, fence
        self._session: Session | None = None
        self._changes = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._waiters: set[threading.Event] = set()
        self.set_timeout(timeout or DEFAULT_TIMEOUT)
        _in_use.add(self)

    # -- reading ------------------------------------------------------------------------------------------------

    def get(self, key: str) -> bytes:
        """The value of `key`; waits until there is one."""
        return self._await(key, self._deadline()).value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all keys, in order; waits until all are there."""
        deadline = self._deadline()
        while True:
            found = self._look(keys, deadline)
            missing = next((key for key in keys if key not in found), None)
            if missing is None:
                return [found[key].value for key in keys]
            self._await(missing, deadline)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        deadline = self._deadline(timeout)
        present = self._look(keys, deadline, keys_only=True)
        for key in keys:
            if key not in present:
                self._await(key, deadline)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there now."""
        return set(keys) <= self._look(keys, self._deadline(), keys_only=True).keys()

    def num_keys(self) -> int:
        """How many keys there are (unlike TCPStore there is no key of the store's own among them)."""
        span = Span(self._data, is_prefix=True)
        return self._read(
            lambda left: self._etcd.range(Get(span, count_only=True), timeout=left), self._deadline()
        ).count

    # -- changing -----------------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Set `key`, whether it was there or not."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set all keys; atomic up to 100 of them with 1 MiB of values."""
        last = dict(zip(keys, values, strict=True))
        for puts in _requests([Put(self._data + key, _raw(value)) for key, value in last.items()]):
            self._change(puts)

    def add(self, key: str, amount: int) -> int:
        """Add to the decimal number that `key` holds (0 if it is not there); the sum."""

        def change(old: bytes | None) -> bytes:
            try:
                return b"%d" % (int(old or b"0") + amount)
            except ValueError:
                raise DistStoreError(f"{key!r} holds no decimal number to add to; use add() alone on a key") from None

        return int(self._update(key, change) or b"0")

    def append(self, key: str, value: str | bytes) -> None:
        """Append to what `key` holds."""
        self._update(key, lambda old: (old or b"") + _raw(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set `key` to `desired` if it holds `expected`, or is not there and `expected` is empty; what it holds then.

        For a key that is not there and another `expected`, that is returned, as TCPStore does.
        """
        wanted = _raw(expected)

        def change(old: bytes | None) -> bytes | None:
            return _raw(desired) if (old or b"") == wanted and (old is not None or not wanted) else None

        held = self._update(key, change)
        return wanted if held is None else held

    def delete_key(self, key: str) -> bool:
        """Delete `key`; whether it was there."""
        span = Span(self._data + key)
        while (seen := self._look([key], self._deadline()).get(key)) is not None:
            if self._change([Delete(span)], span, seen)[0]:
                return True
        return False

    # -- the rest of the interface ------------------------------------------------------------------------------

    deleteKey = delete_key  # C++ calls these two by their C++ names
    getNumKeys = num_keys

    def has_extended_api(self) -> bool:
        """True: append, multi_get and multi_set are there."""
        return True

    def clone(self) -> EtcdStore:
        """This store itself: it may be used by several threads."""
        return self

    def close(self) -> None:
        """Let go of it: waiting calls fail, and keys written under its own lease expire after `ttl`. Idempotent."""
        self._closed.set()
        for waiter in list(self._waiters):
            waiter.set()
        _in_use.discard(self)
        if self._session is not None:
            self._session.orphan()
        if self._client is not None:
            self._client.close()

    # -- how ----------------------------------------------------------------------------------------------------

    def _deadline(self, timeout: timedelta | None = None) -> float:
        limit: timedelta = timeout or self.timeout  # type: ignore[attr-defined]  # a property of the C++ class
        return time.monotonic() + limit.total_seconds()

    def _read(self, attempt: Callable[[float], T], deadline: float) -> T:
        """Make `attempt(seconds left)` until etcd answers it."""
        deadline = max(deadline, time.monotonic() + PATIENCE)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((EtcdUnavailable, OutcomeUnknown)),
            stop=tenacity.stop_after_delay(deadline - time.monotonic()) | tenacity.stop_when_event_set(self._closed),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=1.0),
            sleep=tenacity.sleep_using_event(self._closed),
            reraise=True,
        )
        try:
            return retrying(lambda: attempt(min(max(deadline - time.monotonic(), 0.1), 5.0)))
        except (EtcdUnavailable, OutcomeUnknown) as error:
            raise DistNetworkError(f"timeout: etcd did not answer in time: {error}") from error
        except (EtcdAuthError, EtcdNoSpace, RequestRefused) as error:
            raise DistStoreError(str(error)) from error

    def _look(self, keys: Sequence[str], deadline: float, keys_only: bool = False) -> dict[str, KeyValue]:
        """Those of the keys that are there now."""
        unique = list(dict.fromkeys(keys))
        found: dict[str, KeyValue] = {}
        for start in range(0, len(unique), CHUNK):
            gets = [Get(Span(self._data + key), keys_only=keys_only) for key in unique[start : start + CHUNK]]
            result = self._read(partial(self._read_all, gets), deadline)
            kvs = (result.range(index).one for index in range(len(gets)))
            found.update({kv.key.removeprefix(self._data): kv for kv in kvs if kv is not None})
        return found

    def _read_all(self, gets: Sequence[Get], left: float) -> TxnResult:
        return self._etcd.txn((), gets, timeout=left)

    def _await(self, key: str, deadline: float) -> KeyValue:
        """The key as soon as it is there: one read, then a watch from the revision after it."""
        span = Span(self._data + key)
        while True:
            read = self._read(lambda left: self._etcd.range(Get(span), timeout=left), deadline)
            found = read.one or self._watch(span, read.revision + 1, deadline)
            if found is not None:
                return found
            if self._closed.is_set():
                raise DistStoreError(f"the store was closed while waiting for {key!r}")
            if time.monotonic() >= deadline:
                raise DistStoreError(
                    f"wait timeout: nobody set {key!r} in time; is a rank gone, or the timeout too short?"
                )

    def _watch(self, span: Span, revision: int, deadline: float) -> KeyValue | None:
        """The first value put from `revision` on; None when the time is up or the watch broke off."""
        done = threading.Event()
        found: list[KeyValue] = []

        def deliver(item: WatchItem) -> None:
            if isinstance(item, Batch):
                found.extend(event.kv for event in item.events if event.kind == "put")
            if found or not isinstance(item, Batch):
                done.set()

        watch = self._etcd.watch(span, revision, deliver)
        try:
            self._waiters.add(done)
            if not self._closed.is_set():
                done.wait(max(deadline - time.monotonic(), 0))
        finally:
            self._waiters.discard(done)
            watch.cancel()
        return found[0] if found else None

    def _update(self, key: str, change: Callable[[bytes | None], bytes | None]) -> bytes | None:
        """Replace the value by what `change` makes of it (None: leave it), atomically; the value that is there then."""
        span = Span(self._data + key)
        current = self._read(lambda left: self._etcd.range(Get(span), timeout=left), self._deadline()).one
        while True:
            old = current.value if current else None
            new = change(old)
            if new is None:
                return old
            done, current = self._change([Put(span.start, new)], span, current)
            if done:
                return new

    def _change(
        self, ops: Sequence[Op], span: Span | None = None, seen: KeyValue | None = None
    ) -> tuple[bool, KeyValue | None]:
        """Make a change once, if the key `span` is still as it was `seen`: whether it was, and how it is now."""
        guards = [] if span is None else [unchanged(span.start, seen.mod_revision if seen else 0)]
        deadline = self._deadline()
        with self._lock:
            while True:
                try:
                    outcome = self._attempt(ops, guards, span, deadline)
                except DistNetworkError:
                    self._forget_changes()  # one of unknown outcome must not be taken for the next one
                    raise
                if outcome is not None:
                    return outcome

    def _attempt(
        self, ops: Sequence[Op], guards: Sequence[Compare], span: Span | None, deadline: float
    ) -> tuple[bool, KeyValue | None] | None:
        """As `_change`, with None for "again": the store's own lease or count had to be made anew."""
        fence = Span(self._fence or self._ops)
        compares = [Compare(self._ops, "version", "=", self._changes), *guards]
        if self._fence is not None:
            compares.append(exists(self._fence))
        try:
            lease = self._read(lambda left: self._lease_id(), deadline)
            leased = [replace(op, lease=lease) if isinstance(op, Put) else op for op in ops]
            success = [*leased, Put(self._ops, b"", lease)]
            failure = [Get(Span(self._ops)), Get(fence), *([Get(span)] if span else [])]
            result = self._read(lambda left: self._etcd.txn(compares, success, failure, timeout=left), deadline)
        except LeaseLost as error:
            self._lease_is_gone(error)
            return None
        counted = self._changes + 1 if result.succeeded else _version(result.range(0).one)
        if counted == self._changes + 1:
            self._changes = counted
            return True, None
        if self._fence is not None and result.range(1).one is None:
            raise RoundOver(f"the round of {self._data} is over; join the next one and use its store")
        if counted != self._changes:
            self._forget_changes()
            return None
        return False, result.range(2).one

    def _lease_id(self) -> int:
        if self._lease is not None:
            return self._lease
        if self._session is None:
            self._session = Session(self._etcd, self._ttl)
        return self._session.lease_id

    def _lease_is_gone(self, error: LeaseLost) -> None:
        if self._session is None:
            raise RoundOver(f"the run of {self._data} is gone from etcd, and its store with it: {error}") from error
        self._session.orphan()
        self._session = None
        self._forget_changes()

    def _forget_changes(self) -> None:
        self._ops, self._changes = f"{self._ops.rpartition('/')[0]}/{uuid.uuid4().hex}", 0


def _raw(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _requests(puts: Sequence[Put]) -> Iterator[list[Put]]:
    """The puts in order, in parts that etcd takes in one request each."""
    part: list[Put] = []
    size = 0
    for put in puts:
        if len(part) == CHUNK or size + len(put.value) > CHUNK_BYTES:
            yield part
            part, size = [], 0
        part.append(put)
        size += len(put.value)
    if part:
        yield part


def _version(kv: KeyValue | None) -> int:
    return kv.version if kv else 0
