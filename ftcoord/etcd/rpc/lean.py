"""An etcd client that takes a few megabytes and loads in a moment: for sentinels, one beside each process, and for
operators' commands.

gRPC's library takes 25 MB and several threads. Here h2 (https://python-hyper.org/projects/h2/) speaks HTTP/2 over one
socket, one call at a time, on the calling thread. It connects when there is a call to make, so an idle client costs
etcd nothing. For gRPC on top of HTTP/2 see https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import unquote

from google.protobuf.message import DecodeError
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import H2Error

from ftcoord import concurrency
from ftcoord.config import Endpoint, EtcdConfig, Tls
from ftcoord.errors import EtcdUnavailable, LeaseLost
from ftcoord.etcd.api import Compare, Get, Lease, MemberStatus, Op, RangeResult, TxnResult
from ftcoord.etcd.rpc import errors, messages
from ftcoord.etcd.rpc.codec import range_request, range_result, txn_request, txn_result
from ftcoord.etcd.rpc.dialer import Dialer, left

if TYPE_CHECKING:
    import ssl

T = TypeVar("T")

_STATUS: Final = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
]
"""gRPC's status codes by number."""
_PREFIX: Final = struct.Struct(">?I")
"""The header of a message: whether it is compressed, and its length."""
_RECEIVED_AT_ONCE: Final = 65536
RETRY_PAUSE: Final = 0.1
"""Seconds between two attempts when no endpoint answered."""


class _Broken(Exception):
    """The connection cannot be used any more."""


_BREAKS: Final = (OSError, H2Error, DecodeError, UnicodeDecodeError, _Broken)
"""The errors with which an exchange fails, also if the server is no etcd."""


