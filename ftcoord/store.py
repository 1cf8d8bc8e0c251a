"""EtcdStore: a c10d Store whose keys live in etcd.

<prefix>data/<key>           a value, encoded as `core/store_values.py` describes
<prefix>ops/<id>             the count that makes a lost answer harmless (`primitives/write_once.py`)
<prefix>queues/<key>/<id>    an item of a queue
"""

from __future__ import annotations

import itertools
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Final, TypeAlias, TypeVar, cast
from urllib.parse import unquote

import torch.distributed
from torch.distributed import DistNetworkError, DistStoreError, Store

from ftcoord import concurrency, errors
from ftcoord.config import EtcdConfig, lease_seconds
from ftcoord.core import layout
from ftcoord.core.store_values import as_bytes, counter, counts_by, plain, stored
from ftcoord.etcd import api
from ftcoord.etcd.api import Compare, Delete, Etcd, Get, KeyValue, Op, Put, SnapshotReader, Span
from ftcoord.etcd.client import SharedClient
from ftcoord.etcd.retry import SHORTEST_TIMEOUT, backoff, retry_until_answered
from ftcoord.primitives.write_once import STORE_CLOSED, ExactlyOnceWriter, Made, round_over

__all__ = ["EtcdStore", "QueueEmptyError", "RoundOverError"]

T = TypeVar("T")

DEFAULT_STORE_TIMEOUT: Final = timedelta(seconds=300)
"""The default timeout of a store's operations."""
KEYS_PER_REQUEST: Final = 100
"""Keys in one transaction; etcd allows 128 operations."""
BYTES_PER_REQUEST: Final = 2**20
"""Bytes of values in one transaction; etcd allows 1.5 MiB per request, including keys."""
REMEMBERED_KEYS: Final = 256
"""How many keys are remembered with revision and value, so that they can be changed again without being read."""
REMEMBERED_BYTES: Final = 4096
"""The largest value that is remembered."""
LONGEST_TIMEOUT: Final = 1e9
"""Seconds; no operation waits longer."""
UNPAUSED_TRIES: Final = 3
"""Attempts before the first pause: most of the first ones only learn the key's value."""


QueueEmptyError: type[Exception] = getattr(torch.distributed, "QueueEmptyError", DistStoreError)
"""torch's error for an empty queue; torch 2.6 has none."""


class RoundOverError(errors.RoundOver, DistStoreError):
    """The fence of a store is gone: both an `ftcoord.errors.RoundOver` and a DistStoreError."""


@contextmanager
def _as_torch_errors() -> Iterator[None]:
    """Raises DistNetworkError when etcd did not answer, RoundOverError when the fence is gone, else DistStoreError."""
    try:
        yield
    except errors.RoundOver as error:
        raise RoundOverError(str(error)) from None
    except (errors.EtcdUnavailable, errors.OutcomeUnknown) as error:
        raise DistNetworkError(f"timeout: etcd did not answer in time: {error}") from None
    except (errors.ClientClosed, errors.EtcdAuthError, errors.EtcdNoSpace, errors.RequestRefused) as error:
        raise DistStoreError(str(error)) from None


