"""A lighthouse for unmodified torchft: its wire protocol on one side, the quorums in etcd on the other.

torchft's own ManagerServer needs only `TORCHFT_LIGHTHOUSE=http://host:port`. Any number of gateways may serve a job at
once, and each may be killed at any time: decisions and members are in etcd.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Final
from urllib.parse import unquote

from ftcoord import concurrency
from ftcoord.closing import Closing
from ftcoord.config import listen_address
from ftcoord.coordination import api, native, ranks
from ftcoord.coordination.address import REQUEST_TIMEOUT, Job, parse_address
from ftcoord.coordination.manager_client import place_of
from ftcoord.coordination.replica import Replica, watch_kills
from ftcoord.core.layout import member_of
from ftcoord.core.manager_address import parted
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest
from ftcoord.errors import ServerError
from ftcoord.escaping import neutral
from ftcoord.etcd.api import Etcd, KeyValue
from ftcoord.etcd.client import EtcdClient
from ftcoord.etcd.quiet_grpc import grpc
from ftcoord.metrics import process as metrics

log = logging.getLogger(__name__)

# -- limits: torchft's protocol has no login, so a broken caller must not stop all others ------------------------------

MOST_CALLS: Final = 1024
"""The most calls in progress. Each has a thread, which is made when it is needed."""
MOST_WAITING: Final = MOST_CALLS - 256
"""The most quorum calls: the other threads are for beats, which are never delayed by calls that wait."""
MOST_IDS: Final = 1024
"""The most replicas that a gateway represents: each costs a lease and a member in each decision."""
MOST_CONNECTIONS: Final = 4096
RESERVED_DESCRIPTORS: Final = 128
"""File descriptors that are left for etcd's connection, logs and the page when callers have taken all of theirs."""
IDLE_TIMEOUT: Final = 60.0
"""Seconds after which a connection without calls is ended, but at least twice the heartbeat timeout."""


class _Shares:
    """What callers have taken of a limited thing: one address gets half of it at most. Thread-safe."""

    def __init__(self, what: str, most: int) -> None:
        self._what, self._most = what, most  # never change
        self._lock = concurrency.lock("_Shares._lock")
        self._taken: Counter[str] = Counter()  # guarded by _lock

    def take(self, address: str) -> None:
        """Raises ServerError if nothing is left for this address."""
        with self._lock:
            of_one = self._taken[address] >= self._most // 2
            if of_one or self._taken.total() >= self._most:
                limit = f"{self._most // 2} {self._what} of one address" if of_one else f"{self._most} {self._what}"
                raise ServerError(f"this gateway takes at most {limit}; use another gateway for the others")
            self._taken[address] += 1

    def give_back(self, address: str) -> None:
        with self._lock:
            self._taken -= Counter([address])  # which drops what is 0