class LeanClient:
    """A client of one etcd cluster for reads, writes and leases. Not thread-safe. Implements
    `ftcoord.etcd.api.EtcdCalls`.

    Every call ends within its timeout. A call that fails before it was sent is repeated at the next endpoint. A
    transaction whose answer is lost raises OutcomeUnknown.
    """

    def __init__(self, config: EtcdConfig) -> None:
        self._config = config
        self._dialers = [Dialer(endpoint) for endpoint in config.endpoints]  # never change
        self._index = 0  # of the endpoint in use
        self._connection: _Connection | None = None
        self._token: str | None = None
        self._was_refused = False  # since the last login, for a token that is none

    @property
    def config(self) -> EtcdConfig:
        return self._config

    def range(self, get: Get, *, timeout: float | None = None) -> RangeResult:
        """Read a span. Raises EtcdError."""
        response = self._call(messages.RANGE, range_request(get), timeout)
        return range_result(response, response.header.revision)

    def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Op],
        failure: Sequence[Op] = (),
        *,
        timeout: float | None = None,
    ) -> TxnResult:
        """Make a transaction. Raises OutcomeUnknown, and EtcdError."""
        response = self._call(messages.TXN, txn_request(compares, success, failure), timeout, write=True)
        return txn_result(response, response.header.revision)

    def grant(self, ttl: int, *, timeout: float | None = None) -> Lease:
        """Take a new lease of `ttl` seconds. Raises EtcdError."""
        response = self._call(messages.GRANT, messages.message("LeaseGrantRequest")(ttl=ttl), timeout)
        return Lease(response.id, response.ttl)

    def renew(self, lease_id: int, *, timeout: float | None = None) -> int:
        """Renew a lease; returns the TTL granted, in seconds. Raises LeaseLost, and EtcdError."""
        request = messages.message("LeaseKeepAliveRequest")(id=lease_id)
        ttl = int(self._call(messages.KEEP_ALIVE, request, timeout, login=False).ttl)
        if ttl <= 0:
            raise LeaseLost(f"lease {lease_id:x} has expired or was revoked")
        return ttl

    def revoke(self, lease_id: int, *, timeout: float | None = None) -> None:
        """Revoke a lease; one that is already gone is no error. Raises EtcdError."""
        with contextlib.suppress(LeaseLost):
            self._call(messages.REVOKE, messages.message("LeaseRevokeRequest")(id=lease_id), timeout)

    def time_left(self, lease_id: int, *, timeout: float | None = None) -> tuple[int, int]:
        """Whole seconds that a lease has left, and its granted TTL; (-1, 0) for a lease that is gone. Raises
        EtcdError."""
        request = messages.message("LeaseTimeToLiveRequest")(id=lease_id)
        response = self._call(messages.TIME_TO_LIVE, request, timeout)
        return int(response.ttl), int(response.granted_ttl)

    def status(self, *, timeout: float | None = None) -> MemberStatus:
        """The status of the member that answers. Raises EtcdError."""
        began = concurrency.now()
        found = self._call(messages.STATUS, messages.message("StatusRequest")(), timeout)
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
        """The active alarms: the member's id, in hexadecimal, and etcd's name of the alarm. Raises EtcdError."""
        found = self._call(messages.ALARMS, messages.message("AlarmRequest")(), timeout)
        return [(f"{one.member_id:x}", messages.ALARM_NAMES.get(one.alarm, str(one.alarm))) for one in found.alarms]

    def requires_login(self) -> bool:
        """As `EtcdClient.requires_login`."""
        return bool(self._token_of(concurrency.now() + self._config.request_timeout))

    def close(self) -> None:
        """Close the connection; the next call opens another one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _call(
        self,
        method: messages.Method,
        request: Any,
        timeout: float | None,
        *,
        write: bool = False,
        login: bool = True,
    ) -> Any:
        """Without `login` etcd needs none, as far as is known: then nobody logs in before it refuses."""
        deadline = concurrency.now() + (self._config.request_timeout if timeout is None else timeout)
        body = method.serialize(request)
        while True:
            try:
                return self._once(method, body, deadline, write, login)
            except EtcdUnavailable:
                seconds = deadline - concurrency.now()
                if seconds <= RETRY_PAUSE:  # the next attempt could say nothing but that the time is over
                    raise
                concurrency.sleep(RETRY_PAUSE)

    def _once(self, method: messages.Method, body: bytes, deadline: float, write: bool, login: bool) -> Any:
        where = self._config.endpoints[self._index]
        token = self._token_of(deadline) if login or self._was_refused else self._token or ""
        connection = self._connected(deadline)
        try:
            failure, answer = connection.exchange(method.path, body, token, deadline)
            if failure is None:
                return method.parse(answer)
        except _BREAKS as error:
            self._give_up()
            failure = errors.CallFailure("UNAVAILABLE", str(error))
            raise errors.translate(failure, write=write, where=where.target) from None
        if errors.blames_member(failure):
            self._give_up()
        if self._config.credentials and errors.is_stale_token(failure.details):
            self._token, self._was_refused = None, True
            raise EtcdUnavailable(f"etcd at {where}: the login ran out: {failure.details}")
        raise errors.translate(failure, write=write, where=where.target)

    def _token_of(self, deadline: float) -> str:
        """The login token; empty if none is needed."""
        login = self._config.credentials
        if login is None:
            return ""
        if self._token is None:
            request = messages.message("AuthenticateRequest")(name=login.user, password=login.password)
            method = messages.AUTHENTICATE
            connection = self._connected(deadline)
            try:
                failure, answer = connection.exchange(method.path, method.serialize(request), "", deadline)
                token = "" if failure is not None else str(method.parse(answer).token)
            except _BREAKS as error:
                self._give_up()
                raise EtcdUnavailable(f"etcd did not answer the login: {error}") from None
            if failure is not None and "authentication is not enabled" not in failure.details:
                refusal = errors.translate(failure, write=False, where=str(self._config.endpoints[self._index]))
                if errors.blames_member(failure):  # it has no leader, or is a learner
                    self._give_up()
                raise refusal
            self._token, self._was_refused = token, False
        return self._token

    def _connected(self, deadline: float) -> _Connection:
        if self._connection is None:
            where = self._config.endpoints[self._index]
            try:
                self._connection = _Connection(self._dialers[self._index], where, self._config.tls, deadline)
            except _BREAKS as error:
                self._give_up()
                raise EtcdUnavailable(f"etcd at {where}: {error}") from None
        return self._connection

    def _give_up(self) -> None:
        """Continue with the next endpoint."""
        self.close()
        self._index = (self._index + 1) % len(self._config.endpoints)


class _Connection:
    """One HTTP/2 connection. Raises OSError if it cannot be opened in time."""

    def __init__(self, dialer: Dialer, endpoint: Endpoint, tls: Tls | None, deadline: float) -> None:
        self._authority, self._scheme = endpoint.target, "https" if tls else "http"
        plain = dialer.dial(deadline)
        with contextlib.ExitStack() as undo:
            undo.callback(plain.close)
            plain.settimeout(left(deadline))
            self._socket = plain if tls is None else _encrypted(plain, tls, endpoint.host)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
            self._h2.initiate_connection()
            self._send(deadline)
            undo.pop_all()

    def exchange(self, path: str, body: bytes, token: str, deadline: float) -> tuple[errors.CallFailure | None, bytes]:
        """Make one call; returns how it failed, if it did, and the answer. Raises OSError, H2Error and _Broken."""
        stream = self._h2.get_next_available_stream_id()
        self._h2.send_headers(stream, self._headers(path, token))
        self._send_message(stream, _PREFIX.pack(False, len(body)) + body, deadline)
        found: dict[str, str] = {}
        answer = bytearray()
        while True:
            for event in self._received(deadline):
                if isinstance(event, ConnectionTerminated):
                    raise _Broken(f"the server ended the connection ({event.error_code})")
                if getattr(event, "stream_id", None) != stream:
                    continue
                if isinstance(event, StreamReset):
                    raise _Broken(f"the server ended the call ({_name_of(event.error_code)})")
                if isinstance(event, (ResponseReceived, TrailersReceived)):
                    found.update((str(name), str(value)) for name, value in event.headers)
                elif isinstance(event, DataReceived):
                    answer += event.data
                    self._h2.acknowledge_received_data(event.flow_controlled_length, stream)
                elif isinstance(event, StreamEnded):
                    return _failure(found), bytes(answer[_PREFIX.size :])
            self._send(deadline)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()

    def _send_message(self, stream: int, message: bytes, deadline: float) -> None:
        """Send a message in frames of the size that the server takes. Raises _Broken for more than it takes unread:
        etcd takes 64 KiB."""
        if len(message) > self._h2.local_flow_control_window(stream):
            raise _Broken(f"a message of {len(message)} bytes is too large for this client")
        size = self._h2.max_outbound_frame_size
        for at in range(0, len(message), size):
            self._h2.send_data(stream, message[at : at + size], end_stream=at + size >= len(message))
        self._send(deadline)

    def _headers(self, path: str, token: str) -> list[tuple[str, str]]:
        headers = [
            (":method", "POST"),
            (":scheme", self._scheme),
            (":path", path),
            (":authority", self._authority),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("hasleader", "true"),
        ]
        return [*headers, ("token", token)] if token else headers

    def _send(self, deadline: float) -> None:
        if data := self._h2.data_to_send():
            self._socket.settimeout(left(deadline))
            self._socket.sendall(data)

    def _received(self, deadline: float) -> Sequence[Event]:
        self._socket.settimeout(left(deadline))
        data = self._socket.recv(_RECEIVED_AT_ONCE)
        if not data:
            raise _Broken("the server closed the connection")
        events: Sequence[Event] = self._h2.receive_data(data)
        return events


def tls_context(tls: Tls) -> ssl.SSLContext:
    """A context that checks a server's certificate as gRPC does. Raises OSError for a file that cannot be read.

    Python alone is stricter with authorities from 3.13 on: a certificate from a plain `openssl req -x509` does not say
    what its key is for.
    """
    import ssl  # takes 5 MB, and few need it

    context = ssl.create_default_context(cafile=tls.ca)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if tls.cert:
        context.load_cert_chain(tls.cert, tls.key)
    return context


def _encrypted(plain: socket.socket, tls: Tls, host: str) -> socket.socket:
    context = tls_context(tls)
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(plain, server_hostname=tls.server_name or host)


def _name_of(code: int) -> str:
    """HTTP/2's name of a reason to end a call; its number if HTTP/2 has no name for it."""
    try:
        return ErrorCodes(code).name
    except ValueError:
        return f"error {code}"


def _failure(headers: dict[str, str]) -> errors.CallFailure | None:
    """The failure in the headers and trailers of an answer; None for success."""
    status = headers.get("grpc-status", "")
    if not status.isdigit():
        return errors.CallFailure("UNKNOWN", f"no gRPC server answered (HTTP status {headers.get(':status', 'none')})")
    number = int(status)
    if number == 0:
        return None
    code = _STATUS[number] if number < len(_STATUS) else "UNKNOWN"
    return errors.CallFailure(code, unquote(headers.get("grpc-message", "")))
