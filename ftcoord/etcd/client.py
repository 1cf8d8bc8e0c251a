"""Clients of etcd's v3 API. They never apply a write twice."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, cast

from ftcoord import concurrency
from ftcoord.closing import Closing
from ftcoord.config import EtcdConfig, full_text, key_path
from ftcoord.core.layout import KEY_PREFIX, run_prefix
from ftcoord.errors import NO_ETCD, ClientClosed, EtcdError, EtcdUnavailable, LeaseLost, WrongEndpoint
from ftcoord.etcd import messages
from ftcoord.etcd.api import (
    EMBEDDED_NAMES,
    Compare,
    Etcd,
    Get,
    KeyCalls,
    Lease,
    MemberStatus,
    Op,
    RangeResult,
    Span,
    TxnResult,
    Watch,
    WatchItem,
    newer_wanted,
)
from ftcoord.etcd.messages import range_request, range_result, txn_request, txn_result
from ftcoord.etcd.transport import CLIENT_CLOSED, Transport
from ftcoord.etcd.watch import Watcher, WatchHub
from ftcoord.fork import OwnerProcess

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
        self._cancel_finalizer = concurrency.when_forgotten(self, _close, self._transport, self._watches, last=True)

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
        _close(self._transport, self._watches)

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


def _close(transport: Transport, watches: WatchHub) -> None:
    """In this order: calls fail, watches end, no thread is left in gRPC."""
    transport.close()
    watches.close()
    transport.join(GRPC_CLOSE_TIMEOUT)


def _warn_below_floor(version: str) -> None:
    wanted = newer_wanted(version)
    if wanted is not None and version not in _warned_of:
        _warned_of.add(version)
        log.warning("etcd %s has known lease and watch bugs; use %s or newer for real training runs", version, wanted)


FIRST_ATTEMPT: Final = 5.0
"""The most seconds for the first attempt to reach etcd: then a log line tells why it failed. Each later attempt may
take as much more, up to `request_timeout`."""


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

    def grant(self, ttl: int, *, timeout: float | None = None) -> Lease:
        return self._client.grant(ttl, timeout=timeout)

    def renew(self, lease_id: int, *, timeout: float | None = None) -> int:
        return self._client.renew(lease_id, timeout=timeout)

    def revoke(self, lease_id: int, *, timeout: float | None = None) -> None:
        self._client.revoke(lease_id, timeout=timeout)

    def status(self, *, timeout: float | None = None) -> Status:
        return self._client.status(timeout=timeout)

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


def unusable(config: EtcdConfig, error: EtcdError) -> str:
    """Why etcd cannot be used. Names each endpoint once, if there is only one."""
    if len(config.endpoints) == 1 and str(error).startswith(NO_ETCD):
        return str(error)
    problem = NO_ETCD if isinstance(error, EtcdUnavailable) else "cannot use etcd at"
    return f"{problem} {config.describe()}: {error}"


@dataclass(frozen=True, slots=True)
class Namespace(Closing):
    """The prefix and the client of a run.

    Args:
        prefix: the prefix of the run's keys.
        etcd: the client of the run's etcd.
        own: the same client, if it is to be closed with this.
    """

    prefix: str
    etcd: Etcd
    own: SharedClient | None = None

    @classmethod
    def open(
        cls, run: object, etcd: Etcd | EtcdConfig | str | Sequence[str] | None, key_prefix: object = KEY_PREFIX
    ) -> Namespace:
        """Check the arguments, then make a client if none is given.

        Args:
            run: the run's id, as in `--rdzv-id`.
            etcd: a client, or endpoints such as "h1:2379,h2:2379"; None takes them from FTCOORD_ENDPOINTS and related
                variables.
            key_prefix: the `key_prefix` of `rdzv_conf`.

        Raises ConfigError before any socket is opened.
        """
        prefix = run_prefix(
            key_path("key_prefix", key_prefix), full_text("run", run, "give the run's id, as in torchrun's --rdzv-id")
        )
        if hasattr(etcd, "txn"):
            return cls(prefix, cast(Etcd, etcd))
        client = SharedClient(EtcdConfig.of(cast(str, etcd)))
        return cls(prefix, client, client)

    def close(self) -> None:
        """Close the client, if it was made here. Idempotent."""
        if self.own is not None:
            self.own.close()