class EtcdStore(Store):
    """A `torch.distributed.Store` on etcd. Thread-safe; not usable in a forked child.

    Warning: stores with the same prefix on the same etcd are one store. That includes all stores without a `prefix`, so
    give each job its own.

    Args:
        etcd: a client, or endpoints such as "h1:2379,h2:2379"; None takes them from FTCOORD_ENDPOINTS and related
            variables.
        prefix: the prefix of all keys, ``/ftcoord/v2/@store/`` by default; end it with a slash.
        timeout: how long operations wait (default 300 s), also through an outage of etcd.
        ttl: whole seconds, from 1 to 86400, that the keys written here outlive this store; etcd grants at least 2 s on
            default settings. Their lease is renewed as long as the store is open.
        lease: attach all keys to this lease instead, and never renew it.
        fence: a key that must exist. Once it is gone, every change raises RoundOverError, and so does waiting for a
            missing key.

    Raises ConfigError (a ValueError) for a bad `ttl`, before any socket is opened.

    Keys are str; values are str or bytes, and are returned as bytes. etcd limits a key and its value to 1.5 MiB
    together, on default settings. A change is made at most once, and exactly once if the call returns. `multi_set` of
    more than 100 keys (or 1 MiB of values) is not atomic.

    Every operation waits up to the store's timeout, even `check` and `set` if etcd is unreachable. It may raise:

    - `torch.distributed.DistStoreError` when a key did not appear in time, when etcd refuses the login or the value
      (too large, or NOSPACE), or when the store or its client is closed;
    - `torch.distributed.DistNetworkError` when etcd did not answer in time;
    - `ftcoord.store.RoundOverError`, a DistStoreError, when the store's `fence` or `lease` is gone;
    - `ForkedProcessError` in a forked child.

    A store stays open until `close()` or the end of the process, also when nobody refers to it: torch's C++ objects (a
    PrefixStore, a process group) call it without keeping it alive. Until then its lease is renewed. It has no thread
    and no connection of its own.

    The semantics are TCPStore's (https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.Store), also
    for queues: `check` and `wait` see a queue that holds an item, and `num_keys`, `list_keys` and `delete_key` do not.
    There are three differences. If there is only a queue, `get` waits for a value, as HashStore's does. `add` to a
    value that is not a number raises DistStoreError, whereas TCPStore closes the connection. And unlike in torch's own
    EtcdStore, timeouts raise DistStoreError, not LookupError.

    A PrefixStore on this store supports everything but queues and `list_keys`, which torch does not forward to stores
    written in Python: it raises NotImplementedError ("queue support is not implemented"). Use an EtcdStore with its own
    `prefix` instead.
    """

    def __init__(
        self,
        etcd: Etcd | EtcdConfig | str | Sequence[str] | None = None,
        prefix: str = layout.DEFAULT_STORE_PREFIX,
        timeout: timedelta | None = None,
        *,
        ttl: int = 3600,
        lease: int | None = None,
        fence: str | None = None,
    ) -> None:
        super().__init__()
        ttl = lease_seconds("ttl", ttl)
        self.set_timeout(DEFAULT_STORE_TIMEOUT if timeout is None else timeout)
        self._own = None if hasattr(etcd, "txn") else SharedClient(EtcdConfig.of(cast(str, etcd)))
        # Never change. `_changes` has a lock of its own.
        self._prefix = prefix
        self._data, self._queues = layout.store_values_span(prefix).start, layout.store_queues_span(prefix).start
        self._closed = concurrency.event()
        client, counts = self._own or cast(Etcd, etcd), layout.store_counts_span(prefix).start
        self._changes = ExactlyOnceWriter(client, counts, ttl, lease=lease, fence=fence, closed=self._closed)
        self._reader = _Reader(client, fence, self._closed)
        # Any thread, one step of the dict at a time. It is a hint: every change is guarded in etcd.
        self._remembered: OrderedDict[str, KeyValue] = OrderedDict()
        # What it calls refers to this store, which therefore stays: C++ calls a store that Python has freed in vain.
        self._cancel_end = concurrency.when_forgotten(self, self._end)

    # -- reading ------------------------------------------------------------------------------------------------

    def get(self, key: str) -> bytes:
        """The value of `key`. Waits until there is one; DistStoreError after the store's timeout."""
        return value_of(self._gather([key], self._values, self._deadline())[key])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all keys, in order. Waits until all exist; DistStoreError after the store's timeout."""
        found = self._gather(keys, self._values, self._deadline())
        return [value_of(found[key]) for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist, each as a value or as a queue that holds an item.

        Raises DistStoreError after `timeout`; None stands for the store's timeout.
        """
        self._gather(keys, self._signs, self._deadline(timeout))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist now, each as a value or as a queue that holds an item.

        Waits only if etcd does not answer: DistNetworkError after the store's timeout.
        """
        wanted = list(dict.fromkeys(keys))
        return not wanted or len(self._look(wanted, self._signs, self._deadline())[0]) == len(wanted)

    def num_keys(self) -> int:
        """The number of keys. Queues do not count."""
        return self._range(Get(Span(self._data, is_prefix=True), count_only=True), self._deadline()).count

    def list_keys(self) -> list[str]:
        """All keys, sorted. Queues are not listed."""
        found = self._range(Get(Span(self._data, is_prefix=True), keys_only=True), self._deadline())
        return [kv.key.removeprefix(self._data) for kv in found.kvs]

    # -- changing -----------------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Set `key`, whether it exists or not."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set all keys. Atomic up to 100 keys and 1 MiB of values. Raises ValueError for unequal lengths."""
        last = dict(zip(keys, values, strict=True))
        for puts in _requests([Put(self._data + key, stored(as_bytes(value))) for key, value in last.items()]):
            self._make(puts)

    def add(self, key: str, amount: int) -> int:
        """Add to the decimal number that `key` holds, 0 if it does not exist; returns the sum.

        Takes one request, however many others add the same amount at the same moment; an `amount` of 0 takes two if the
        key does not exist. Raises DistStoreError if the value is not a number.
        """
        if amount == 0:
            return self._sum(key)
        name = self._data + key
        seen = self._remembered.get(name)
        new = seen.value if seen and counts_by(seen.value, amount) else counter(amount, 0, 0)
        guard = Compare(name, "value", "=", new)
        tries = self._tries(key)
        while not (made := self._put(name, new, guard, next(tries))).done:
            seen = made.kv
            if seen and counts_by(seen.value, amount):
                new, guard = seen.value, Compare(name, "value", "=", seen.value)
            else:
                version = seen.version + 1 if seen else 1
                number = (number_of(key, seen) if seen else 0) + amount
                new, guard = counter(amount, number, version), _unchanged(name, seen)
        if made.kv is None:
            raise DistStoreError(
                f"{amount} was added to {key!r}, but etcd was compacted since, and forgot the sum: get the key"
            )
        return int(plain(new, made.kv.version))

    def _sum(self, key: str) -> int:
        """Return the number that `key` holds; create the key with 0 if it does not exist.

        Never changes an existing key, and takes at most two requests that etcd answers, however many clients add to it.
        """
        name, deadline = self._data + key, self._deadline()
        seen = self._range(Get(Span(name)), deadline).one
        if seen is None:
            made = self._put(name, counter(0, 0, 0), api.absent(name), deadline)
            seen = None if made.done else made.kv
        return number_of(key, seen) if seen is not None else 0

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of `key`. A missing key counts as empty."""
        name, more = self._data + key, as_bytes(value)
        made, tries = Made(False, self._remembered.get(name)), self._tries(key)
        while not made.done:
            new = stored((value_of(made.kv) if made.kv else b"") + more)
            made = self._put(name, new, _unchanged(name, made.kv), next(tries))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set `key` to `desired` if it holds `expected`, or does not exist and `expected` is empty.

        Returns what the key holds afterwards. For a missing key and an `expected` that is not empty, returns
        `expected`, as TCPStore does.
        """
        name, wanted, new = self._data + key, as_bytes(expected), as_bytes(desired)
        guard = Compare(name, "value", "=", stored(wanted)) if wanted else api.absent(name)
        tries = self._tries(key)
        while not (made := self._put(name, stored(new), guard, next(tries))).done:
            if made.kv is None and wanted:
                return wanted
            if made.kv is not None and value_of(made.kv) != wanted:
                return value_of(made.kv)
            guard = _unchanged(name, made.kv)
        return new

    def delete_key(self, key: str) -> bool:
        """Delete `key`; returns whether it existed."""
        name = self._data + key
        return self._make([Delete(Span(name))], [api.exists(name)]).done

    # -- queues -------------------------------------------------------------------------------------------------

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append an item to the queue `key`."""
        self._make([Put(self._queue(key).start + uuid.uuid4().hex, as_bytes(value))])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first item of the queue. Each item goes to one caller only.

        If `block`, waits for an item, and raises DistStoreError after the store's timeout. Else raises
        `torch.distributed.QueueEmptyError` if there is none (DistStoreError with torch 2.6).
        """
        deadline, first = self._deadline(), Get(self._queue(key), limit=1, order="oldest")
        while True:
            item = self._range(first, deadline).one
            if item is None and not block:
                raise QueueEmptyError(f"queue {key!r} is empty")
            if item is None:
                self._wait([key], self._items, deadline)
            elif self._make([Delete(Span(item.key))], [api.exists(item.key)], deadline=deadline).done:
                return item.value

    def queue_len(self, key: str) -> int:
        """The number of items in the queue."""
        return self._range(Get(self._queue(key), count_only=True), self._deadline()).count

    # -- the rest of the interface ------------------------------------------------------------------------------

    deleteKey = delete_key  # C++ calls these two by their C++ names
    getNumKeys = num_keys

    def has_extended_api(self) -> bool:
        """True: append, multi_get and multi_set are supported."""
        return True

    def clone(self) -> EtcdStore:
        """This store itself, because it is thread-safe."""
        return self

    def close(self) -> None:
        """Close the store: waiting calls raise DistStoreError, and keys under its own lease expire after `ttl`.

        Idempotent.
        """
        self._cancel_end()
        self._end()

    def _end(self) -> None:
        self._closed.set()
        self._reader.wake()
        self._changes.close()
        if self._own is not None:
            self._own.close()

    # -- how ----------------------------------------------------------------------------------------------------

    def _queue(self, key: str) -> Span:
        return layout.store_queue_span(self._prefix, key)

    def _deadline(self, timeout: timedelta | None = None) -> float:
        """The monotonic time at which an operation that begins now must end. Raises DistStoreError if it is closed."""
        if self._closed.is_set():
            raise DistStoreError(STORE_CLOSED)
        limit: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]  # C++ property
        return concurrency.now() + min(limit.total_seconds(), LONGEST_TIMEOUT)

    def _range(self, get: Get, deadline: float) -> api.RangeResult:
        with _as_torch_errors():
            return self._reader.range(deadline, get)

    def _values(self, keys: Sequence[str]) -> Iterator[Get]:
        """The read that finds the values of these keys, all from the first to the last."""
        for key in keys:
            key.encode()  # refuses half characters: etcd would give back another key
        last = f"{self._data}{max(keys)}\0" if len(keys) > 1 else ""
        yield Get(Span(self._data + min(keys), stop=last))

    def _items(self, keys: Sequence[str]) -> Iterator[Get]:
        """The read that finds items of these queues."""
        starts = [self._queue(key).start for key in keys]
        span = Span(min(starts), stop=f"{max(starts)[:-1]}0") if len(keys) > 1 else Span(starts[0], True)
        yield Get(span, keys_only=True)  # "0" follows "/"

    def _signs(self, keys: Sequence[str]) -> Iterator[Get]:
        """The reads that find whether these keys exist, as a value or as an item of a queue."""
        yield from (replace(get, keys_only=True) for get in self._values(keys))
        yield from self._items(keys)

    def _gather(self, keys: Sequence[str], reads: _Reads, deadline: float) -> dict[str, KeyValue]:
        """What `reads` find of each of the keys. Waits until all exist: with one watch, unless that would bring many
        other keys."""
        found, missing = dict[str, KeyValue](), list(dict.fromkeys(keys))
        while missing:
            seen, are_alone = self._look(missing, reads, deadline)
            found |= seen
            missing = [key for key in missing if key not in found]
            if missing:
                found |= self._wait(missing if are_alone else missing[:1], reads, deadline)
                missing = [key for key in missing if key not in found]
        return found

    def _look(self, keys: Sequence[str], reads: _Reads, deadline: float) -> tuple[dict[str, KeyValue], bool]:
        """What `reads` find of these distinct keys now, at one revision, and whether there are few others between them.
        If there are many, each key is read by itself."""

        def look(now: SnapshotReader) -> tuple[dict[str, KeyValue], bool]:
            found, are_alone, wanted = dict[str, KeyValue](), True, set(keys)
            for get in reads(keys):
                among = now.range(replace(get, limit=2 * len(keys)))
                are_alone = are_alone and among.count == len(among.kvs)
                found |= {name: kv for kv in among.kvs if (name := self._name(kv)) in wanted}
                if len(found) == len(keys):
                    return found, are_alone
            for key in () if are_alone else keys:
                each = (now.range(replace(get, limit=1)).one for get in reads([key]))
                if key not in found and (kv := next(filter(None, each), None)) is not None:
                    found[key] = kv
            return found, are_alone

        with _as_torch_errors():
            return self._reader.snapshot(look, deadline)

    def _name(self, kv: KeyValue) -> str:
        """The user's key of a value, or of an item of a queue."""
        if kv.key.startswith(self._data):
            return kv.key.removeprefix(self._data)
        return unquote(kv.key.removeprefix(self._queues).partition("/")[0])

    def _wait(self, keys: Sequence[str], reads: _Reads, deadline: float) -> dict[str, KeyValue]:
        """Watch what `reads` read until each of the keys was seen; returns what was seen of each first."""
        seen, missing = dict[str, KeyValue](), dict.fromkeys(keys)

        def take(kvs: Sequence[KeyValue]) -> bool:
            for kv in kvs:
                if (key := self._name(kv)) in missing:
                    seen[key] = kv
                    del missing[key]
            return not missing

        with _as_torch_errors():
            if self._reader.until([*reads(keys)], take, deadline):
                return seen
        name = next(iter(missing))
        if self._closed.is_set():
            raise DistStoreError(f"the store was closed while waiting for {name!r}")
        raise DistStoreError(f"wait timeout: nobody set {name!r} in time; is a rank gone, or the timeout too short?")

    def _make(
        self, ops: Sequence[Op], guards: Sequence[Compare] = (), look: str | None = None, deadline: float | None = None
    ) -> Made:
        with _as_torch_errors():
            return self._changes.make(ops, guards, look, self._deadline() if deadline is None else deadline)

    def _tries(self, key: str) -> Iterator[float]:
        """The deadline of each attempt of one operation that fails when others change the key first, after a pause if
        one is due. Raises DistStoreError after the deadline, which is at least `SHORTEST_TIMEOUT` seconds from now.

        If others change the key often, what a client knows of it is out of date after a pause. So attempts after a
        pause come in pairs: the first one usually fails and learns the value, and the second one follows at once. With
        a pause before each attempt, a client would hardly ever succeed while others change the key every few
        milliseconds.
        """
        deadline = max(self._deadline(), concurrency.now() + SHORTEST_TIMEOUT)
        yield deadline
        for failed in itertools.count(1):
            if concurrency.now() >= deadline:
                advice = "let fewer change it at a time, or raise the timeout"
                raise DistStoreError(f"wait timeout: others changed {key!r} before each of {failed} tries; {advice}")
            later = failed - UNPAUSED_TRIES
            if later >= 0 and later % 2 == 0:
                self._closed.wait(backoff(later // 2 + 1))
            yield deadline

    def _put(self, name: str, value: bytes, guard: Compare, deadline: float) -> Made:
        """Put a key if the guard holds, and remember its value for the next change."""
        made = self._make([Put(name, value)], [guard], name, deadline)
        kv = made.kv._replace(value=value) if made.done and made.kv else made.kv
        if kv is not None and len(kv.value) <= REMEMBERED_BYTES:
            self._remembered[name] = kv
            if len(self._remembered) > REMEMBERED_KEYS:
                self._remembered.popitem(last=False)
        else:
            self._remembered.pop(name, None)
        return Made(made.done, kv)


def _requests(puts: Sequence[Put]) -> Iterator[list[Put]]:
    """The puts in order, in parts that fit into one request each."""
    part: list[Put] = []
    size = 0
    for put in puts:
        if len(part) == KEYS_PER_REQUEST or size + len(put.value) > BYTES_PER_REQUEST:
            yield part
            part, size = [], 0
        part.append(put)
        size += len(put.value)
    if part:
        yield part


_Items: TypeAlias = "concurrency.Queue[tuple[int, api.WatchItem | None]]"
_FENCE: Final = -1
_Reads: TypeAlias = Callable[[Sequence[str]], Iterator[Get]]
"""The reads, of all keys between them too, that find the user's keys: one is made when the one before did not do."""
_Take: TypeAlias = Callable[[Sequence[KeyValue]], bool]
"""Takes keys as they are; returns whether it has all that it needs."""


class _Reader:
    """Reads the keys of one store, and waits for those that do not exist yet: until they do, or until the fence is
    gone, as nobody will write them after that. Thread-safe.

    Args:
        etcd: the etcd client.
        fence: once it is gone, waiting calls raise RoundOver.
        closed: set it, and call `wake()`, to make all calls give up.
    """

    def __init__(self, etcd: Etcd, fence: str | None, closed: concurrency.Event) -> None:
        self._etcd, self._fence, self._closed = etcd, fence, closed  # never change
        # Any thread, one step of the list at a time: `wake()` goes through a copy, and whoever adds itself later finds
        # `closed` set.
        self._waiters: list[_Items] = []

    def wake(self) -> None:
        """End all waits. Set `closed` before."""
        for items in list(self._waiters):
            items.put((_FENCE, None))

    def range(self, deadline: float, get: Get) -> api.RangeResult:
        """What etcd answers by the deadline. Raises EtcdError."""
        return retry_until_answered(lambda left: self._etcd.range(get, timeout=left), deadline, self._closed)

    def snapshot(self, look: Callable[[SnapshotReader], T], deadline: float) -> T:
        """What `look` returns for etcd at one revision. Raises EtcdError."""
        return api.read_snapshot(partial(self.range, deadline), look)

    def until(self, gets: Sequence[Get], take: _Take, deadline: float) -> bool:
        """Pass `take` what `gets` find, and then everything that is put into their spans, until it returns True.

        Returns whether it did: False after the deadline, or if the store was closed. `take` may get a key twice.

        Watches each of the spans, and the fence. Raises EtcdError, such as ClientClosed, or EtcdUnavailable when etcd
        does not answer at the deadline; and RoundOver when the fence is gone and `take` still lacks keys.
        """
        ended = 0
        while not self._closed.is_set():
            has_all = self._watch(gets, take, deadline)
            if has_all or concurrency.now() >= deadline:
                return has_all
            ended += 1  # a watch: perhaps the next one ends too
            self._closed.wait(min(backoff(ended), max(deadline - concurrency.now(), 0)))
        return False

    def _watch(self, gets: Sequence[Get], take: _Take, deadline: float) -> bool:
        """As `until`, but also returns False when a watch ended."""
        items: _Items = concurrency.inbox()
        self._waiters.append(items)
        with ExitStack() as undo:
            undo.callback(self._waiters.remove, items)
            fences = [] if self._fence is None else [(_FENCE, Span(self._fence))]
            for at, span in [*enumerate(get.span for get in gets), *fences]:
                note = partial(lambda at, item: items.put((at, item)), at)
                undo.callback(self._etcd.watch(span, 0, note, deletes_only=at == _FENCE).cancel)
            return self._hear(items, gets, take, deadline)

    def _hear(self, items: _Items, gets: Sequence[Get], take: _Take, deadline: float) -> bool:
        """Read after all watches are established, so that no change between them is missed; then wait."""
        standing = set[int]()
        wanted = len(gets) + (self._fence is not None)
        while not self._closed.is_set():
            try:
                index, item = items.get(timeout=max(deadline - concurrency.now(), 0))
            except concurrency.Empty:  # nobody put them, or etcd went away and could not tell
                return self._read(gets, take, deadline)
            has_all = False
            if isinstance(item, api.Began):
                standing.add(index)
                has_all = len(standing) == wanted and self._read(gets, take, deadline)
            elif isinstance(item, api.Batch):
                # A key may have been put before the fence went: a read shows both as they are at one revision.
                puts = [event.kv for event in item.events if event.kind == "put"]
                has_all = self._read(gets, take, deadline) if index == _FENCE else bool(puts) and take(puts)
            elif isinstance(item, errors.EtcdAuthError):
                raise item
            else:
                return False
            if has_all:
                return True
        return False

    def _read(self, gets: Sequence[Get], take: _Take, deadline: float) -> bool:
        """Pass `take` what exists now. Raises RoundOver if that is not all and the fence is gone."""
        fences = [] if self._fence is None else [Get(Span(self._fence))]
        found = self.snapshot(lambda then: then.ranges([*gets, *fences]), deadline)
        has_all = take([kv for one in found[: len(gets)] for kv in one.kvs])
        if not has_all and self._fence is not None and found[-1].one is None:
            raise round_over(self._fence)
        return has_all


def _unchanged(name: str, seen: KeyValue | None) -> Compare:
    """Guard: the key is as it was seen, or still missing."""
    return api.unchanged(name, seen.mod_revision if seen else 0)


def value_of(kv: KeyValue) -> bytes:
    """The value. Raises DistStoreError for a broken counter."""
    try:
        return plain(kv.value, kv.version)
    except ValueError:
        raise DistStoreError(f"etcd key {kv.key!r} holds a broken counter: delete it") from None


def number_of(key: str, kv: KeyValue) -> int:
    """The number that the user's `key` holds. Raises DistStoreError if it holds none."""
    try:
        return int(value_of(kv))
    except ValueError:
        raise DistStoreError(f"{key!r} holds no decimal number to add to; use only add() on such a key") from None
