"""The replicas that a gateway represents: which are alive, which wait for a quorum, and which have gone silent.

torchft's protocol has no login, so a broken caller must not stop all others: each takes a share of what there is.
"""

from __future__ import annotations

import logging
import math
import resource
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final, TypeAlias
from urllib.parse import unquote

from ftcoord import concurrency
from ftcoord.coordination.address import Job
from ftcoord.coordination.replica import Replica
from ftcoord.core.manager_address import parted
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest
from ftcoord.errors import ServerError, ThreadNotStarted
from ftcoord.escaping import neutral
from ftcoord.etcd.api import Etcd
from ftcoord.metrics import process as metrics
from ftcoord.pool import DaemonPool
from ftcoord.proc import connections


class PendingCall:
    """A caller that waits for a quorum, and may go away."""

    def __init__(self) -> None:
        self.gone = concurrency.event()
        self._replica: Replica | None = None  # set by the thread that asks, read by that of `leave`

    def waits_for(self, replica: Replica) -> None:
        """Note the replica before it asks. `ask` checks `gone` after this, so one of the two notices a caller that
        leaves now."""
        self._replica = replica

    def leave(self) -> None:
        """The caller no longer waits. Does not block."""
        self.gone.set()
        if self._replica is not None:
            self._replica.nudge()


# -- limits ------------------------------------------------------------------------------------------------------------


CALL_THREADS: Final = 1024
"""The most threads for calls. A quorum call holds a thread while it waits, and so does a replica's first beat while
etcd is unreachable. Threads are made when they are needed, so a high limit costs nothing. As many other threads talk to
etcd for the quorum calls, so that each call ends in time even if etcd does not answer."""
MOST_RPCS: Final = 2 * CALL_THREADS
"""The most calls in progress, including those that have no thread yet. gRPC refuses more."""
MOST_WAITING: Final = CALL_THREADS - 256
"""The most quorum calls that wait. The other threads are for beats, which are never delayed by calls that wait."""
MOST_WAITING_OF_ADDRESS: Final = 512
MOST_WAITING_OF_ID: Final = 4
"""The most quorum calls of one replica that wait: its next call ends the oldest one."""
MOST_IDS: Final = 1024
"""The most replicas that a gateway represents: each costs a lease, a thread, and a member in each decision."""
MOST_IDS_OF_ADDRESS: Final = 256
MOST_DESCRIPTORS: Final = 8192
RESERVED_DESCRIPTORS: Final = 128
"""File descriptors that are left for etcd's connection, logs and the page when callers have taken all of theirs."""


def most_connections() -> int:
    """How many callers may be connected at a time: half of the descriptors that this process may still open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max((soft - RESERVED_DESCRIPTORS) // 2, 8) if soft != resource.RLIM_INFINITY else MOST_RPCS


def raise_descriptor_limit() -> None:
    """Have this process open as many file descriptors as the system lets it, within reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def address_of(peer: str) -> str:
    """The address of a peer that gRPC names `ipv4:10.0.0.1:4711`, without the port."""
    return unquote(peer).rpartition(":")[0]


class Shares:
    """What is taken of a limited thing, by address. For whoever holds the lock of its owner.

    Args:
        what: what is limited, for the error.
        most, most_of_one: the limits in all, and for one address.
    """

    def __init__(self, what: str, most: int, most_of_one: int) -> None:
        self._what, self._most, self._most_of_one = what, most, most_of_one  # never change
        self._taken: Counter[str] = Counter()

    def take(self, address: str) -> None:
        """Raises ServerError if nothing is left for this address."""
        of_one = self._taken[address] >= self._most_of_one
        if of_one or self._taken.total() >= self._most:
            limit = f"{self._most_of_one} {self._what} of one address" if of_one else f"{self._most} {self._what}"
            raise ServerError(f"this gateway takes at most {limit}; use another gateway for the others")
        self._taken[address] += 1

    def give_back(self, address: str) -> None:
        self._taken[address] -= 1
        if not self._taken[address]:
            del self._taken[address]


