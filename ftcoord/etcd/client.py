"""Clients of etcd's v3 API. They never apply a write twice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from ftcoord import concurrency
from ftcoord.closing import Closing
from ftcoord.config import EtcdConfig, full_text, key_path
from ftcoord.core.layout import KEY_PREFIX, run_prefix
from ftcoord.errors import NO_ETCD, ClientClosed, EtcdError, EtcdUnavailable, LeaseLost, WrongEndpoint
from ftcoord.etcd import api, messages
from ftcoord.etcd.api import Compare, Etcd, Get, Lease, MemberStatus, Op, RangeResult, Span, TxnResult, Watch, WatchItem
from ftcoord.etcd.messages import message
from ftcoord.etcd.retry import retry
from ftcoord.etcd.transport import CLIENT_CLOSED, Transport
from ftcoord.etcd.watch import WatchHub

log = logging.getLogger(__name__)

GRPC_CLOSE_TIMEOUT: Final = 2.0
"""Seconds that `close()` waits for gRPC's threads, which have no work left."""
FIRST_ATTEMPT: Final = 5.0
"""The most seconds for one attempt to reach etcd: then a log line gives the reason why it failed."""

_warned_of: set[str] = set()


class EtcdClient(Etcd, Closing):
    """A client of one etcd cluster. Thread-safe.

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

    config: EtcdConfig
    _user: object = None
    """Whose watches those of this object are."""

    def __init__(self, etcd: EtcdConfig | str | Sequence[str] | None = None) -> None:
        self.config = EtcdConfig.of(etcd)
        self._transport = Transport(self.config)
        self._watches = WatchHub(self._transport)
        self._cancel_finalizer = concurrency.when_forgotten(self, _close, self._transport, self._watches, last=True)

    def range(self, get: Get, *, timeout: float | None = None) -> RangeResult:
        response = self._call(messages.RANGE, messages.range_request(get), timeout)
        return messages.range_result(response, response.header.revision)

    def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Op],
        failure: Sequence[Op] = (),
        *,
        timeout: float | None = None,
    ) -> TxnResult:
        request = messages.txn_request(compares, success, failure)
        return messages.txn_result(self._call(messages.TXN, request, timeout, write=True))

    def grant(self, ttl: int, *, timeout: float | None = None) -> Lease:
        # Safe to repeat: a lease nobody knows of holds no keys, and expires.
        response = self._call(messages.GRANT, message("LeaseGrantRequest")(ttl=ttl), timeout)
        return Lease(response.id, response.ttl)

    def renew(self, lease_id: int, *, timeout: float | None = None) -> int:
        response = self._call(messages.KEEP_ALIVE, message("LeaseId")(id=lease_id), timeout)
        if response.ttl <= 0:
            raise LeaseLost(f"lease {lease_id:x} has expired or was revoked; take a new one")
        return int(response.ttl)

    def revoke(self, lease_id: int, *, timeout: float | None = None) -> None:
        try:
            self._call(messages.REVOKE, message("LeaseId")(id=lease_id), timeout)
        except LeaseLost:
            log.debug("lease %x was already gone", lease_id)

    def time_left(self, lease_id: int, *, timeout: float | None = None) -> tuple[int, int]:
        """Whole seconds that a lease has left, and its granted TTL; (-1, 0) for a lease that is gone. Within `timeout`
        seconds. Raises the errors of every call."""
        response = self._call(messages.TIME_TO_LIVE, message("LeaseId")(id=lease_id), timeout)
        return int(response.ttl), int(response.granted_ttl)

    def watch(
        self, span: Span, start_revision: int, deliver: Callable[[WatchItem], None], *, deletes_only: bool = False
    ) -> Watch:
        return self._watches.add(span, start_revision, deliver, deletes_only, user=self._user)

    def compact(self, revision: int) -> None:
        """Delete etcd's history before `revision`.

        Raises RequestRefused if it is already compacted up to there, or not there yet; OutcomeUnknown; and the errors
        of every call.
        """
        self._call(messages.COMPACT, message("CompactionRequest")(revision=revision), write=True)

    def status(self, *, timeout: float | None = None) -> MemberStatus:
        """As `member_status`. Logs one warning per process about an etcd version with bugs that endanger coordination;
        none about an etcd that ftcoord started to try things out: `ftcoord server` reports that itself."""
        found = self.member_status(timeout=timeout)
        wanted = api.newer_wanted(found.version)
        if wanted is not None and found.version not in _warned_of and not self._is_embedded(found.member_id):
            _warned_of.add(found.version)
            log.warning(
                "etcd %s has known lease and watch bugs; use %s or newer for real training runs", found.version, wanted
            )
        return found

    def member_status(self, *, timeout: float | None = None) -> MemberStatus:
        """What the member that answers reports of itself, within `timeout` seconds. Raises the errors of every call."""
        began = concurrency.now()
        found = self._call(messages.STATUS, message("Empty")(), timeout)
        return MemberStatus(
            version=found.version,
            member_id=f"{found.header.member_id:x}",
            leader_id=f"{found.leader:x}" if found.leader else "",
            raft_term=found.raft_term,
            db_size=found.db_size,
            db_size_in_use=found.db_size_in_use,
            db_quota=found.db_size_quota,
            is_learner=found.is_learner,
            errors=tuple(found.errors),
            seconds=concurrency.now() - began,
        )

    def alarms(self, *, timeout: float | None = None) -> list[tuple[str, str]]:
        """The active alarms, within `timeout` seconds: the member's id, in hexadecimal, and etcd's name of the alarm.

        Raises the errors of every call.
        """
        found = self._call(messages.ALARMS, message("Empty")(), timeout)
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

    def set_login(self, required: bool) -> None:
        """Have etcd require this client's login, which may then do everything; or, if not `required`, no login at all.

        Idempotent, so that it completes what an earlier call left half done. Raises the errors of every call.
        """
        login, token, switch = self.config.credentials, self._transport.token(), message("Empty")()
        if login is None or bool(token) == required:
            return
        if required:
            user = message("User")(name=login.user, password=login.password)
            try:
                self._call(messages.USER_ADD, user)
            except EtcdError:  # the user is there already, perhaps with another password
                self._call(messages.USER_CHANGE_PASSWORD, user)
            role = message("UserRole")(user=login.user, role="root")
            self._call(messages.USER_GRANT_ROLE, role)
        self._call(messages.AUTH_ENABLE if required else messages.AUTH_DISABLE, switch)
        self._transport.forget_token(token)

    def close(self) -> None:
        """End all watches and connections. Idempotent; does nothing in a forked child.

        Leases are not revoked: do that first.
        """
        if self._transport.owner.is_current:
            self._cancel_finalizer()
            _close(self._transport, self._watches)

    def __repr__(self) -> str:
        return f"EtcdClient({self.config.describe()})"

    def _call(self, method: messages.Method, request: Any, timeout: float | None = None, *, write: bool = False) -> Any:
        return self._transport.call(method, request, timeout=timeout, write=write)

    def _is_embedded(self, member_id: str) -> bool:
        """Whether ftcoord started this member, here or in another process; False if etcd does not list its members."""
        try:
            members = self._call(messages.MEMBERS, message("Empty")()).members
        except EtcdError as error:  # the warning is not worth a failure
            log.debug("etcd does not list its members: %s", error)
            return False
        return any(f"{one.id:x}" == member_id and one.name.startswith(api.EMBEDDED_NAMES) for one in members)


def _close(transport: Transport, watches: WatchHub) -> None:
    """In this order: calls fail, watches end, no thread is left in gRPC."""
    transport.close()
    watches.close()
    transport.threads.join(GRPC_CLOSE_TIMEOUT)


class _Clients:
    """The clients of this process, which it keeps until its end. A forked child starts with none."""

    def __init__(self) -> None:
        self._lock = concurrency.lock("_Clients._lock")  # guards _known
        self._known: dict[EtcdConfig, EtcdClient] = {}

    def of(self, config: EtcdConfig) -> EtcdClient:
        with self._lock:
            return self._known.get(config) or self._known.setdefault(config, EtcdClient(config))


class SharedClient(EtcdClient):
    """The process's client for `config`, for one of its users: one connection and one stream of watches. Thread-safe.

    It owns no thread and no connection. `close()` ends its watches; after that every call raises ClientClosed. Making
    one raises ConfigError when a TLS file cannot be read, and ForkedProcessError, see `EtcdClient`.
    """

    def __init__(self, config: EtcdConfig) -> None:
        shared = concurrency.of_process(_Clients).of(config)
        self.config, self._transport, self._watches = config, shared._transport, shared._watches  # never change
        self._user = object()
        self._closed = False  # any thread; becomes True once

    def watch(
        self, span: Span, start_revision: int, deliver: Callable[[WatchItem], None], *, deletes_only: bool = False
    ) -> Watch:
        self._check_open()
        watcher = super().watch(span, start_revision, deliver, deletes_only=deletes_only)
        if self._closed:  # meanwhile: `close()` may not have seen this one
            watcher.cancel()
        self._check_open()
        return watcher

    def await_answer(self, timeout: float, limit: str) -> None:
        """Wait until etcd answers, for `timeout` seconds: pods start in any order. Logs every few seconds that it does
        not.

        What waiting cannot mend (a refused login, a certificate that is not trusted) is raised after the first attempt.
        `limit` is the name of the setting that the timeout comes from. Raises EtcdError.
        """
        deadline, line_at = concurrency.now() + timeout, 0.0

        def attempt() -> WrongEndpoint | None:
            nonlocal line_at
            try:
                self.status(timeout=min(FIRST_ATTEMPT, self.config.request_timeout, deadline - concurrency.now()))
            except WrongEndpoint as error:
                return error
            except EtcdUnavailable as error:
                now = concurrency.now()
                if (left := deadline - now) > 0 and now >= line_at:
                    line_at = now + FIRST_ATTEMPT
                    log.warning("%s; trying again for %.0f s (%s)", unusable(self.config, error), left, limit)
                raise
            return None

        if (wrong := retry(attempt, (EtcdUnavailable,), deadline, self._transport.closed)) is not None:
            raise wrong

    def close(self) -> None:
        """End the watches. Idempotent; does nothing in a forked child."""
        if not self._closed and self._transport.owner.is_current:
            self._closed = True
            self._watches.end(self._user)

    def _call(self, method: messages.Method, request: Any, timeout: float | None = None, *, write: bool = False) -> Any:
        self._check_open()
        return super()._call(method, request, timeout, write=write)

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosed(CLIENT_CLOSED)


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
