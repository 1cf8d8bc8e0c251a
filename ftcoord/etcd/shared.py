"""One client per process for all users of the same etcd: one connection, one stream of watches, shared requests."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Final

from ftcoord import concurrency
from ftcoord.closing import Closing
from ftcoord.config import EtcdConfig
from ftcoord.errors import NO_ETCD, ClientClosed, EtcdError, EtcdUnavailable, WrongEndpoint
from ftcoord.etcd.api import Compare, Get, KeyCalls, Lease, Op, RangeResult, Span, TxnResult, Watch, WatchItem
from ftcoord.etcd.client import EtcdClient, Status
from ftcoord.etcd.rpc.transport import CLIENT_CLOSED
from ftcoord.fork import OwnerProcess

log = logging.getLogger(__name__)

FIRST_ATTEMPT: Final = 5.0
"""The most seconds for the first attempt to reach etcd: then a log line tells why it failed. Each later attempt may
take as much more, up to `request_timeout`."""


class _Counted:
    """A client, and how many holds it has."""

    def __init__(self, config: EtcdConfig) -> None:
        self.client = EtcdClient(config)
        self.holders = 0  # guarded by _Clients.lock


class _Clients:
    """The shared clients of this process. A forked child starts with none."""

    def __init__(self) -> None:
        # Guards known and all that is in it. Reentrant: a finalizer may close a hold where another one is made.
        self.lock = concurrency.rlock("_Clients.lock")
        self.known: dict[EtcdConfig, _Counted] = {}


class _Hold:
    """One hold on a client, and the watches made through it: everything that a `SharedClient` has to release."""

    def __init__(self, config: EtcdConfig) -> None:
        self._config = config
        self._clients = concurrency.of_process(_Clients)
        # Any thread, one step of a dict at a time: `watch()` looks at `closed` after it has put its own.
        self.watched: dict[_Watched, Callable[[WatchItem], None]] = {}
        with self._clients.lock:
            self.closed = False  # written with the lock held; becomes True once, and is read without it
            known = self._clients.known
            self._counted = known.get(config) or known.setdefault(config, _Counted(config))
            self._counted.holders += 1

    @property
    def client(self) -> EtcdClient:
        """The client. Raises ClientClosed."""
        if self.closed:
            raise ClientClosed(CLIENT_CLOSED)
        return self._counted.client

    def let_go(self) -> None:
        """Release the hold. Idempotent."""
        with self._clients.lock:
            if self.closed:
                return
            self.closed = True
            self._counted.holders -= 1
            is_last = not self._counted.holders
            if is_last:
                del self._clients.known[self._config]
        if is_last:  # without the lock: it waits for threads, which may take it
            self._counted.client.close()
            return
        for watched, deliver in list(self.watched.items()):
            watched.cancel()
            deliver(ClientClosed(CLIENT_CLOSED))


class SharedClient(KeyCalls, Closing):
    """A hold on the process's client for `config`. Implements `ftcoord.etcd.api.Etcd`. Thread-safe.

    `close()` ends its watches; the client is closed with its last hold. A hold that nobody refers to is released.
    Making one raises ConfigError when a TLS file cannot be read, and ForkedProcessError, see `EtcdClient`. After
    `close()` every call raises ClientClosed.
    """

    def __init__(self, config: EtcdConfig) -> None:
        self.config = config
        self._owner = OwnerProcess("this etcd client belongs to the parent process")
        self._hold = _Hold(config)
        self._cancel_finalizer = concurrency.when_forgotten(self, self._hold.let_go, stage=concurrency.Stage.CLIENTS)

    def range(self, get: Get, *, timeout: float | None = None) -> RangeResult:
        return self._hold.client.range(get, timeout=timeout)

    def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Op],
        failure: Sequence[Op] = (),
        *,
        timeout: float | None = None,
    ) -> TxnResult:
        return self._hold.client.txn(compares, success, failure, timeout=timeout)

    def grant(self, ttl: int, *, timeout: float | None = None) -> Lease:
        return self._hold.client.grant(ttl, timeout=timeout)

    def renew(self, lease_id: int, *, timeout: float | None = None) -> int:
        return self._hold.client.renew(lease_id, timeout=timeout)

    def revoke(self, lease_id: int, *, timeout: float | None = None) -> None:
        self._hold.client.revoke(lease_id, timeout=timeout)

    def status(self, *, timeout: float | None = None) -> Status:
        return self._hold.client.status(timeout=timeout)

    def await_answer(self, timeout: float, limit: str) -> None:
        """Wait until etcd answers, for `timeout` seconds: pods start in any order. Logs every few seconds that it does
        not.

        What waiting cannot mend (a refused login, a certificate that is not trusted) is raised after the first attempt.
        `limit` is the name of the setting that the timeout comes from. Raises EtcdError.
        """
        config = self.config
        left, told_at = timeout, -math.inf
        deadline = concurrency.now() + timeout
        for attempt in itertools.count(1):
            try:
                self.status(timeout=min(config.request_timeout, attempt * FIRST_ATTEMPT, left))
            except WrongEndpoint:
                raise
            except EtcdUnavailable as error:
                now = concurrency.now()
                left = deadline - now
                if left <= 0:
                    raise
                if now - told_at >= FIRST_ATTEMPT:
                    log.warning("%s; trying again for %.0f s (%s)", unusable(config, error), left, limit)
                    told_at = now
            else:
                return

    def watch(
        self, span: Span, start_revision: int, deliver: Callable[[WatchItem], None], *, deletes_only: bool = False
    ) -> Watch:
        hold = self._hold
        watched = _Watched(hold.client.watch(span, start_revision, deliver, deletes_only=deletes_only), hold.watched)
        hold.watched[watched] = deliver
        if hold.closed:  # meanwhile: `let_go()` may not have seen this one
            watched.cancel()
            raise ClientClosed(CLIENT_CLOSED)
        return watched

    def close(self) -> None:
        """Release the client. Idempotent; does nothing in a forked child."""
        if self._owner.is_current:
            self._cancel_finalizer()
            self._hold.let_go()


class _Watched:
    """A watch of one hold. Cancelling removes it from the hold."""

    def __init__(self, watch: Watch, watched: dict[_Watched, Callable[[WatchItem], None]]) -> None:
        self._watch, self._watched = watch, watched

    def cancel(self) -> None:
        self._watched.pop(self, None)
        self._watch.cancel()


def unusable(config: EtcdConfig, error: EtcdError) -> str:
    """Why etcd cannot be used. Names each endpoint once, if there is only one."""
    if len(config.endpoints) == 1 and str(error).startswith(NO_ETCD):
        return str(error)
    problem = NO_ETCD if isinstance(error, EtcdUnavailable) else "cannot use etcd at"
    return f"{problem} {config.describe()}: {error}"