class WaitingCalls:
    """The quorum calls that wait. Thread-safe."""

    def __init__(self) -> None:
        self._lock = concurrency.lock("WaitingCalls._lock")  # guards all below
        self._calls: dict[str, dict[PendingCall, str]] = {}  # of each replica, the oldest first, with their addresses
        self._shares = Shares("quorum calls that wait", MOST_WAITING, MOST_WAITING_OF_ADDRESS)

    @contextmanager
    def waiting(self, replica_id: str, address: str, call: PendingCall) -> Iterator[None]:
        """While this is open, the call waits. Ends the oldest call of a replica that has too many. Raises ServerError
        if too many wait."""
        superseded = None
        with self._lock:
            calls = self._calls.get(replica_id, {})
            if len(calls) >= MOST_WAITING_OF_ID:
                superseded = next(iter(calls))
                self._remove(replica_id, superseded)
            self._shares.take(address)
            self._calls.setdefault(replica_id, {})[call] = address
        if superseded is not None:
            superseded.leave()
        try:
            yield
        finally:
            with self._lock:
                self._remove(replica_id, call)

    def _remove(self, replica_id: str, call: PendingCall) -> None:
        calls = self._calls.get(replica_id, {})
        if call in calls:
            self._shares.give_back(calls.pop(call))
        if not calls:
            self._calls.pop(replica_id, None)


# -- connections of callers --------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

_ESTABLISHED: Final = "01"
_WORD: Final = 8
"""Hexadecimal digits of the 32-bit words in which an address is written, each in the byte order of this host."""

PeerAddress: TypeAlias = tuple[IPv4Address | IPv6Address, int]
"""The address and port at the other end."""


def ended_peers(port: int, peers: Collection[str]) -> frozenset[str]:
    """The peers, named as gRPC names them, that no longer have a connection to this local port.

    Returns none where the system does not say (outside Linux, or while it cannot read its tables), and leaves out names
    that are no addresses. A process that has inherited a connection keeps it open, and so does a proxy.
    """
    try:
        texts = connections()
    except OSError as error:  # all connections in a table that cannot be read would seem to have ended
        log.debug("which connections stand cannot be told for now: %s", error)
        return frozenset()
    if not texts:
        return frozenset()
    standing = {peer for text in texts for peer in connected_peers(text, port)}
    known = {name: peer for name in peers if (peer := parse_peer(name)) is not None}
    return frozenset(name for name, peer in known.items() if peer not in standing)


def parse_peer(name: str) -> PeerAddress | None:
    """A peer as gRPC names it: `ipv4:10.0.0.1:4711` or `ipv6:%5B::1%5D:4711`; None for any other kind."""
    kind, _, rest = unquote(name).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    address = host.removeprefix("[").removesuffix("]").partition("%")[0]  # the tables do not name the interface
    try:
        return _plain(ip_address(address)), int(port)
    except ValueError:
        log.debug("gRPC names a caller %r, which is no address", name)
        return None


def connected_peers(text: str, port: int) -> Iterator[PeerAddress]:
    """The peers connected to this local port, from a table of Linux."""
    ours = f":{port:04X}"
    for line in text.splitlines():
        if ours in line:  # which most lines are not: there may be tens of thousands
            _, local, remote, state, *_ = line.split()
            if local.endswith(ours) and state == _ESTABLISHED:
                address, _, number = remote.partition(":")
                yield _address(address), int(number, 16)


def _address(digits: str) -> IPv4Address | IPv6Address:
    words = (int(digits[at : at + _WORD], 16) for at in range(0, len(digits), _WORD))
    raw = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    return _plain(IPv4Address(raw) if len(raw) == 4 else IPv6Address(raw))


