"""A lighthouse for unmodified torchft: its wire protocol on one side, the quorums in etcd on the other.

torchft's own ManagerServer needs only `TORCHFT_LIGHTHOUSE=http://host:port`. Any number of gateways may serve a job at
once, and each may be killed at any time: decisions and members are in etcd.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, TypeVar, cast

from google.protobuf.message import DecodeError

from ftcoord import concurrency
from ftcoord.closing import Closing
from ftcoord.config import listen_address
from ftcoord.coordination.address import Job, parse_address
from ftcoord.coordination.checks import TRANSPORT_ERROR
from ftcoord.coordination.connection import REQUEST_TIMEOUT
from ftcoord.coordination.gateway_sessions import (
    CALL_THREADS,
    MOST_RPCS,
    GatewaySessions,
    PendingCall,
    WaitingCalls,
    address_of,
    ended_peers,
    most_connections,
)
from ftcoord.coordination.kills import watch_kills
from ftcoord.coordination.manager_client import place_of
from ftcoord.coordination.native import NativeManager, answering, serve, time_left
from ftcoord.coordination.ranks import KillOrder
from ftcoord.coordination.types import timestamp
from ftcoord.core.layout import member_of
from ftcoord.core.manager_address import parted
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest, data_problem
from ftcoord.errors import ServerError, ThreadNotStarted
from ftcoord.escaping import neutral
from ftcoord.etcd.api import Etcd, KeyValue
from ftcoord.etcd.client import EtcdClient
from ftcoord.etcd.messages import declare
from ftcoord.etcd.quiet_grpc import grpc, quiet_grpc
from ftcoord.pool import DaemonPool
from ftcoord.primitives.mirror import Informer

# -- the messages; field numbers are those of torchft 0.2.0 and its nightly builds (9, the handles) --------------------


SERVICE: Final = "torchft.LighthouseService"

_MESSAGES: Final = declare(
    "ftcoord.torchft",
    {
        "QuorumMember": "replica_id 1 string, address 2 string, store_address 3 string, step 4 int64,"
        " world_size 5 uint64, shrink_only 6 bool, data 7 string, commit_failures 8 int64, handles 9 string*",
        "Timestamp": "seconds 1 int64, nanos 2 int32",
        "Quorum": "quorum_id 1 int64, participants 2 QuorumMember*, created 3 Timestamp",
        "LighthouseQuorumRequest": "requester 1 QuorumMember",
        "LighthouseQuorumResponse": "quorum 1 Quorum",
        "LighthouseHeartbeatRequest": "replica_id 1 string",
        "LighthouseHeartbeatResponse": "",
    },
)
HEARTBEAT_RESPONSE: Final[bytes] = _MESSAGES["LighthouseHeartbeatResponse"]().SerializeToString()


def read_quorum_request(message: bytes) -> QuorumRequest:
    """A replica's request. Raises ValueError for a message, or for `data` in it, that other replicas could not read."""
    asked = _read("LighthouseQuorumRequest", message)
    if not asked.HasField("requester"):
        raise ValueError("the request names no requester")
    member = asked.requester
    if problem := data_problem(member.data):
        raise ValueError(f"the data of the request is no JSON object: {problem}")
    return QuorumRequest(
        replica_id=member.replica_id,
        address=member.address,
        store_address=member.store_address,
        step=member.step,
        world_size=member.world_size,
        shrink_only=member.shrink_only,
        data=member.data,
        commit_failures=member.commit_failures,
        handles=tuple(member.handles),
    )


def read_heartbeat(message: bytes) -> str:
    """The replica id of a heartbeat. Raises ValueError."""
    return str(_read("LighthouseHeartbeatRequest", message).replica_id)


def quorum_response(quorum: QuorumRecord) -> bytes:
    """The answer to all members of a quorum."""
    at = timestamp(quorum)
    created = _MESSAGES["Timestamp"](seconds=at.seconds, nanos=at.nanos)
    members = [_member(request) for request in quorum.requests]
    message = _MESSAGES["Quorum"](quorum_id=quorum.id, participants=members, created=created)
    return bytes(_MESSAGES["LighthouseQuorumResponse"](quorum=message).SerializeToString())


def _member(request: QuorumRequest) -> Any:
    return _MESSAGES["QuorumMember"](
        replica_id=request.replica_id,
        address=parted(request.address)[0],  # who calls a gateway has shown no right to a token
        store_address=request.store_address,
        step=request.step,
        world_size=request.world_size,
        shrink_only=request.shrink_only,
        data=request.data,
        commit_failures=request.commit_failures,
        handles=request.handles,
    )


def _read(kind: str, message: bytes) -> Any:
    try:
        return _MESSAGES[kind].FromString(message)
    except DecodeError as error:
        raise ValueError(f"this is not a {kind}: {error}") from error


# -- the server --------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

IDLE_TIMEOUT: Final = 60.0
"""Seconds after which a connection without calls is ended, but at least twice the heartbeat timeout."""
HANDSHAKE_TIMEOUT: Final = 10.0
"""Seconds that a new connection has until it must use gRPC's protocol."""
KILL_TIMEOUT: Final = 5.0
"""Seconds that a manager may take to exit after its order was read, including the time in the queue."""
KILL_THREADS: Final = 16
"""The most managers that are called at a time."""

