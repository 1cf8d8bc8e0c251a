"""One client per process for all users of the same etcd: one connection, one stream of watches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ftcoord import concurrency
from ftcoord.closing import Closing
from ftcoord.config import EtcdConfig
from ftcoord.errors import ClientClosed, EtcdError
from ftcoord.etcd.api import Compare, Get, KeyCalls, Lease, Op, RangeResult, Span, TxnResult, Watch, WatchItem
from ftcoord.etcd.client import EtcdClient, Status
from ftcoord.etcd.rpc.transport import CLIENT_CLOSED
from ftcoord.fork import OwnerProcess


class _Clients:
    """The clients of this process, which it keeps until its end. A forked child starts with none."""

    def __init__(self) -> None:
        self._lock = concurrency.lock("_Clients._lock")  # guards _known
        self._known: dict[EtcdConfig, EtcdClient] = {}

    def of(self, config: EtcdConfig) -> EtcdClient:
        with self._lock:
            return self._known.get(config) or self._known.setdefault(config, EtcdClient(config))


class SharedClient(KeyCalls, Closing):
    """The process's client for `config`, for one of its users. Implements `ftcoord.etcd.api.Etcd`. Thread-safe.

    It owns no thread and no connection. `close()` ends its watches; after that every call raises ClientClosed. Making
    one raises ConfigError when a TLS file cannot be read, and ForkedProcessError, see `EtcdClient`.
    """

    def __init__(self, config: EtcdConfig) -> None:
        self.config = config
        self._owner = OwnerProcess("this etcd client belongs to the parent process")
        self._shared = concurrency.of_process(_Clients).of(config)  # never changes
        self._closed = False  # any thread; becomes True once
        # Any thread, one step of a dict at a time: `watch()` looks at `_closed` after it has put its own.
        self._watched: dict[_Watched, Callable[[WatchItem], None]] = {}

    @property
    def _client(self) -> EtcdClient:
        if self._closed:
            raise ClientClosed(CLIENT_CLOSED)
        return self._shared

    def range(self, get: Get, *, timeout: float | None = None) -> RangeResult:
        return self._client.range(get, timeout=timeout)

    def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Op],
        failure: Sequence[Op] = (),
        *,
        timeout: float | None = None,
    ) -> TxnResult:
        return self._client.txn(compares, success, failure, timeout=timeout)

    def submit(
        self,
        compares: Sequence[Compare],
        success: Sequence[Op],
        done: Callable[[TxnResult | EtcdError], None],
        *,
        timeout: float,
    ) -> None:
        try:
            client = self._client
        except ClientClosed as error:
            done(error)
            return
        client.submit(compares, success, done, timeout=timeout)

    def grant(self, ttl: int, *, timeout: float | None = None) -> Lease:
        return self._client.grant(ttl, timeout=timeout)

    def renew(self, lease_id: int, *, timeout: float | None = None) -> int:
        return self._client.renew(lease_id, timeout=timeout)

    def revoke(self, lease_id: int, *, timeout: float | None = None) -> None:
        self._client.revoke(lease_id, timeout=timeout)

    def status(self, *, timeout: float | None = None) -> Status:
        return self._client.status(timeout=timeout)

    def watch(
        self, span: Span, start_revision: int, deliver: Callable[[WatchItem], None], *, deletes_only: bool = False
    ) -> Watch:
        watch = self._client.watch(span, start_revision, deliver, deletes_only=deletes_only)
        watched = _Watched(watch, self._watched)
        self._watched[watched] = deliver
        if self._closed:  # meanwhile: `close()` may not have seen this one
            watched.cancel()
            raise ClientClosed(CLIENT_CLOSED)
        return watched

    def close(self) -> None:
        """End the watches. Idempotent; does nothing in a forked child."""
        if self._closed or not self._owner.is_current:
            return
        self._closed = True
        for watched in list(self._watched):
            if (deliver := self._watched.get(watched)) is not None:
                watched.cancel()
                deliver(ClientClosed(CLIENT_CLOSED))


class _Watched:
    """A watch of one user. Cancelling removes it there."""

    def __init__(self, watch: Watch, watched: dict[_Watched, Callable[[WatchItem], None]]) -> None:
        self._watch, self._watched = watch, watched

    def cancel(self) -> None:
        self._watched.pop(self, None)
        self._watch.cancel()