def most_connections() -> int:
    """How many callers may be connected at a time: half of the descriptors that this process may open (`ulimit -n`)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limited = (soft - RESERVED_DESCRIPTORS) // 2 if soft != resource.RLIM_INFINITY else MOST_CONNECTIONS
    return min(max(limited, 8), MOST_CONNECTIONS)


# -- replicas ----------------------------------------------------------------------------------------------------------

CUT_OFF: Final = "its connection to the gateway closed and its heartbeats stopped"
SILENT: Final = "its heartbeats to the gateway stopped"
"""Why a replica counts as dead."""
REVOKE_TIMEOUT: Final = 2.0
"""Seconds that etcd may take to revoke the lease of a replica that has gone silent."""
SWEEP_INTERVAL: Final = 0.1
"""Seconds between two checks for silent replicas."""
MISSED: Final = 3
"""The number of beats that a replica must have missed, and"""
QUIET_FOR: Final = 0.3
"""the seconds that it must have been silent, before it counts as dead because its connection has ended. A live replica
reconnects for its next beat."""
KILL_TIMEOUT: Final = 5.0
"""Seconds that a manager may take to exit when an order is carried out."""


def connected_peers() -> frozenset[str] | None:
    """The other ends of this process's connections, as gRPC names them once they are unquoted: `ipv4:10.0.0.1:4711`,
    `ipv6:[::1]:4711`; None where the system does not say, or while no descriptor is free to ask."""
    if socket.getdefaulttimeout() is not None:  # Python would make other libraries' sockets non-blocking
        return None
    try:
        descriptors = os.listdir("/dev/fd")
    except OSError as error:
        log.debug("which connections stand cannot be told for now: %s", error)
        return None
    peers = set[str]()
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # no socket, not connected, or closed by now
            one = socket.socket(fileno=int(descriptor))
            try:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    host, port = one.getpeername()[:2]
                    inner = host.removeprefix("::ffff:")  # as gRPC names an IPv4 caller of an IPv6 listener
                    peers.add(f"ipv6:[{inner}]:{port}" if ":" in inner else f"ipv4:{inner}:{port}")
            finally:
                one.detach()  # it is not ours
    return frozenset(peers)


class _Session:
    """One replica. All but `replica` is guarded by the lock of its GatewaySessions."""

    def __init__(self, replica: Replica, address: str) -> None:
        self.replica, self.address = replica, address
        """The replica, and the address that its share of ids is taken from: of who first sent its id."""
        self.manager = ""
        """The address of its manager, from its last request to this gateway; empty before that."""
        self.sign_at = 0.0
        """When it last beat, or was last answered."""
        self.calls = 0
        """How many of its calls are in progress: each is a sign of life."""
        self.peer = ""
        """The sender of its last beat, as `connected_peers` names it,"""
        self.beat_at = 0.0
        """the time of that beat,"""
        self.beats_every = math.inf
        """and the seconds since the beat before; infinite if that one came by another connection."""

    def note_beat(self, peer: str, now: float) -> None:
        self.beats_every = now - self.beat_at if peer == self.peer else math.inf
        self.peer, self.beat_at = peer, now

    def is_quiet(self, now: float) -> bool:
        """Whether it is dead if its connection has ended: it has beaten through that before, and would have
        reconnected. If the connection stands, its host is lost or it hangs, and the heartbeat timeout applies."""
        return not self.calls and now >= self.sign_at + max(MISSED * self.beats_every, QUIET_FOR)


class GatewaySessions(Closing):
    """Replicas by id, each a member of the job from its first beat or request on; obeys orders to kill. Thread-safe.

    torchft's managers beat ten times a second, but these beats do not reach etcd. Each replica has a lease, which is
    renewed while beats come. It is revoked when no beat came for the heartbeat timeout, or when the beats stop and the
    connection has ended.

    Args:
        etcd: the client; not closed here.
        job: the job and its rules.
        connected: see `connected_peers`.

    If the thread that looks for silent replicas failed, no replica would ever count as dead. So all of their leases are
    then left to expire, and each call raises ServerError. If the watch of orders fails, the error is logged and nobody
    can kill its replicas through etcd until the gateway is restarted.
    """

    def __init__(self, etcd: Etcd, job: Job, connected: Callable[[], Collection[str] | None] = connected_peers) -> None:
        self._etcd, self._job, self._connected = etcd, job, connected  # never change
        self._ids, self._waiting = _Shares("replicas", MOST_IDS), _Shares("quorum calls that wait", MOST_WAITING)
        self._lock = concurrency.lock("GatewaySessions._lock")  # guards the next two
        self._sessions: dict[str, _Session] = {}
        self.has_failed = False
        """Whether the thread that looks for silent replicas has failed."""
        # Key and lease of each order that was obeyed; only the watch's thread. A manager that was restarted since,
        # under the same name and lease, must not get the order for its predecessor.
        self._obeyed: set[tuple[str, int]] = set()
        # Any thread replaces it as a whole; two that do so at once only encode the same quorum twice.
        self._answer: tuple[QuorumRecord, bytes] | None = None
        self._closed = concurrency.event()
        self._sweeper = concurrency.StepThread(
            self._sweep, "ftcoord-sweeper", wake=self._closed.set, end=self._orphan_all, failed=lambda _error: None
        )
        self._orders = watch_kills(etcd, job.prefix, self._obey, _note_no_orders)
        with contextlib.ExitStack() as undo:
            undo.callback(self._orders.close)
            self._sweeper.start()
            undo.pop_all()

    def beat(self, replica_id: str, peer: str, deadline: float) -> None:
        """Note a beat of a replica from `peer`, as gRPC names it. Raises ServerError, and as `Replica.beat`."""
        with self._visit(replica_id, peer) as session:
            with self._lock:
                session.note_beat(unquote(peer), concurrency.now())
            if not session.replica.participant.joined:
                session.replica.beat(deadline)

    def ask(self, request: QuorumRequest, peer: str, deadline: float, on_end: ranks.OnEnd) -> QuorumRecord:
        """The next quorum with this replica in it. Raises what `Replica.ask` raises, and ServerError."""
        gone, address = concurrency.event(), _address_of(peer)
        self._waiting.take(address)
        try:
            with self._visit(request.replica_id, peer) as session:
                with self._lock:
                    session.manager = request.address

                def leave() -> None:
                    gone.set()
                    session.replica.participant.nudge()

                if not on_end(leave):
                    gone.set()
                return session.replica.ask(request, deadline, gone)
        finally:
            self._waiting.give_back(address)

    def answer(self, quorum: QuorumRecord) -> bytes:
        """The answer to a quorum call: all members of a quorum get the same bytes."""
        last = self._answer
        if last is None or last[0] is not quorum:
            last = self._answer = (quorum, native.write_quorum(quorum))
        return last[1]

    def close(self) -> None:
        """Drop all replicas. Idempotent. Call it when no call is in progress.

        Their leases expire. Until then they count as alive, and may continue through another gateway.
        """
        self._orders.close()
        self._sweeper.close()

    @contextlib.contextmanager
    def _visit(self, replica_id: str, peer: str) -> Iterator[_Session]:
        """While this is open, the replica does not count as silent."""
        with self._lock:
            if self.has_failed:
                raise ServerError("this gateway has failed, see its log; restart it")
            session = self._sessions.get(replica_id)
            if session is None:
                address = _address_of(peer)
                self._ids.take(address)
                replica = Replica(  # which lives on when this gateway dies, and asks the next one
                    self._etcd, self._job, replica_id, keeps_lease=True, dies_with_process=False
                )
                session = self._sessions[replica_id] = _Session(replica, address)
                metrics.GATEWAY_REPLICAS.set(len(self._sessions), self._job.name)
            session.calls += 1
            session.sign_at = concurrency.now()
        answered = False
        try:
            yield session
            answered = True
        finally:
            with self._lock:
                session.calls -= 1
                if answered:
                    session.sign_at = concurrency.now()

    # -- who is silent, on the sweeper's thread ------------------------------------------------------------------------

    def _sweep(self) -> None:
        if self._closed.wait(SWEEP_INTERVAL):
            return
        for session, cause in self._take_silent().items():
            log.warning("replica %r counts as dead: %s", session.replica.replica_id, cause)
            # Nobody else ends its lease: it would be renewed forever.
            if self._closed.is_set():
                session.replica.orphan()
            else:
                session.replica.leave(REVOKE_TIMEOUT, cause)

    def _take_silent(self) -> dict[_Session, str]:
        """Drop and return the replicas that have been silent too long, or are cut off, each with the reason."""
        with self._lock:
            now = concurrency.now()
            quiet = {one: one.peer for one in self._sessions.values() if one.is_quiet(now)}
        connected = self._connected() if quiet else None  # without the lock: no call is to wait for it
        gone = dict[_Session, str]()
        with self._lock:
            now = concurrency.now()
            for one in self._sessions.values():
                ended = connected is not None and one.peer not in connected
                if ended and one.is_quiet(now) and quiet.get(one) == one.peer:  # else it has come back meanwhile
                    gone[one] = CUT_OFF
                elif not one.calls and one.sign_at < now - self._job.silent_after:
                    gone[one] = SILENT
            for one in gone:
                del self._sessions[one.replica.replica_id]
                self._ids.give_back(one.address)
            metrics.GATEWAY_REPLICAS.set(len(self._sessions), self._job.name)
        return gone

    def _orphan_all(self) -> None:
        """When the thread ends."""
        with self._lock:
            self.has_failed = not self._closed.is_set()
            sessions, self._sessions = [*self._sessions.values()], {}
            metrics.GATEWAY_REPLICAS.drop(self._job.name)
        for session in sessions:
            session.replica.orphan()

    # -- orders to end managers, on the thread of their watch ----------------------------------------------------------

    def _obey(self, order: KeyValue) -> None:
        """torchft's own managers do not use etcd. So this calls them by torchft's protocol, as its lighthouse does."""
        address = self._manager_of(member_of(order.key))
        if address is not None and (order.key, order.lease) not in self._obeyed:
            self._obeyed.add((order.key, order.lease))
            _kill(address, order.value.decode(errors="replace"))

    def _manager_of(self, member: str) -> str | None:
        """The address of a member's manager; None if the member is not one of these, or the address is not known.

        A replica that only beats, because it hangs in its step since before this gateway was started, has not asked
        here. Its address then comes from the last quorum.
        """
        with self._lock:
            sessions = [*self._sessions.values()]
        for one in sessions:
            if one.replica.participant.was(member):
                quorum = one.replica.participant.record
                known = {request.replica_id: request.address for request in quorum.requests} if quorum else {}
                return parted(one.manager or known.get(one.replica.replica_id, ""))[0] or None
        return None


def _address_of(peer: str) -> str:
    """The address of a peer that gRPC names `ipv4:10.0.0.1:4711`, without the port."""
    return unquote(peer).rpartition(":")[0]


def _kill(address: str, message: str) -> None:
    """Make a manager exit, within KILL_TIMEOUT."""
    deadline = concurrency.now() + KILL_TIMEOUT
    try:
        with contextlib.closing(native.NativeManager(*place_of(address), deadline)) as manager:
            answer = manager.call(ranks.KillOrder(message), deadline)
    except (ValueError, OSError) as error:  # no address; nobody there
        problem = str(error)
    else:  # it looks like an error of the transport when the process has ended before it answered
        problem = "" if isinstance(answer, bytes) or answer == api.TRANSPORT_ERROR else answer.message
    if problem:
        log.warning("the manager at %s does not end, as ordered (%s): %s", neutral(address), neutral(message), problem)
    else:
        log.info("the manager at %s was ended: %s", neutral(address), neutral(message))


def _note_no_orders(error: BaseException) -> None:
    log.error("orders to kill replicas are not obeyed any longer: %s; start the gateway again", error)


# -- the server --------------------------------------------------------------------------------------------------------


class Gateway(Closing):
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
        with contextlib.ExitStack() as ends:  # in the reverse order: cancel calls, withdraw requests, stop asking
            self._etcd = EtcdClient(replace(job.config(), request_timeout=REQUEST_TIMEOUT))
            ends.callback(self._etcd.close)
            self._sessions = GatewaySessions(self._etcd, job)
            ends.callback(self._sessions.close)
            server = native.NativeServer(
                f"{host}:{port}",
                native.LIGHTHOUSE,
                _calls(self._sessions, min(job.heartbeat_timeout, REQUEST_TIMEOUT)),
                most_calls=MOST_CALLS,
                # Newcomers are refused before no descriptor is left for etcd's connection. Who says nothing makes room.
                most_connections=most_connections(),
                keepalive=max(job.heartbeat_timeout / 2, 1),
                name="ftcoord-gateway",
                options=[("grpc.max_connection_idle_ms", int(max(2 * job.heartbeat_timeout, IDLE_TIMEOUT) * 1000))],
            )
            ends.callback(server.close, wait=True)
            self._end = ends.pop_all().close
        reachable = socket.gethostname() if host in ("0.0.0.0", "[::]") else host
        self._address = f"http://{reachable}:{server.port}"
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
        return self._sessions.has_failed

    def shutdown(self) -> None:
        """Stop serving, within a few seconds. Idempotent.

        Its replicas count as alive until their heartbeats time out, and may continue through another gateway.
        """
        self._cancel_finalizer()
        self._end()

    def close(self) -> None:
        """The same as `shutdown()`."""
        self.shutdown()


def _calls(sessions: GatewaySessions, beat_timeout: float) -> dict[str, Callable[[bytes, grpc.ServicerContext], bytes]]:
    """What answers torchft's calls. It does not refer to the gateway, so that this can be garbage-collected."""

    def quorum(message: bytes, context: grpc.ServicerContext) -> bytes:
        with native.answering(context):
            request = native.read_quorum_request(message)
            deadline = concurrency.now() + native.time_left(context)
            return sessions.answer(sessions.ask(request, context.peer(), deadline, context.add_callback))

    def heartbeat(message: bytes, context: grpc.ServicerContext) -> bytes:
        with native.answering(context):
            deadline = concurrency.now() + min(native.time_left(context), beat_timeout)
            name = str(native.read("LighthouseHeartbeatRequest", message).replica_id)
            sessions.beat(name, context.peer(), deadline)
            return native.write("LighthouseHeartbeatResponse")

    return {"Quorum": quorum, "Heartbeat": heartbeat}