def _plain(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The same address for an IPv4 caller of an IPv6 listener, which may be written either way."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


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


class _GatewaySession:
    """One replica. All but `replica` is guarded by the lock of its GatewaySessions."""

    def __init__(self, replica: Replica, address: str) -> None:
        self.replica, self.address = replica, address
        """The replica, and the address that its share of ids is taken from: of who first sent its id."""
        self.manager = ""
        """The address of its manager, from its last request to this gateway; empty before that."""
        self.last_sign_at = 0.0
        """When it last beat, or was last answered."""
        self.calls = 0
        """How many of its calls are in progress."""
        self.peer = ""
        """The sender of its last beat, as gRPC names it,"""
        self.beat_at = 0.0
        """the time of that beat,"""
        self.beats_every = math.inf
        """and the seconds since the beat before; infinite if that one came by another connection."""
        self.looks_at = 0.0
        """When to check its connection again."""

    def note_beat(self, peer: str, now: float) -> None:
        """Note a beat."""
        self.beats_every = now - self.beat_at if peer == self.peer else math.inf
        self.peer, self.beat_at, self.looks_at = peer, now, 0.0

    def is_quiet(self, now: float) -> bool:
        """Whether to check if its connection is still open. If it is, its host is lost or it hangs, and the heartbeat
        timeout applies. If not, its process has ended: it has beaten through that connection before, and would have
        reconnected."""
        quiet_since = max(self.last_sign_at, self.beat_at)
        silence = max(MISSED * self.beats_every, QUIET_FOR)
        return not self.calls and now >= max(quiet_since + silence, self.looks_at)

    def stands(self, now: float) -> None:
        """Its connection is open: check again after twice the time that it has been quiet, because there may be tens of
        thousands of connections to look through."""
        self.looks_at = now + (now - self.beat_at)


class GatewaySessions:
    """Replicas by id, each a member of the job from its first beat or request on. Thread-safe.

    torchft's managers beat ten times a second, but these beats do not reach etcd. Each replica has a lease, which is
    renewed while beats come. It is revoked when no beat came for the heartbeat timeout, or when the beats stop and the
    connection has ended.

    Args:
        etcd: the client.
        job: the job and its rules.
        ended: returns which of these peers, as gRPC names them, are no longer connected; see `ended_peers`.

    If the thread that looks for silent replicas failed, no replica would ever count as dead. So all of their leases are
    then left to expire, and each call raises ServerError.
    """

    def __init__(
        self,
        etcd: Etcd,
        job: Job,
        ended: Callable[[Collection[str]], Collection[str]],
    ) -> None:
        self._etcd, self._job, self._ended = etcd, job, ended  # never change
        self._lock = concurrency.lock("GatewaySessions._lock")
        self._sessions: dict[str, _GatewaySession] = {}  # guarded by _lock, as the next
        self._shares = Shares("replicas", MOST_IDS, MOST_IDS_OF_ADDRESS)
        self._failed = False  # guarded by _lock
        self._closed = concurrency.event()  # set under _lock
        self._leaving = DaemonPool(4, "ftcoord-leaving")
        self._sweeper = concurrency.thread(self._run_sweeper, "ftcoord-sweeper")
        self._sweeper.start()

    @property
    def has_failed(self) -> bool:
        """Whether its thread has failed."""
        with self._lock:
            return self._failed

    def beat(self, replica_id: str, peer: str, deadline: float) -> None:
        """Note a beat of a replica from `peer`. Raises what `Replica.beat` raises, and ServerError."""
        with self._visit(replica_id, peer) as session:
            with self._lock:
                session.note_beat(peer, concurrency.now())
            if not session.replica.joined:
                session.replica.beat(deadline)

    def ask(self, request: QuorumRequest, peer: str, deadline: float, caller: PendingCall) -> QuorumRecord:
        """The next quorum with this replica in it. Raises what `Replica.ask` raises, and ServerError."""
        with self._visit(request.replica_id, peer) as session:
            with self._lock:
                session.manager = request.address
            caller.waits_for(session.replica)
            return session.replica.ask(request, deadline, caller.gone)

    def manager_of(self, member: str) -> str | None:
        """The address of a member's manager; None if the member is not one of these, or the address is not known.

        A replica that only beats, because it hangs in its step since before this gateway was started, has not asked
        here. Its address then comes from the last quorum.
        """
        with self._lock:
            sessions = list(self._sessions.values())
        session = next((one for one in sessions if one.replica.was(member)), None)
        if session is None:
            return None
        address = session.manager or _address_in(session.replica.quorum, session.replica.replica_id)
        return address and parted(address)[0]

    def close(self) -> None:
        """Drop all replicas. Idempotent. Call it when no call is in progress.

        Their leases expire. Until then they count as alive, and may continue through another gateway.
        """
        with self._lock:
            self._closed.set()
        self._sweeper.join()
        self._orphan_all()
        self._leaving.close()

    @contextmanager
    def _visit(self, replica_id: str, peer: str) -> Iterator[_GatewaySession]:
        """While this is open, the replica does not count as silent."""
        with self._lock:
            if self._closed.is_set():
                raise TimeoutError("the gateway is shutting down")
            if self._failed:
                raise ServerError("this gateway has failed, see its log; restart it")
            session = self._sessions.get(replica_id)
            if session is None:
                address = address_of(peer)
                self._shares.take(address)
                session = self._sessions[replica_id] = _GatewaySession(self._new_replica(replica_id), address)
                metrics.GATEWAY_REPLICAS.set(len(self._sessions), self._job.name)
            session.calls += 1
            session.last_sign_at = concurrency.now()
        answered = False
        try:
            yield session
            answered = True
        finally:
            with self._lock:
                session.calls -= 1
                if answered:
                    session.last_sign_at = concurrency.now()

    def _new_replica(self, replica_id: str) -> Replica:
        return Replica(  # which lives on when this gateway dies, and asks the next one
            self._etcd, self._job, replica_id, keeps_lease=True, dies_with_process=False
        )

    def _run_sweeper(self) -> None:
        try:
            while not self._closed.wait(SWEEP_INTERVAL):
                for session, cause in self._take_silent(self._cut_off()).items():
                    self._end_lease(session.replica, cause)
        finally:
            if sys.exc_info()[1] is not None:
                log.exception("the gateway has failed; restart it")
                with self._lock:
                    self._failed = True
                self._orphan_all()

    def _end_lease(self, replica: Replica, cause: str) -> None:
        """End the lease of a silent replica that was dropped: nobody else would, and it would be renewed forever."""
        log.warning("replica %r counts as dead: %s", replica.replica_id, cause)
        try:
            left = self._leaving.submit(replica.leave, REVOKE_TIMEOUT, cause)
        except ThreadNotStarted as error:
            name = neutral(replica.replica_id)
            log.warning("replica %s has gone silent, and its lease is left to expire: %s", name, error)
            replica.orphan()
        else:
            left.add_done_callback(partial(_see_to, replica))

    def _cut_off(self) -> dict[_GatewaySession, str]:
        """The quiet replicas whose connection has ended, each with its peer."""
        now = concurrency.now()
        with self._lock:
            quiet = {kept: kept.peer for kept in self._sessions.values() if kept.is_quiet(now)}
        ended = self._ended(set(quiet.values())) if quiet else ()  # without the lock: no call is to wait for it
        with self._lock:
            for kept, peer in quiet.items():
                if peer not in ended:
                    kept.stands(now)
        return {kept: peer for kept, peer in quiet.items() if peer in ended}

    def _take_silent(self, cut_off: Mapping[_GatewaySession, str]) -> dict[_GatewaySession, str]:
        """Drop and return the replicas that have been silent too long, or are cut off, each with the reason."""
        with self._lock:
            if self._closed.is_set():
                return {}
            now = concurrency.now()
            since = now - self._job.silent_after
            gone = dict[_GatewaySession, str]()
            for kept in self._sessions.values():
                if kept.is_quiet(now) and cut_off.get(kept) == kept.peer:  # else it has come back meanwhile
                    gone[kept] = CUT_OFF
                elif not kept.calls and kept.last_sign_at < since:
                    gone[kept] = SILENT
            for kept in gone:
                del self._sessions[kept.replica.replica_id]
                self._shares.give_back(kept.address)
            metrics.GATEWAY_REPLICAS.set(len(self._sessions), self._job.name)
            return gone

    def _orphan_all(self) -> None:
        with self._lock:
            sessions, self._sessions = list(self._sessions.values()), {}
            metrics.GATEWAY_REPLICAS.drop(self._job.name)
        for session in sessions:
            session.replica.orphan()


def _address_in(quorum: QuorumRecord | None, replica_id: str) -> str | None:
    """The address of a replica's manager, if the replica is in the quorum."""
    requests = quorum.requests if quorum is not None else ()
    return next((one.address for one in requests if one.replica_id == replica_id and one.address), None)


def _see_to(replica: Replica, left: Future[None]) -> None:
    """Log an unexpected error; the lease then expires."""
    if (error := left.exception()) is not None:
        name = neutral(replica.replica_id)
        log.error("replica %s did not leave, and its lease is left to expire", name, exc_info=error)
        replica.orphan()
