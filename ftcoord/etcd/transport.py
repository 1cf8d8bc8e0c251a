"""gRPC channels to the members of one etcd cluster: which member to ask, TLS, login, and safe retries."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ftcoord import concurrency, files
from ftcoord.config import EtcdConfig, Tls
from ftcoord.errors import (
    MORE_THREADS,
    ClientClosed,
    ConfigError,
    EtcdAuthError,
    EtcdError,
    EtcdUnavailable,
    OutcomeUnknown,
)
from ftcoord.etcd import messages
from ftcoord.etcd.addresses import Address, Addresses
from ftcoord.etcd.quiet_grpc import GrpcThreads, grpc, quiet_grpc
from ftcoord.etcd.retry import retry
from ftcoord.fork import OwnerProcess
from ftcoord.metrics import process as metrics

log = logging.getLogger(__name__)

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.enable_retries", 0),  # only we know which calls may be repeated
    ("grpc.enable_http_proxy", 0),  # http_proxy is for the web: a proxy would get the login and all keys
    ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),  # this one is the time a connection attempt may take
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 6_000),  # etcd tolerates pings 5 s apart and rarer
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.ping_timeout_ms", 4_000),  # what newer grpcio goes by instead
    ("grpc.http2.max_pings_without_data", 0),  # a stream of watches sends nothing, and must notice a member that hangs
)

_NEEDS_LEADER = (("hasleader", "true"),)
CLIENT_CLOSED = "this etcd client was closed; make a new one"
SHORTEST_CALL = 0.05
"""The fewest seconds for a call, even if less is left: with none, it could not be answered at all."""
SILENT_AFTER = 1.0
"""Seconds without any answer after which a call that times out has its member connected to anew."""
LOGIN_PAUSE = 10.0
"""The most seconds until a refused login is tried again, at least half of it: all clients of a job are refused at the
same time, they retry within a second, and each login costs etcd a bcrypt."""


class Member:
    """One address of etcd: its channel, and when it last answered (monotonic seconds). Thread-safe."""

    def __init__(
        self, address: Address, tls: Tls | None, credentials: grpc.ChannelCredentials | None, threads: GrpcThreads
    ) -> None:
        self.name = str(address)
        self._threads = threads
        self._cancels_renewals = False  # any thread; becomes True once
        self.has_answered = False  # on this channel; any thread, becomes True once
        self.alive_at = concurrency.now()  # any thread, as a whole: of two moments either one will do
        # Any thread, one step of a dict at a time; if two make the same callable, the last one stays.
        self._unary: dict[messages.Method, grpc.UnaryUnaryMultiCallable[Any, Any]] = {}
        options: tuple[tuple[str, Any], ...] = _OPTIONS
        if address.is_looked_up:  # a proxy in front of etcd goes by the name
            options += (("grpc.default_authority", address.endpoint.target),)
        if tls is None or credentials is None:
            self.channel = grpc.insecure_channel(address.target, options)
            return
        if tls.server_name or address.is_looked_up:
            options += (("grpc.ssl_target_name_override", tls.name_at(address.endpoint.host)),)
        self.channel = grpc.secure_channel(address.target, credentials, options)

    def unary(self, method: messages.Method) -> Callable[..., Any]:
        """How to call `method` on this member. Kept, because making it takes as long as the rest of a call's
        preparation."""
        return self._renew if method is messages.KEEP_ALIVE else self._kept(method)

    def _renew(self, request: Any, timeout: float, metadata: Any) -> Any:
        """Renew a lease, which is a stream for etcd. One request and one answer look the same on it as a unary call,
        which costs a sixth. But that half-closes the stream at once, and etcd's grpc-proxy then cancels it."""
        if not self._cancels_renewals:
            try:
                return self._kept(messages.KEEP_ALIVE)(request, timeout=timeout, metadata=metadata)
            except grpc.RpcError as error:
                if "context canceled" not in (error.details() or ""):
                    raise
                self._cancels_renewals = True
        return self._renew_on_stream(request, timeout, metadata)

    def _renew_on_stream(self, request: Any, timeout: float, metadata: Any) -> Any:
        """On a stream of its own. One for all renewals would have the proxy renew by itself, each third of the TTL:
        it would answer only then, and keep the lease when the client is gone."""
        method, answered = messages.KEEP_ALIVE, concurrency.event()

        def requests() -> Iterator[Any]:
            yield request
            answered.wait()

        invoke = self.channel.stream_stream(method.path, method.serialize, method.parse)
        try:
            call = invoke(self._threads.noted(requests()), timeout=timeout, metadata=metadata)
            self._threads.expect(call)
            return next(call)
        finally:
            answered.set()

    def _kept(self, method: messages.Method) -> grpc.UnaryUnaryMultiCallable[Any, Any]:
        if (invoke := self._unary.get(method)) is None:
            invoke = self.channel.unary_unary(method.path, method.serialize, method.parse)
            self._unary[method] = invoke
        return invoke

    def seen(self) -> None:
        self.alive_at = concurrency.now()
        self.has_answered = True


