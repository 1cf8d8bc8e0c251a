"""The replicas that a gateway represents: which are alive, which wait for a quorum, and which have gone silent."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Final

from ftcoord import concurrency
from ftcoord.coordination.address import Job
from ftcoord.coordination.gateway_limits import MOST_IDS, MOST_IDS_OF_ADDRESS, Shares, address_of
from ftcoord.coordination.pending_call import PendingCall
from ftcoord.coordination.replica import Replica
from ftcoord.core.manager_address import parted
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest
from ftcoord.errors import ServerError, ThreadNotStarted
from ftcoord.escaping import neutral
from ftcoord.etcd.api import Etcd
from ftcoord.metrics import process as metrics
from ftcoord.pool import DaemonPool

log = logging.getLogger(__name__)

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
        ended: returns which of these peers, as gRPC names them, are no longer connected; see `peers`.

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
