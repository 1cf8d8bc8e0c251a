"""One client a process for all who want the same etcd: one connection, one stream of watches, shared requests."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final

from ftcoord import concurrency
from ftcoord.config import EtcdConfig
from ftcoord.errors import ClientClosed, EtcdError
from ftcoord.etcd.api import Compare, Get, Lease, Op, RangeResult, Span, TxnResult, Watch, WatchItem
from ftcoord.etcd.client import EtcdClient, Status
from ftcoord.etcd.rpc.transport import CLOSED


class _Counted:
    """A client, and how many hold it."""

    def __init__(self, config: EtcdConfig) -> None:
        self.client = EtcdClient(config)
        self.holders = 0


class _Clients:
    """Those of this process. In a forked child there are none: the parent's stay where they are, and unused."""

    def __init__(self) -> None:
        self.lock = concurrency.rlock("_Clients.lock")
        self.known: dict[EtcdConfig, _Counted] = {}


_clients: Final[dict[int, _Clients]] = {os.getpid(): _Clients()}
os.register_at_fork(after_in_child=lambda: _clients.update({os.getpid(): _Clients()}))


class SharedClient:
    """A hold on the process's client for `config`. Implements `ftcoord.etcd.api.Etcd`.

    What it watches ends with its `close()`, and the client with that of the last hold on it. Thread-safe. Raises
    ConfigError when it makes the client, and a TLS file cannot be read; and ForkedProcessError, see `EtcdClient`.
    """

    def __init__(self, config: EtcdConfig) -> None:
        self.config = config
        self._pid = os.getpid()
        self._watched: dict[_Watched, Callable[[WatchItem], None]] = {}
        self._closed = False
        clients = _clients[self._pid]
        with clients.lock:
            self._counted = clients.known.get(config) or clients.known.setdefault(config, _Counted(config))
            self._counted.holders += 1

    def range(self, get: Get, *, timeout: float | None = None) -> RangeResult:
        return self._client.range(get, timeout=timeout)

    def get(self, key: str) -> RangeResult:
        return self._client.get(key)

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

    def put(self, key: str, value: bytes, lease: int = 0) -> TxnResult:
        return self._client.put(key, value, lease)

    def delete(self, span: Span) -> int:
        return self._client.delete(span)

    def grant(self, ttl: int) -> Lease:
        return self._client.grant(ttl)

    def renew(self, lease_id: int, *, timeout: float | None = None) -> int:
        return self._client.renew(lease_id, timeout=timeout)

    def revoke(self, lease_id: int, *, timeout: float | None = None) -> None:
        self._client.revoke(lease_id, timeout=timeout)

    def status(self, *, timeout: float | None = None) -> Status:
        return self._client.status(timeout=timeout)

    def watch(
        self, span: Span, start_revision: int, deliver: Callable[[WatchItem], None], *, deletes_only: bool = False
    ) -> Watch:
        watched = _Watched(self._client.watch(span, start_revision, deliver, deletes_only=deletes_only), self._watched)
        self._watched[watched] = deliver
        if self._closed:  # meanwhile
            watched.cancel()
            raise ClientClosed(CLOSED)
        return watched

    def close(self) -> None:
        """Let go. Idempotent; nothing happens in a forked child."""
        if os.getpid() != self._pid:
            return
        clients = _clients[self._pid]
        with clients.lock:
            if self._closed:
                return
            self._closed = True
            self._counted.holders -= 1
            is_last = not self._counted.holders
            if is_last:
                del clients.known[self.config]
        if is_last:
            self._counted.client.close()
            return
        for watched, deliver in list(self._watched.items()):
            watched.cancel()
            deliver(ClientClosed(CLOSED))

    @property
    def _client(self) -> EtcdClient:
        if self._closed:
            raise ClientClosed(CLOSED)
        return self._counted.client


class _Watched:
    """A watch of one holder, which forgets it when it is cancelled."""

    def __init__(self, watch: Watch, watched: dict[_Watched, Callable[[WatchItem], None]]) -> None:
        self._watch, self._watched = watch, watched

    def cancel(self) -> None:
        self._watched.pop(self, None)
        self._watch.cancel()