class Transport:
    """Calls methods on whichever member works. Thread-safe; not usable in a forked child.

    Raises ConfigError when a TLS file cannot be read, and ForkedProcessError in a forked child of a process that ever
    had one.
    """

    def __init__(self, config: EtcdConfig) -> None:
        self.config = config  # never changes
        self.owner = OwnerProcess("this etcd client belongs to the parent process")
        self._addresses = Addresses(config.endpoints, config.tls is not None)
        # Guards the next six, and is never held during a call or a look-up.
        self._lock = concurrency.lock("Transport._lock")
        self._pem = _pem(config.tls) if config.tls else None  # now: a failover must not need the files
        self._index = 0  # of the address in use, among those that were found last
        self._members: dict[Address, Member] = {}
        self._has_others = len(config.endpoints) > 1  # whether another address may answer in place of this one
        self._current: Member | None = None  # the member in use; None until the next call chooses it
        self._stream: Any = None  # the last one that was opened, of the current member or an earlier one
        with quiet_grpc():  # checks the process, and has gRPC read its settings with the first channel
            grpc.insecure_channel("127.0.0.1:1", _OPTIONS).close()
        # Held during a login, so that a thousand waiting calls log in once. Written with the lock held, but for
        # `forget_token`, which may only make one login too many; read without it.
        self._token_lock = concurrency.lock("Transport._token_lock")
        self._token: str | None = None
        self._refusal, self._refused_until = "", 0.0  # guarded by _token_lock
        self.threads = GrpcThreads()
        self.closed = concurrency.event()  # set with `_lock` not held: `member()` looks at it with the lock held

    def member(self, deadline: float | None = None) -> Member:
        """The member in use. Its name is looked up until `deadline`; None gives it the configured request timeout.

        Raises ClientClosed, and EtcdUnavailable if no name of etcd is known by then.
        """
        if (member := self.current()) is not None:
            return member
        found = self._addresses.find(concurrency.now() + self.config.request_timeout if deadline is None else deadline)
        with self._lock:
            self._check_open()
            if self._current is None:
                self._members = {address: one for address, one in self._members.items() if address in found}
                self._index %= len(found)
                address = found[self._index]
                if address not in self._members:
                    credentials = grpc.ssl_channel_credentials(*self._pem) if self._pem else None
                    self._members[address] = Member(address, self.config.tls, credentials, self.threads)
                self._current, self._has_others = self._members[address], len(found) > 1
            return self._current

    def current(self) -> Member | None:
        """The member in use; None if none is known to work. Raises ClientClosed."""
        self.owner.check()
        with self._lock:
            self._check_open()
            return self._current

    def _check_open(self) -> None:
        """With the lock held."""
        if self.closed.is_set():
            raise ClientClosed(CLIENT_CLOSED)

    def blame(self, member: Member, *, silent: bool = False) -> None:
        """Continue with the next address, with names looked up again, and with the certificates on disk now, unless
        another call already did. If the member was `silent` on a connection that worked before, connect to it anew.

        Calls that use the old channels keep them.
        """
        with self._lock:
            if self._current is not member:
                return
            if self._has_new_certificates():
                log.info("the TLS files have changed: connecting to etcd with what they hold now")
                self._members.clear()
            elif silent and member.has_answered:  # half-dead: gRPC would notice after 10 s
                self._members = {address: one for address, one in self._members.items() if one is not member}
            self._current = None
            self._index += 1
            stream = self._stream
        if stream is not None:
            stream.cancel()  # else nobody would notice that the member is gone until a ping is not answered
        log.debug("etcd at %s failed, trying the next address", member.name)
        self._addresses.look_up_again()

    def _has_new_certificates(self) -> bool:
        if self.config.tls is None:
            return False
        try:
            before, self._pem = self._pem, _pem(self.config.tls)
        except ConfigError as error:  # perhaps they are being replaced at this moment
            log.debug("the certificates are still the old ones: %s", error)
            return False
        return self._pem != before

    def call(self, method: messages.Method, request: Any, *, timeout: float | None = None, write: bool = False) -> Any:
        """One unary call, answered or failed within `timeout` seconds (default: the configured one)."""
        deadline = concurrency.now() + (self.config.request_timeout if timeout is None else timeout)
        deadline = min(
            deadline, concurrency.exit_deadline()
        )  # an etcd that is away must not keep a process from ending
        return retry(lambda: self._unary(method, request, deadline, write), (EtcdUnavailable,), deadline, self.closed)

    def stream(self, method: messages.Method, requests: Iterator[Any], member: Member, token: str | None) -> Any:
        """Open the stream of watches on `member`: it ends when another call blames that member. Errors are raised as
        grpc.RpcError, for the caller to judge."""
        with self._judged(member):
            invoke = member.channel.stream_stream(method.path, method.serialize, method.parse)
            call = invoke(self.threads.noted(requests), metadata=_metadata(token))
            self.threads.expect(call)
            with self._lock:
                self._stream, is_blamed = call, self._current is not member
            if is_blamed:
                call.cancel()
            return call

    def token(self, deadline: float | None = None) -> str | None:
        """The login token; None without a user, '' while authentication is off. May log in, until `deadline`.

        Raises EtcdAuthError when a login is refused, and for a while after that without asking etcd again.
        """
        if self.config.credentials is None:
            return None
        if deadline is None:
            deadline = concurrency.now() + self.config.request_timeout
        if (token := self._token) is not None:
            return token
        late = EtcdUnavailable(f"etcd at {self.config.describe()} does not answer the login that is under way")
        with concurrency.held(self._token_lock, deadline, late):
            if (token := self._token) is None:
                token = self._token = self._log_in(deadline)
            return token

    def forget_token(self, stale: str | None) -> None:
        """Log in again before the next call, unless another call has since."""
        if self._token == stale:
            self._token = None

    def close(self) -> None:
        """Close every channel; calls in progress fail. Then call `threads.join()`. Idempotent; does nothing in a forked
        child."""
        if not self.owner.is_current:
            return
        self.closed.set()
        with self._lock:
            members, self._members, self._current = list(self._members.values()), {}, None
        for member in members:
            member.channel.close()

    def _unary(self, method: messages.Method, request: Any, deadline: float, write: bool) -> Any:
        member = self.member(deadline)
        # etcd requires no token for a renewal: a slow or refused login must not cost a lease.
        token = self._token if method is messages.KEEP_ALIVE else self.token(deadline)
        began = concurrency.now()
        try:
            with self._judged(member, write=write, token=token):
                timeout = self._attempt_timeout(deadline, write)
                response = member.unary(method)(request, timeout=timeout, metadata=_metadata(token))
        except EtcdError as error:
            metrics.REQUEST_FAILURES.add(method.name, type(error).__name__)
            raise
        member.seen()
        metrics.REQUEST_SECONDS.observe(member.alive_at - began, method.name)
        return response

    def _attempt_timeout(self, deadline: float, write: bool) -> float:
        """Seconds for one attempt. A read leaves time to ask another member; a write is sent only once."""
        left = deadline - concurrency.now()
        return max(left if write or not self._has_others else left / 2, SHORTEST_CALL)

    @contextmanager
    def _judged(self, member: Member, *, write: bool = False, token: str | None = None) -> Iterator[None]:
        """Raises ftcoord's exceptions instead of gRPC's, whose long tracebacks add nothing."""
        self.threads.enter()
        began = concurrency.now()
        try:
            yield
        except grpc.RpcError as error:
            log.debug("a call of etcd at %s failed: %r", member.name, error)
            code, details = failure_of(error)
            if messages.blames_member(code, details):
                # A short call may just have met a busy etcd.
                waited = code == "DEADLINE_EXCEEDED" and concurrency.now() - began >= SILENT_AFTER
                self.blame(member, silent=waited and member.alive_at <= began)
            if self.config.credentials and messages.is_stale_token(details):
                self.forget_token(token)
                # etcd did nothing: log in again
                raise EtcdUnavailable(f"etcd at {member.name}: the login ran out: {details}") from None
            raise messages.translate(code, details, write=write, where=member.name) from None
        except ValueError:  # gRPC raises it if close() was faster than the call: nothing was sent
            if not self.closed.is_set():
                raise
            raise ClientClosed(CLIENT_CLOSED) from None
        except RuntimeError as error:
            kind = OutcomeUnknown if write else EtcdUnavailable
            raise kind(f"gRPC could not call etcd: {error}; {MORE_THREADS}") from None
        finally:
            self.threads.leave()

    def _log_in(self, deadline: float) -> str:
        """With the token's lock held: a token, or '' if authentication is off.

        After a refusal it raises the same error, in the same words, without asking until the pause is over: loops that
        retry then log it once.
        """
        if concurrency.now() < self._refused_until:
            raise EtcdAuthError(self._refusal)
        credentials = self.config.credentials
        assert credentials is not None
        member = self.member(deadline)
        login = member.unary(messages.AUTHENTICATE)
        request = messages.message("User")(name=credentials.user, password=credentials.password)
        try:
            with self._judged(member):
                return str(login(request, timeout=self._attempt_timeout(deadline, False)).token)
        except EtcdError as error:
            if "authentication is not enabled" in str(error):
                return ""
            if isinstance(error, EtcdAuthError):
                self._refusal = str(error)
                self._refused_until = concurrency.now() + random.uniform(0.5, 1) * LOGIN_PAUSE
            raise


def failure_of(error: grpc.RpcError) -> tuple[str, str]:
    """The code and the text of gRPC's error."""
    return error.code().name, error.details() or ""


def _metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata of every call: fail fast on a member without a leader, and the login token if there is one."""
    return (*_NEEDS_LEADER, ("token", token)) if token else _NEEDS_LEADER


def _pem(tls: Tls) -> tuple[bytes | None, bytes | None, bytes | None]:
    """The authorities, the key and the certificate. Raises ConfigError for a file that cannot be read or is cut off."""
    return (
        files.pem("ca_cert", tls.ca, files.CERTIFICATE) if tls.ca else files.system_authorities(),
        files.pem("key", tls.key, files.PRIVATE_KEY) if tls.key else None,
        files.pem("cert", tls.cert, files.CERTIFICATE) if tls.cert else None,
    )