_Self = TypeVar("_Self", bound="Gateway")


class Gateway:
    """Serves torchft's lighthouse protocol, in threads of this process, until `shutdown()`.

    It serves at once, even if etcd is unreachable: calls then wait for etcd until their timeout.

    Args:
        address: the job's address, `etcd://h1:2379,h2:2379/job?min_replicas=2&join_timeout_ms=60000`.
        listen: `host:port`; port 0 takes a free one. The protocol is plain text without a login: use an address that
            only the job can reach.

    Raises ConfigError for bad arguments, and ServerError when it cannot listen there.

    A replica is alive while it beats, and during a quorum call while its connection is open. If its connection has
    ended, it counts as dead when it misses its next beats.

    If a thread of the gateway fails with an unexpected error, the error is logged and all calls are refused: see
    `has_failed`. A gateway that nobody refers to is shut down.
    """

    def __init__(self, address: str, listen: str = "127.0.0.1:0") -> None:
        job = parse_address(address)
        host, port = listen_address("listen", listen)
        with contextlib.ExitStack() as undo:
            pool = DaemonPool(CALL_THREADS, "ftcoord-gateway")
            undo.callback(pool.close)
            self._etcd = EtcdClient(replace(job.config(), request_timeout=REQUEST_TIMEOUT))
            undo.callback(self._etcd.close)
            server, port = _bind(host, port, job, pool)
            self._service = _Service(self._etcd, job, port)
            undo.callback(self._service.close)
            self._service.serve(server)
            server.start()
            undo.pop_all()
        self._address = f"http://{_reachable(host)}:{port}"
        self._end = functools.partial(_end, server, pool, self._service, self._etcd)
        self._cancel_finalizer = concurrency.when_forgotten(self, self._end)

    def address(self) -> str:
        """`http://host:port`, for TORCHFT_LIGHTHOUSE; with this host's name if it listens on all addresses."""
        return self._address

    def check(self, timeout: float) -> None:
        """Check that etcd answers. Raises EtcdError when it does not, within `timeout` seconds."""
        self._etcd.status(timeout=timeout)

    @property
    def has_failed(self) -> bool:
        """Whether one of its threads has failed. All calls are then refused: start a new gateway."""
        return self._service.has_failed

    def shutdown(self) -> None:
        """Stop serving, within a few seconds. Idempotent.

        Its replicas count as alive until their heartbeats time out, and may continue through another gateway.
        """
        self._cancel_finalizer()
        self._end()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


