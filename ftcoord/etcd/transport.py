"""gRPC channels to the members of one etcd cluster: which member to ask, TLS, login, retries of what is safe."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import tenacity

from ftcoord.config import EtcdConfig, Tls
from ftcoord.errors import ConfigError, EtcdError, EtcdUnavailable, ForkedProcessError
from ftcoord.etcd import wire

# gRPC writes its own log lines to the user's terminal unless told not to, and reads this when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc

from ftcoord.etcd import faults

log = logging.getLogger(__name__)

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.enable_retries", 0),  # only we know which calls may be repeated
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),  # this one is the time a connection attempt may take
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),  # etcd tolerates pings 5 s apart and rarer
    ("grpc.keepalive_timeout_ms", 5_000),
)


class Member:
    """One endpoint: its channel, and when it last gave a sign of life (monotonic seconds)."""

    def __init__(self, config: EtcdConfig, index: int) -> None:
        self.name = str(config.endpoints[index])
        self.alive_at = time.monotonic()
        target = config.endpoints[index].target
        options: tuple[tuple[str, Any], ...] = _OPTIONS
        if config.tls is None:
            self.channel = grpc.insecure_channel(target, options)
            return
        if config.tls.server_name:
            options += (("grpc.ssl_target_name_override", config.tls.server_name),)
        self.channel = grpc.secure_channel(target, _credentials(config.tls), options)

    def seen(self) -> None:
        self.alive_at = time.monotonic()


class Transport:
    """Calls methods on whichever member works. Thread-safe; not usable in a forked child."""

    def __init__(self, config: EtcdConfig) -> None:
        self.config = config
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._members: dict[int, Member] = {}
        self._index = 0
        self._token: str | None = None
        self._token_lock = threading.Lock()
        self.closed = threading.Event()

    def member(self) -> Member:
        """The member in use."""
        self.check_process()
        with self._lock:
            if self.closed.is_set():
                raise EtcdUnavailable("this etcd client was closed; make a new one")
            if self._index not in self._members:
                self._members[self._index] = Member(self.config, self._index)
            return self._members[self._index]

    def check_process(self) -> None:
        """Raises ForkedProcessError in a child that was forked after this was made."""
        if os.getpid() != self._pid:
            raise ForkedProcessError(
                "this etcd client belongs to the parent process; gRPC does not survive fork(): make a new client in the"
                " child, or start the child with the 'spawn' method"
            )

    def blame(self, member: Member) -> None:
        """Go on with the next endpoint, unless somebody else already did."""
        with self._lock:
            if self._members.get(self._index) is member and len(self.config.endpoints) > 1:
                self._index = (self._index + 1) % len(self.config.endpoints)
                log.debug("etcd member %s failed, trying %s", member.name, self.config.endpoints[self._index])

    def call(self, method: wire.Method, request: Any, *, timeout: float | None = None, write: bool = False) -> Any:
        """One unary call, answered or failed within `timeout` seconds (default: the configured one)."""
        return self._retry(lambda deadline: self._unary(method, request, deadline, write), timeout)

    def exchange(self, method: wire.Method, request: Any, *, timeout: float | None = None) -> Any:
        """One request and one response over a streaming method; repeated like a read."""
        return self._retry(lambda deadline: self._one_response(method, request, deadline), timeout)

    def stream(self, method: wire.Method, requests: Iterator[Any], member: Member) -> Any:
        """Open a stream on `member`; errors come raw, as grpc.RpcError, for the caller to judge."""
        open_stream = member.channel.stream_stream(method.path, method.serialize, method.parse)
        return open_stream(requests, metadata=self.metadata())

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries: fail fast on a member without leader, and the login token if there is one."""
        leader = (("hasleader", "true"),)
        if self.config.credentials is None:
            return leader
        with self._token_lock:
            if self._token is None:
                self._token = self._log_in()
            return (*leader, ("token", self._token)) if self._token else leader

    def forget_token(self) -> None:
        """Log in anew before the next call."""
        with self._token_lock:
            self._token = None

    def close(self) -> None:
        """Close every channel; calls under way fail. Idempotent; nothing happens in a forked child."""
        self.closed.set()
        if os.getpid() != self._pid:
            return
        with self._lock:
            members, self._members = list(self._members.values()), {}
        for member in members:
            member.channel.close()

    def _retry(self, attempt: Any, timeout: float | None) -> Any:
        limit = self.config.request_timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(EtcdUnavailable),
            stop=tenacity.stop_after_delay(limit) | tenacity.stop_when_event_set(self.closed),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=1.0),
            sleep=tenacity.sleep_using_event(self.closed),
            reraise=True,
        )
        return retrying(attempt, deadline)

    def _unary(self, method: wire.Method, request: Any, deadline: float, write: bool) -> Any:
        member = self.member()
        invoke = member.channel.unary_unary(method.path, method.serialize, method.parse)
        try:
            response = invoke(request, timeout=self._patience(deadline, write), metadata=self.metadata())
        except grpc.RpcError as error:
            raise self._judge(error, member, write) from error
        member.seen()
        return response

    def _one_response(self, method: wire.Method, request: Any, deadline: float) -> Any:
        member = self.member()
        exchange = member.channel.stream_stream(method.path, method.serialize, method.parse)
        try:
            call = exchange(iter([request]), timeout=self._patience(deadline, False), metadata=self.metadata())
            response = next(call, None)
        except grpc.RpcError as error:
            raise self._judge(error, member, False) from error
        if response is None:
            raise EtcdUnavailable(f"etcd at {member.name} ended the stream without an answer")
        call.cancel()
        member.seen()
        return response

    def _patience(self, deadline: float, write: bool) -> float:
        """Seconds for one attempt: a read leaves time to ask another member, a write is only sent once."""
        left = max(deadline - time.monotonic(), 0.05)
        return left if write or len(self.config.endpoints) == 1 else max(left / 2, 0.05)

    def _judge(self, error: grpc.RpcError, member: Member, write: bool) -> EtcdError:
        if faults.blames_member(error):
            self.blame(member)
        if self.config.credentials and faults.is_stale_token(error.details() or ""):
            self.forget_token()
            return EtcdUnavailable(f"etcd at {member.name}: the login ran out: {error.details()}")
        return faults.translate(error, write=write, where=member.name)

    def _log_in(self) -> str:
        """A token, or '' where etcd has no authentication switched on."""
        credentials = self.config.credentials
        assert credentials is not None
        member = self.member()
        method = wire.AUTHENTICATE
        request = wire.message("AuthenticateRequest")(name=credentials.user, password=credentials.password)
        try:
            invoke = member.channel.unary_unary(method.path, method.serialize, method.parse)
            return str(invoke(request, timeout=self.config.request_timeout / 2).token)
        except grpc.RpcError as error:
            if "authentication is not enabled" in (error.details() or ""):
                return ""
            raise self._judge(error, member, False) from error


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(_read("ca_cert", tls.ca), _read("key", tls.key), _read("cert", tls.cert))


def _read(name: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(name, path, f"a readable PEM file ({error.strerror})") from error
