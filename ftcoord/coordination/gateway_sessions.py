"""The replicas that a gateway speaks for: who was heard of, who is waiting, and who has fallen silent."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

from ftcoord import concurrency
from ftcoord.coordination.address import Job
from ftcoord.coordination.policy import LEASE_FLOOR
from ftcoord.coordination.replica import Replica, TakeoverToken
from ftcoord.core.quorum import QuorumRecord, QuorumRequest
from ftcoord.etcd.api import Etcd

LEAVE_TIMEOUT: Final = 2.0
"""Seconds that etcd may take to hear that a replica has fallen silent."""
SWEEP: Final = 0.2
"""Seconds between two looks for replicas that have fallen silent."""
PASS_ON: Final = 1 / 4
"""The part of a short heartbeat time-out between two beats that are passed on."""


class _GatewaySession:
    """One replica. `heard_at` is when it last beat, or was answered; `calls` of it are under way."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.heard_at = 0.0
        self.passed_at = 0.0
        self.calls = 0


class GatewaySessions:
    """Replicas by their ids, each a member of the job from its first beat or request on. Thread-safe.

    torchft's managers beat ten times a second. What etcd gets of that is a lease for each replica that is renewed
    while there are beats, and revoked when there were none for the heartbeat time-out. Only where that is too short for
    leases (`LEASE_FLOOR`) beats are written, and judged by the decider.

    Args:
        etcd: the door to etcd.
        job: the job and its rules.
    """

    def __init__(self, etcd: Etcd, job: Job) -> None:
        self._etcd, self._job = etcd, job
        timeout = job.heartbeat_timeout
        self._pass_every = timeout * PASS_ON if timeout < LEASE_FLOOR else None
        self._silent_after = max(timeout, LEASE_FLOOR)
        self._lock = concurrency.lock("GatewaySessions._lock")
        self._takeover = TakeoverToken()
        self._sessions: dict[str, _GatewaySession] = {}
        self._closed = concurrency.event()
        self._farewells = ThreadPoolExecutor(4, thread_name_prefix="ftcoord-farewell")
        self._sweeper = concurrency.thread(self._sweep, "ftcoord-guests")
        self._sweeper.start()

    def beat(self, replica_id: str, deadline: float) -> None:
        """A replica lives. Raises what `Replica.beat` does."""
        with self._visit(replica_id) as guest:
            now = concurrency.now()
            is_due = self._pass_every is not None and now - guest.passed_at >= self._pass_every
            if is_due or not guest.replica.joined:
                guest.passed_at = now
                guest.replica.beat(deadline)

    def ask(self, request: QuorumRequest, deadline: float, caller: PendingCall) -> QuorumRecord:
        """The next quorum with this replica in it. Raises what `Replica.ask` does."""
        with self._visit(request.replica_id) as guest:
            caller.waits_for(guest.replica)
            return guest.replica.ask(request, deadline, caller.gone)

    def close(self) -> None:
        """Forget them all, once no calls are under way. Their leases expire by themselves: until then they count as
        alive, and may come back through another gateway."""
        self._closed.set()
        self._sweeper.join()
        with self._lock:
            guests, self._sessions = list(self._sessions.values()), {}
        for guest in guests:
            guest.replica.orphan()
        self._farewells.shutdown()

    @contextmanager
    def _visit(self, replica_id: str) -> Iterator[_GatewaySession]:
        with self._lock:
            if self._closed.is_set():
                raise TimeoutError("the gateway ends")
            guest = self._sessions.get(replica_id)
            if guest is None:
                guest = self._sessions[replica_id] = _GatewaySession(self._new_replica(replica_id))
            guest.calls += 1
            guest.heard_at = concurrency.now()
        try:
            yield guest
            guest.heard_at = concurrency.now()
        finally:
            with self._lock:
                guest.calls -= 1

    def _new_replica(self, replica_id: str) -> Replica:
        return Replica(self._etcd, self._job, replica_id, keeps_lease=True, takeover=self._takeover)

    def _sweep(self) -> None:
        while not self._closed.wait(SWEEP):
            for guest in self._take_silent():
                self._farewells.submit(guest.replica.leave, LEAVE_TIMEOUT)

    def _take_silent(self) -> list[_GatewaySession]:
        """Those that were not heard for too long; they are forgotten."""
        with self._lock:
            if self._closed.is_set():
                return []
            since = concurrency.now() - self._silent_after
            silent = [one for one, guest in self._sessions.items() if not guest.calls and guest.heard_at < since]
            return [self._sessions.pop(one) for one in silent]


class PendingCall:
    """Who waits for a quorum, and may go away."""

    def __init__(self) -> None:
        self.gone = concurrency.event()
        self._replica: Replica | None = None

    def waits_for(self, replica: Replica) -> None:
        self._replica = replica

    def leave(self) -> None:
        """It waits no more. Does not block."""
        self.gone.set()
        if self._replica is not None:
            self._replica.nudge()