class _Service:
    """Answers torchft's calls, on gRPC's threads. They do not refer to the gateway, so it can be garbage-collected."""

    def __init__(self, etcd: EtcdClient, job: Job, port: int) -> None:
        self._beat_timeout = min(job.heartbeat_timeout, REQUEST_TIMEOUT)
        # Any thread replaces it as a whole; two that do so at once only encode the same quorum twice.
        self._last_response: tuple[QuorumRecord, bytes] | None = None
        self._waiting = WaitingCalls()
        self._asks = DaemonPool(CALL_THREADS, "ftcoord-asks")
        self._kills = GatewayKills(etcd, job.prefix, lambda member: self._sessions.manager_of(member))
        self._sessions = GatewaySessions(etcd, job, functools.partial(ended_peers, port))

    @property
    def has_failed(self) -> bool:
        """See `Gateway.has_failed`."""
        return self._sessions.has_failed

    def serve(self, server: grpc.Server) -> None:
        """Register the handlers with a server that was not started yet, and obey orders. Raises ThreadNotStarted."""
        self._kills.begin()
        serve(server, SERVICE, {"Quorum": self._quorum, "Heartbeat": self._heartbeat})

    def close(self) -> None:
        """Release the resources. Call it when no call is in progress."""
        self._kills.close()
        self._asks.close()
        self._sessions.close()

    def _quorum(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        with answering(context):
            request = read_quorum_request(message)
            caller = PendingCall()
            if not context.add_callback(caller.leave):  # gRPC calls it on a thread of its own, when the call ends
                raise TimeoutError("the caller went away")
            deadline, peer = concurrency.now() + time_left(context), context.peer()
            with self._waiting.waiting(request.replica_id, address_of(peer), caller):
                quorum = self._asks.submit(self._sessions.ask, request, peer, deadline, caller)
                return self._response(_in_time(quorum, deadline, caller))

    def _heartbeat(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        with answering(context):
            deadline = concurrency.now() + min(time_left(context), self._beat_timeout)
            self._sessions.beat(read_heartbeat(message), context.peer(), deadline)
        return HEARTBEAT_RESPONSE

    def _response(self, quorum: QuorumRecord) -> bytes:
        """All members of a quorum get the same bytes."""
        last = self._last_response
        if last is None or last[0] is not quorum:
            last = self._last_response = (quorum, quorum_response(quorum))
        return last[1]


class GatewayKills(Closing):
    """Makes managers exit that an order names, from `begin()` to `close()`. What it does, it logs.

    torchft's own managers do not use etcd. So it calls them by torchft's protocol, as torchft's lighthouse does.

    Args:
        etcd: the client; not closed here.
        prefix: the prefix of the job's quorums.
        manager_of: returns the address of a member's manager; None for a member of another gateway, or one that has
            asked for no quorum yet.

    If the watch fails, the error is logged and the replicas keep training, but nobody can kill them through etcd until
    the gateway is restarted.
    """

    def __init__(self, etcd: Etcd, prefix: str, manager_of: Callable[[str], str | None]) -> None:
        self._etcd, self._prefix, self._manager_of = etcd, prefix, manager_of  # never change
        self._informer: Informer | None = None
        # Key and lease of each order that was obeyed; only the watch's thread. A manager that was restarted since,
        # under the same name and lease, must not get the order for its predecessor.
        self._seen: set[tuple[str, int]] = set()
        self._pool = DaemonPool(KILL_THREADS, "ftcoord-killing")

    def begin(self) -> None:
        """Start to watch the orders. Call it once. Raises ThreadNotStarted."""
        self._informer = watch_kills(self._etcd, self._prefix, self._obey, _note_failure)

    def close(self) -> None:
        """Stop. Waits a few seconds at most for managers that are being called. Idempotent."""
        if self._informer is not None:
            self._informer.close()
        self._pool.close()

    def _obey(self, order: KeyValue) -> None:
        """On the watch's thread, which does not wait for managers."""
        address = self._manager_of(member_of(order.key))
        if address is None or (order.key, order.lease) in self._seen:
            return
        self._seen.add((order.key, order.lease))
        try:
            self._pool.submit(_kill, address, order.value.decode(errors="replace"), concurrency.now() + KILL_TIMEOUT)
        except ThreadNotStarted as error:
            log.warning("the manager at %s is not ended, as ordered: %s", neutral(address), error)


def _kill(address: str, message: str, deadline: float) -> None:
    """Make a manager exit before the monotonic `deadline`."""
    try:
        with contextlib.closing(NativeManager(*place_of(address), deadline)) as manager:
            answer = manager.call(KillOrder(message), deadline)
    except (ValueError, OSError) as error:  # no address; nobody there; TimeoutError
        problem = str(error)
    else:  # it looks like an error of the transport when the process has ended before it answered
        problem = "" if isinstance(answer, bytes) or answer == TRANSPORT_ERROR else answer.message
    if problem:
        log.warning("the manager at %s does not end, as ordered (%s): %s", neutral(address), neutral(message), problem)
    else:
        log.info("the manager at %s was ended: %s", neutral(address), neutral(message))


def _note_failure(error: BaseException) -> None:
    log.error("orders to kill replicas are not obeyed any longer: %s; start the gateway again", error)


def _bind(host: str, port: int, job: Job, pool: DaemonPool) -> tuple[grpc.Server, int]:
    """Make a server that listens; returns it and its port. Raises ServerError."""
    with quiet_grpc():
        executor = cast(ThreadPoolExecutor, pool)  # gRPC only submits calls to it
        server = grpc.server(executor, options=_options(job), maximum_concurrent_rpcs=MOST_RPCS)
        try:
            return server, server.add_insecure_port(f"{host}:{port}")
        except RuntimeError:
            why = "it is in use, or no address of this host"
            raise ServerError(f"cannot listen on {host}:{port}: {why}") from None


def _end(server: grpc.Server, pool: DaemonPool, service: _Service, etcd: EtcdClient) -> None:
    """In this order: cancel the calls in progress, withdraw their requests, stop asking."""
    server.stop(None)
    pool.close()
    service.close()
    etcd.close()


def _in_time(quorum: Future[QuorumRecord], deadline: float, caller: PendingCall) -> QuorumRecord:
    """Wait for a quorum. Raises TimeoutError after the monotonic `deadline`, and has the request withdrawn."""
    left = deadline - concurrency.now()
    if not wait((quorum,), None if math.isinf(left) else max(left, 0)).done:
        caller.leave()
        raise TimeoutError("no quorum in time")
    return quorum.result()


def _options(job: Job) -> list[tuple[str, int]]:
    half = int(max(job.heartbeat_timeout * 1000 / 2, 1000))
    return [
        ("grpc.so_reuseport", 0),  # a port that is taken is an error
        ("grpc.keepalive_time_ms", half),  # the host of a caller that waits may have lost its power
        ("grpc.keepalive_timeout_ms", half),
        ("grpc.http2.ping_timeout_ms", half),  # newer releases wait a minute, whatever the line above says
        ("grpc.http2.max_pings_without_data", 0),
        # Newcomers are refused before no descriptor is left for etcd's connection. Who says nothing makes room.
        ("grpc.max_allowed_incoming_connections", most_connections()),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_TIMEOUT * 1000)),
        ("grpc.max_connection_idle_ms", int(max(2 * job.heartbeat_timeout, IDLE_TIMEOUT) * 1000)),
    ]


def _reachable(host: str) -> str:
    return socket.gethostname() if host in ("0.0.0.0", "[::]") else host
