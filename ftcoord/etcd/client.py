"""EtcdClient: etcd's v3 API over gRPC, with deadlines, failover, and no write ever sent twice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ftcoord import concurrency
from ftcoord.closing import Closing
from ftcoord.config import EtcdConfig
from ftcoord.errors import EtcdError, LeaseLost
from ftcoord.etcd.api import (
    Compare,
    Get,
    KeyCalls,
    Lease,
    Op,
    RangeResult,
    Span,
    TxnResult,
    WatchItem,
)
from ftcoord.etcd.release import EMBEDDED_NAMES, newer_wanted
from ftcoord.etcd.rpc import messages
from ftcoord.etcd.rpc.batching import Batcher
from ftcoord.etcd.rpc.codec import range_request, range_result, txn_request, txn_result
from ftcoord.etcd.rpc.transport import Transport
from ftcoord.etcd.rpc.watch import Watcher, WatchHub

log = logging.getLogger(__name__)

GRPC_CLOSE_TIMEOUT: Final = 2.0
"""Seconds that `close()` waits for gRPC's threads, which have nothing left to do."""

_warned_of: set[str] = set()


@dataclass(frozen=True, slots=True)
class Status:
    """What a member says of itself."""

    version: str
    cluster_id: int
    member_id: int
    leader_id: int
    revision: int


class EtcdClient(KeyCalls, Closing):
    """A client of one etcd cluster. Implements `ftcoord.etcd.api.Etcd`.

    Every call ends within its time-out (`EtcdConfig.request_timeout` seconds unless said otherwise). Reads, and
    calls that may safely happen twice, are repeated on other members until then; a transaction that writes is sent
    again only where it provably never left, and otherwise raises `OutcomeUnknown`.

    Args:
        etcd: endpoints such as "h1:2379,h2:2379", or a sequence of them, or an EtcdConfig; None takes them from
            FTCOORD_ENDPOINTS and friends. ConfigError is raised for what is none of these.

    Thread-safe. Connects on first use. Closed when nobody refers to it any longer, and its watches with it; when the
    interpreter exits, at the latest.

    In a forked child every call raises `ForkedProcessError`, and so does making a client there, if the parent ever had
    one: gRPC does not survive `fork()`. Children that do not use etcd are not disturbed.
    """

    def __init__(self, etcd: EtcdConfig | str | Sequence[str] | None = None) -> None:
        self.config = EtcdConfig.of(etcd)
        self._transport = Transport(self.config)
        self._watches = WatchHub(self._transport)
        self._batcher = Batcher(self._transport.write)
        self._cancel_finalizer = concurrency.when_forgotten(
            self, _close, self._transport, self._watches, self._batcher, stage=concurrency.Stage.CLIENTS
        )

    def range(self, get: Get, *, timeout: float | None = None) -> RangeResult:
        response = self._transport.call(messages.RANGE, range_request(get), timeout=timeout)
        return range_result(response, response.header.revision)

    def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Op],
        failure: Sequence[Op] = (),
        *,
        timeout: float | None = None,
    ) -> TxnResult:
        request = txn_request(compares, success, failure)
        response = self._transport.call(messages.TXN, request, timeout=timeout, write=True)
        return txn_result(response, response.header.revision)

    def submit(
        self,
        compares: Sequence[Compare],
        success: Sequence[Op],
        done: Callable[[TxnResult | EtcdError], None],
        *,
        timeout: float,
    ) -> None:
        self._transport.check_process()

        def tell(response: Any, revision: int, error: EtcdError | None) -> None:
            done(error or txn_result(response, revision))

        self._batcher.submit(txn_request(compares, success, ()), timeout, tell)

    def grant(self, ttl: int, *, timeout: float | None = None) -> Lease:
        # Safe to repeat: a lease nobody knows of holds no keys, and expires.
        response = self._transport.call(messages.GRANT, messages.message("LeaseGrantRequest")(ttl=ttl), timeout=timeout)
        return Lease(response.id, response.ttl)

    def renew(self, lease_id: int, *, timeout: float | None = None) -> int:
        request = messages.message("LeaseKeepAliveRequest")(id=lease_id)
        # A stream for etcd; one request and one answer look the same on it as a unary call, which costs a third.
        response = self._transport.call(messages.KEEP_ALIVE, request, timeout=timeout)
        if response.ttl <= 0:
            raise LeaseLost(f"lease {lease_id:x} has expired or was revoked; take a new one")
        return int(response.ttl)

    def revoke(self, lease_id: int, *, timeout: float | None = None) -> None:
        try:
            self._transport.call(messages.REVOKE, messages.message("LeaseRevokeRequest")(id=lease_id), timeout=timeout)
        except LeaseLost:
            log.debug("lease %x was already gone", lease_id)

    def watch(
        self, span: Span, start_revision: int, deliver: Callable[[WatchItem], None], *, deletes_only: bool = False
    ) -> Watcher:
        return self._watches.add(span, start_revision, deliver, deletes_only)

    def compact(self, revision: int) -> None:
        """Forget the history before `revision`. Repeating it is an error of etcd's, raised as RequestRefused."""
        self._transport.call(messages.COMPACT, messages.message("CompactionRequest")(revision=revision), write=True)

    def status(self, *, timeout: float | None = None) -> Status:
        """Ask a member who it is.

        Warns once a process of a release with bugs that endanger coordination, but not of an etcd that ftcoord started:
        whoever started it to try things out has nothing to mend, and `ftcoord server` says it by itself.
        """
        response = self._transport.call(messages.STATUS, messages.message("StatusRequest")(), timeout=timeout)
        header = response.header
        if newer_wanted(response.version) and not self._is_embedded(header.member_id):
            _warn_below_floor(response.version)
        return Status(response.version, header.cluster_id, header.member_id, response.leader, header.revision)

    @property
    def version(self) -> str:
        """The release of the member that answers, such as "3.5.21". Raises EtcdError."""
        return self.status().version

    def close(self) -> None:
        """End all watches and connections; idempotent, nothing in a forked child. Leases stay: revoke them first."""
        if not self._transport.is_owner():
            return
        self._cancel_finalizer()
        _close(self._transport, self._watches, self._batcher)

    def __repr__(self) -> str:
        return f"EtcdClient({self.config.describe()})"

    def _is_embedded(self, member_id: int) -> bool:
        """Whether ftcoord started this member, here or in another process; False where etcd does not tell."""
        try:
            response = self._transport.call(messages.MEMBERS, messages.message("MemberListRequest")())
        except EtcdError as error:  # the warning is not worth a failure
            log.debug("etcd does not list its members: %s", error)
            return False
        return any(member.id == member_id and member.name.startswith(EMBEDDED_NAMES) for member in response.members)


def _close(transport: Transport, watches: WatchHub, batcher: Batcher) -> None:
    """In this order: calls fail, then watches end and nothing more is sent, then no thread is in gRPC."""
    transport.close()
    watches.close()
    batcher.close()
    transport.join(GRPC_CLOSE_TIMEOUT)


def _warn_below_floor(version: str) -> None:
    wanted = newer_wanted(version)
    if wanted is not None and version not in _warned_of:
        _warned_of.add(version)
        log.warning("etcd %s has known lease and watch bugs; use %s or newer for real training runs", version, wanted)
