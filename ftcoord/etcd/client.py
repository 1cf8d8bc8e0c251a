"""EtcdClient: etcd's v3 API over gRPC, with deadlines and failover. It never applies a write twice."""

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
    MemberStatus,
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
"""Seconds that `close()` waits for gRPC's threads, which have no work left."""

_warned_of: set[str] = set()


@dataclass(frozen=True, slots=True)
class Status:
    """The status that an etcd member reports.

    Args:
        version: its version, such as "3.5.21".
        cluster_id, member_id, leader_id: etcd's ids; `leader_id` is 0 while there is no leader.
        revision: etcd's revision.
    """

    version: str
    cluster_id: int
    member_id: int
    leader_id: int
    revision: int


class EtcdClient(KeyCalls, Closing):
    """A client of one etcd cluster. Implements `ftcoord.etcd.api.Etcd`. Thread-safe.

        with ftcoord.EtcdClient("h1:2379,h2:2379") as client:
            client.put("/key", b"value")
            print(client.get("/key").one)

    Every call ends within `timeout` seconds; None stands for `EtcdConfig.request_timeout` (5 s by default). Reads, and
    calls that may safely happen twice, are repeated on other members until then. A transaction is sent again only if
    it provably had no effect; otherwise it raises `OutcomeUnknown`.

    Every call may raise these subclasses of `EtcdError`: `EtcdUnavailable` (no answer, and no effect), `EtcdAuthError`
    (the login or a permission was refused), `RequestRefused` (too large or malformed) and `ClientClosed`. Calls that
    write may also raise `OutcomeUnknown` and `EtcdNoSpace`: the write may have happened.

    Args:
        etcd: endpoints such as "h1:2379,h2:2379", or a sequence of them, or an EtcdConfig; None takes them from
            FTCOORD_ENDPOINTS and related variables, see `EtcdConfig.load`.

    Raises ConfigError for any other argument. Connects on first use. A client that nobody refers to is closed, and its
    watches with it; at the latest when the interpreter exits.

    In a forked child every call raises `ForkedProcessError`. So does making a client there, if the parent ever had one:
    gRPC does not survive `fork()`. Children that do not use etcd are not affected.
    """

    def __init__(self, etcd: EtcdConfig | str | Sequence[str] | None = None) -> None:
        self.config = EtcdConfig.of(etcd)
        self._transport = Transport(self.config)
        self._watches = WatchHub(self._transport)
        self._batcher = Batcher(self._transport.write)
        self._cancel_finalizer = concurrency.when_forgotten(
            self, _close, self._transport, self._watches, self._batcher, last=True
        )

    def range(self, get: Get, *, timeout: float | None = None) -> RangeResult:
        """Read a span of keys, linearizably, within `timeout` seconds.

        Raises RequestRefused when etcd has compacted the revision that `get` names, and the errors of every call.
        """
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
        """Run `success` if all `compares` hold, else `failure`, as one atomic transaction, within `timeout` seconds.

        With an empty `failure`, a guard that does not hold changes nothing: the result is not `succeeded`, and has no
        `results`.

        Raises, besides the errors of every call: OutcomeUnknown (the write may have happened: read before you repeat
        it), EtcdNoSpace, LeaseLost (a Put names a lease that is gone), and RequestRefused for a transaction of Gets
        only, which could crash etcd before 3.5.7.
        """
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
        """Start a transaction that writes, without waiting for it. It may share a request with others.

        `done` is called once, with the result or with the error that `txn` would raise, after `timeout` seconds at
        most. That is on the caller's thread before this returns, or on a thread of the client. It must not block.
        """
        self._transport.check_process()

        def tell(response: Any, revision: int, error: EtcdError | None) -> None:
            done(error or txn_result(response, revision))

        self._batcher.submit(txn_request(compares, success, ()), timeout, tell)

    def grant(self, ttl: int, *, timeout: float | None = None) -> Lease:
        """Take a new lease of `ttl` seconds, within `timeout` seconds. etcd may grant a longer TTL, see the result.

        Nobody renews it: see `Session`. Raises the errors of every call.
        """
        # Safe to repeat: a lease nobody knows of holds no keys, and expires.
        response = self._transport.call(messages.GRANT, messages.message("LeaseGrantRequest")(ttl=ttl), timeout=timeout)
        return Lease(response.id, response.ttl)

    def renew(self, lease_id: int, *, timeout: float | None = None) -> int:
        """Renew a lease once, within `timeout` seconds; returns the TTL granted, in seconds.

        Raises LeaseLost when the lease has expired or was revoked, and the errors of every call.
        """
        request = messages.message("LeaseKeepAliveRequest")(id=lease_id)
        response = self._transport.call(messages.KEEP_ALIVE, request, timeout=timeout)
        if response.ttl <= 0:
            raise LeaseLost(f"lease {lease_id:x} has expired or was revoked; take a new one")
        return int(response.ttl)

    def revoke(self, lease_id: int, *, timeout: float | None = None) -> None:
        """Revoke a lease, which deletes its keys, within `timeout` seconds. A lease that is already gone is no error.

        Raises the errors of every call.
        """
        try:
            self._transport.call(messages.REVOKE, messages.message("LeaseRevokeRequest")(id=lease_id), timeout=timeout)
        except LeaseLost:
            log.debug("lease %x was already gone", lease_id)

    def time_left(self, lease_id: int, *, timeout: float | None = None) -> tuple[int, int]:
        """Whole seconds that a lease has left, and its granted TTL; (-1, 0) for a lease that is gone. Within `timeout`
        seconds. Raises the errors of every call."""
        request = messages.message("LeaseTimeToLiveRequest")(id=lease_id)
        response = self._transport.call(messages.TIME_TO_LIVE, request, timeout=timeout)
        return int(response.ttl), int(response.granted_ttl)

    def watch(
        self, span: Span, start_revision: int, deliver: Callable[[WatchItem], None], *, deletes_only: bool = False
    ) -> Watcher:
        """Deliver every change of `span` from `start_revision` on, each once and in order, until cancelled.

        Args:
            span: the keys.
            start_revision: the first revision; 0 for changes from now on.
            deliver: called with Began whenever the watch is established, with each Batch of changes, and at most once
                with the error that ends the watch (Compacted, Rewound, EtcdAuthError, ClientClosed). Runs on the
                client's thread, and must not block.
            deletes_only: whether to leave out puts.

        The watch survives outages of etcd and missing members. Call `cancel()` of the result to end it. Raises
        ClientClosed.
        """
        return self._watches.add(span, start_revision, deliver, deletes_only)

    def compact(self, revision: int) -> None:
        """Delete etcd's history before `revision`.

        Raises RequestRefused if it is already compacted up to there, or not there yet; OutcomeUnknown; and the errors
        of every call.
        """
        self._transport.call(messages.COMPACT, messages.message("CompactionRequest")(revision=revision), write=True)

    def status(self, *, timeout: float | None = None) -> Status:
        """Ask a member for its status, within `timeout` seconds. Raises the errors of every call.

        Logs one warning per process about an etcd version with bugs that endanger coordination. It does not for an
        etcd that ftcoord started to try things out; `ftcoord server` reports that itself.
        """
        response = self._transport.call(messages.STATUS, messages.message("StatusRequest")(), timeout=timeout)
        header = response.header
        if newer_wanted(response.version) and not self._is_embedded(header.member_id):
            _warn_below_floor(response.version)
        return Status(response.version, header.cluster_id, header.member_id, response.leader, header.revision)

    def member_status(self, *, timeout: float | None = None) -> MemberStatus:
        """What the member that answers reports of itself, within `timeout` seconds. Raises the errors of every call."""
        began = concurrency.now()
        found = self._transport.call(messages.STATUS, messages.message("StatusRequest")(), timeout=timeout)
        return MemberStatus(
            found.version,
            f"{found.header.member_id:x}",
            f"{found.leader:x}" if found.leader else "",
            found.raft_term,
            found.db_size,
            found.db_size_in_use,
            found.db_size_quota,
            found.is_learner,
            tuple(found.errors),
            concurrency.now() - began,
        )

    def alarms(self, *, timeout: float | None = None) -> list[tuple[str, str]]:
        """The active alarms, within `timeout` seconds: the member's id, in hexadecimal, and etcd's name of the alarm.

        Raises the errors of every call.
        """
        found = self._transport.call(messages.ALARMS, messages.message("AlarmRequest")(), timeout=timeout)
        return [(f"{one.member_id:x}", messages.ALARM_NAMES.get(one.alarm, str(one.alarm))) for one in found.alarms]

    @property
    def version(self) -> str:
        """The version of the member that answers, such as "3.5.21". Raises the errors of every call."""
        return self.status().version

    def requires_login(self) -> bool:
        """Whether etcd requires a login, as a client with a user can tell. It may log in.

        Raises EtcdAuthError when that is refused, and the errors of every call.
        """
        return bool(self._transport.token())

    def close(self) -> None:
        """End all watches and connections. Idempotent; does nothing in a forked child.

        Leases are not revoked: do that first.
        """
        if not self._transport.is_owner():
            return
        self._cancel_finalizer()
        _close(self._transport, self._watches, self._batcher)

    def __repr__(self) -> str:
        return f"EtcdClient({self.config.describe()})"

    def _is_embedded(self, member_id: int) -> bool:
        """Whether ftcoord started this member, here or in another process; False if etcd does not list its members."""
        try:
            response = self._transport.call(messages.MEMBERS, messages.message("MemberListRequest")())
        except EtcdError as error:  # the warning is not worth a failure
            log.debug("etcd does not list its members: %s", error)
            return False
        return any(member.id == member_id and member.name.startswith(EMBEDDED_NAMES) for member in response.members)


def _close(transport: Transport, watches: WatchHub, batcher: Batcher) -> None:
    """In this order: calls fail, watches end, nothing more is sent, no thread is left in gRPC."""
    transport.close()
    watches.close()
    batcher.close()
    transport.join(GRPC_CLOSE_TIMEOUT)


def _warn_below_floor(version: str) -> None:
    wanted = newer_wanted(version)
    if wanted is not None and version not in _warned_of:
        _warned_of.add(version)
        log.warning("etcd %s has known lease and watch bugs; use %s or newer for real training runs", version, wanted)
