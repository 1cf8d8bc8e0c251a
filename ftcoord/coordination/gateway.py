"""A lighthouse for torchft as it is: its wire protocol on one side, the quorums in etcd on the other.

torchft's own ManagerServer needs nothing but `TORCHFT_LIGHTHOUSE=http://host:port`. Any number of gateways serve a job
at once, and each may be killed at any time: what was decided, and who lives, is in etcd.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from types import TracebackType
from typing import Final, TypeVar

from ftcoord import concurrency
from ftcoord.coordination.address import Job, parse_address
from ftcoord.coordination.connection import ATTEMPT
from ftcoord.coordination.gateway_sessions import GatewaySessions, PendingCall
from ftcoord.coordination.lighthouse_wire import (
    HEARD,
    SERVICE,
    quorum_response,
    read_heartbeat,
    read_quorum_request,
)
from ftcoord.core.quorum_records import QuorumRecord
from ftcoord.errors import ConfigError, EtcdError, ServerError, StateError
from ftcoord.etcd.client import EtcdClient
from ftcoord.etcd.rpc.quiet_grpc import grpc, quiet_grpc

log = logging.getLogger(__name__)

THREADS: Final = 1024
"""Every quorum call that waits holds a thread, and so does a beat while etcd is away; else beats take no time. They are
made as they are needed, so this is no cost but a limit: some 500 replicas at once, whose calls must not wait in line
behind each other, since none is answered before all have asked. As many again speak with etcd for the quorum calls,
which are answered in time also while etcd does not answer."""
EARLY: Final = 0.1
"""Seconds before the end of a call's time to say that it is over. At the end gRPC itself does, in other words."""
FOREVER: Final = 10.0 * 365 * 24 * 3600
"""Seconds; gRPC gives a time like this to a call without a time-out."""

_Self = TypeVar("_Self", bound="Gateway")


class Gateway:
    """Serves torchft's lighthouse protocol, in threads of this process, until `shutdown()`.

    It serves at once, also while etcd cannot be reached: calls then wait for etcd until their time is over.

    Args:
        address: the job's, `etcd://h1:2379,h2:2379/job?min_replicas=2&join_timeout_ms=60000`.
        listen: `host:port`; port 0 takes a free one. It is plain text, and has no login: keep to addresses that only
            the job can reach.

    Raises ConfigError, and ServerError when it cannot listen there.

    A quorum call keeps its replica alive for as long as its connection lives; otherwise a replica lives while it beats.
    """

    def __init__(self, address: str, listen: str = "127.0.0.1:0") -> None:
        job = parse_address(address)
        host, port = _parse_listen(listen)
        self._patience = min(job.heartbeat_timeout, ATTEMPT)
        self._told: tuple[QuorumRecord, bytes] | None = None
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="ftcoord-gateway")
        self._asks = ThreadPoolExecutor(THREADS, thread_name_prefix="ftcoord-asks")
        self._etcd = EtcdClient(replace(job.config(), request_timeout=ATTEMPT))
        try:
            self._server, port = self._bind(host, port, job)
        except ServerError:
            self._etcd.close()
            raise
        self._sessions = GatewaySessions(self._etcd, job)
        self._address = f"http://{_reachable(host)}:{port}"
        self._server.start()

    def address(self) -> str:
        """`http://host:port`, for TORCHFT_LIGHTHOUSE; the name of this host if it listens on all addresses."""
        return self._address

    def check(self, timeout: float) -> None:
        """Ask etcd whether it is there. Raises EtcdError when it does not answer in `timeout` seconds."""
        self._etcd.status(timeout=timeout)

    def shutdown(self) -> None:
        """Serve no more, within some seconds. Idempotent. Replicas count as alive for a heartbeat time-out more."""
        self._server.stop(None)
        self._pool.shutdown()  # calls under way are cancelled,
        self._asks.shutdown()  # and taken back
        self._sessions.close()
        self._etcd.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _bind(self, host: str, port: int, job: Job) -> tuple[grpc.Server, int]:
        methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Quorum": grpc.unary_unary_rpc_method_handler(self._quorum),
            "Heartbeat": grpc.unary_unary_rpc_method_handler(self._heartbeat),
        }
        with quiet_grpc():
            server = grpc.server(self._pool, options=_options(job))
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
            try:
                return server, server.add_insecure_port(f"{host}:{port}")
            except RuntimeError:
                why = "it is in use, or no address of this host"
                raise ServerError(f"cannot listen on {host}:{port}: {why}") from None

    # -- torchft's calls ----------------------------------------------------------------------------------------

    def _quorum(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        with _answering(context):
            request = read_quorum_request(message)
            caller = PendingCall()
            if not context.add_callback(caller.leave):
                raise TimeoutError("the caller went away")
            deadline = _deadline(context)
            quorum = self._asks.submit(self._sessions.ask, request, deadline, caller)
            return self._response(_in_time(quorum, deadline, caller))

    def _heartbeat(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        with _answering(context):
            deadline = min(_deadline(context), concurrency.now() + self._patience)
            self._sessions.beat(read_heartbeat(message), deadline)
        return HEARD

    def _response(self, quorum: QuorumRecord) -> bytes:
        """All that are in a quorum get the same bytes."""
        told = self._told
        if told is None or told[0] is not quorum:
            told = self._told = (quorum, quorum_response(quorum))
        return told[1]


@contextlib.contextmanager
def _answering(context: grpc.ServicerContext) -> Iterator[None]:
    """Ends a call that fails with the status that torchft's lighthouse would give it."""
    try:
        yield
    except TimeoutError as error:
        log.debug("a call ended: %s", error)
        context.abort(grpc.StatusCode.CANCELLED, "Timeout expired")  # TimeoutError for torchft's users
    except ValueError as error:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except StateError as error:
        context.abort(grpc.StatusCode.INTERNAL, str(error))
    except EtcdError as error:
        context.abort(grpc.StatusCode.UNAVAILABLE, str(error))


def _in_time(quorum: Future[QuorumRecord], deadline: float, caller: PendingCall) -> QuorumRecord:
    """Raises TimeoutError after the monotonic `deadline`, and has the request taken back meanwhile."""
    left = deadline - concurrency.now()
    if not wait((quorum,), None if math.isinf(left) else max(left, 0)).done:
        caller.leave()
        raise TimeoutError("no quorum in time")
    return quorum.result()


def _deadline(context: grpc.ServicerContext) -> float:
    """When to answer, on the monotonic clock; infinite for a call without a time-out."""
    left = context.time_remaining()
    if left is None or left > FOREVER:
        return math.inf
    return concurrency.now() + left - min(left / 10, EARLY)


def _options(job: Job) -> list[tuple[str, int]]:
    half = int(max(job.heartbeat_timeout * 1000 / 2, 1000))
    return [
        ("grpc.so_reuseport", 0),  # a port that is taken is an error
        ("grpc.keepalive_time_ms", half),  # the host of a caller that waits may have lost its power
        ("grpc.keepalive_timeout_ms", half),
        ("grpc.http2.ping_timeout_ms", half),  # newer releases wait a minute, whatever the line above says
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _parse_listen(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError("listen", listen, "write it as 127.0.0.1:29510 or [::]:29510")
    return host, int(port)


def _reachable(host: str) -> str:
    return socket.gethostname() if host in ("0.0.0.0", "[::]") else host
