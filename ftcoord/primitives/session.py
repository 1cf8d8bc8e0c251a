"""Leases kept alive: one keep-alive thread for the process, and sessions that tell their owner the truth."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
from collections.abc import Callable
from types import TracebackType
from typing import TypeAlias

from ftcoord import concurrency
from ftcoord.core.lease import RENEW_AFTER, LeaseTimes, SessionState
from ftcoord.errors import ClientClosed, EtcdError, ForkedProcessError, LeaseLost
from ftcoord.etcd.api import Etcd, Lease, Renews

log = logging.getLogger(__name__)

LEAST_PATIENCE = 0.25
"""Seconds that a renewal may take in any case, however many wait behind it."""

Clock: TypeAlias = Callable[[], float]
Listener: TypeAlias = Callable[[SessionState], None]


class Renewer:
    """The thread that keeps the leases of this process alive. `Renewer.of_process()` is the one to use."""

    def __init__(self, clock: Clock = concurrency.now) -> None:
        self.clock = clock
        self._wake = concurrency.condition("Renewer._wake")
        self._due: list[tuple[float, int, KeptLease]] = []
        self._order = itertools.count()
        self._thread: concurrency.Thread | None = None

    @classmethod
    def of_process(cls) -> Renewer:
        """The renewer of this process; a forked child gets a new one."""
        return concurrency.of_process(cls)

    def schedule(self, lease: KeptLease, due: float, *, hasten: bool = False) -> None:
        """Call `lease.beat()` at `due`, unless it was stopped. One that is scheduled stays so, but for
        `hasten`."""
        with self._wake:
            if not lease.kept or (lease.scheduled and not hasten):
                return
            if lease.scheduled:
                self._remove(lease)
            lease.scheduled, entry = True, (due, next(self._order), lease)
            heapq.heappush(self._due, entry)
            self._start()
            if self._due[0] is entry:  # waking the thread costs more than all the rest of this
                self._wake.notify()

    def renew_soon(self, lease_id: int) -> None:
        """Renew a lease now, and not when it is due, if it is one that is kept alive here."""
        with self._wake:
            for lease in [lease for _, _, lease in self._due if lease.id == lease_id]:
                self.schedule(lease, self.clock(), hasten=True)

    def cancel(self, lease: KeptLease) -> None:
        """Forget a lease that was stopped; a beat under way is its last."""
        with self._wake:
            self._remove(lease)
            self._wake.notify()

    def _remove(self, lease: KeptLease) -> None:
        lease.scheduled = False
        self._due = [entry for entry in self._due if entry[2] is not lease]
        heapq.heapify(self._due)

    def _start(self) -> None:
        if self._thread is None and self._due:
            thread = concurrency.thread(self._run, "ftcoord-leases")
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        try:
            while (lease := self._next()) is not None:
                due = lease.beat(self._patience(lease))
                if due is not None:
                    self.schedule(lease, due)
        finally:
            with self._wake:
                self._thread = None
                self._start()  # a listener that raises ends its own lease only

    def _next(self) -> KeptLease | None:
        """Wait for the next lease that is due; None when there are none left."""
        with self._wake:
            while self._due:
                wait = self._due[0][0] - self.clock()
                if wait <= 0:
                    lease = heapq.heappop(self._due)[2]
                    lease.scheduled = False
                    return lease
                self._wake.wait(wait)
            return None

    def _patience(self, lease: KeptLease) -> float:
        """Seconds that a beat may take: leases whose etcd hangs must not cost those that wait behind them theirs."""
        with self._wake:
            ttls = [lease.ttl, *(other.ttl for _, _, other in self._due)]
            waiting = sum(due <= self.clock() for due, _, _ in self._due)
        whole = min(ttls) * RENEW_AFTER
        return max(whole / (1 + waiting), min(whole, LEAST_PATIENCE))


class KeptLease:
    """A lease that is renewed until `stop()`, with what is known of it.

    Args:
        etcd: what renews it.
        lease: the lease; `sent_at` is when its grant or last renewal was sent, on the renewer's clock.
        listener: called on the renewer's thread at each change of state; must not block.
    """

    def __init__(
        self,
        etcd: Renews,
        lease: Lease,
        sent_at: float,
        listener: Listener | None = None,
        renewer: Renewer | None = None,
    ) -> None:
        self.id = lease.id
        self.kept = True
        self.scheduled = False  # the renewer's
        self._resting = False
        self._etcd = etcd
        self._renewer = renewer or Renewer.of_process()
        self._times = LeaseTimes(sent_at, lease.ttl)
        self._lost = False
        self._told = SessionState.CONNECTED
        self._listener = listener
        self._renewer.schedule(self, self._times.renew_at())

    @property
    def state(self) -> SessionState:
        """Right at any moment, also when the keep-alive thread was not run for a while."""
        return SessionState.LOST if self._lost else self._times.state(self._renewer.clock())

    @property
    def ttl(self) -> float:
        """The TTL that was granted last, in seconds."""
        return self._times.ttl

    def rest(self) -> None:
        """Renew no more until `resume()`; costs nothing when that follows soon."""
        self._resting = True

    def resume(self) -> None:
        """Renew again after `rest()`, the first time at once if it was not done just before."""
        self._resting = False
        now = self._renewer.clock()
        due = self._times.resume_at(now)
        self._renewer.schedule(self, due, hasten=due <= now)

    def renew(self, timeout: float) -> None:
        """Renew once now, whether it is kept or not. Raises LeaseLost and EtcdError."""
        sent_at = self._renewer.clock()
        self._times = LeaseTimes(sent_at, self._etcd.renew(self.id, timeout=timeout))

    def revoked(self) -> None:
        """Note that the owner has given the lease up."""
        self._lost = True

    def stop(self) -> None:
        """Renew no more; the lease expires after its TTL."""
        self.kept = False
        self._renewer.cancel(self)

    def beat(self, patience: float) -> float | None:
        """Renew once, in `patience` seconds; when to do it again, or None when there is nothing to keep for now."""
        if self._resting:
            return None
        sent_at = self._renewer.clock()
        due = None
        try:
            ttl = self._etcd.renew(self.id, timeout=min(patience, self._times.patience(sent_at)))
            self._times = LeaseTimes(sent_at, ttl)
            due = self._times.renew_at()
        except ClientClosed as error:
            log.debug("lease %x is left to expire: %s", self.id, error)
            self.kept = False
            return None
        except LeaseLost as error:
            log.debug("lease %x: %s", self.id, error)
            self._lost = True
        except EtcdError as error:
            log.debug("lease %x was not renewed: %s", self.id, error)
            due = self._times.renew_at(self._renewer.clock())
        if not self.kept:  # its owner stopped it meanwhile
            return None
        if self._lost:
            self.kept = False
        self._tell()
        return due

    def _tell(self) -> None:
        state = self.state
        if state is not self._told:
            self._told = state
            if self._listener is not None:
                self._listener(state)


class Session:
    """One lease of this process, kept alive until `close()`; keys put under it vanish with it.

    Args:
        etcd: the door to etcd.
        ttl: the time to live to ask for, in seconds; `Session.ttl` is what etcd granted (2 s at the least by default).
        listener: called with CONNECTED, SUSPENDED or LOST at each change, on the keep-alive thread. LOST is final.

    Raises:
        EtcdError: no lease could be had.

    Not promised: that nobody else believes the lease alive, or dead, at the same moment. Put the check into the
    transaction that has the effect.
    """

    def __init__(self, etcd: Etcd, ttl: int, listener: Listener | None = None, renewer: Renewer | None = None) -> None:
        self._etcd = etcd
        self._pid = os.getpid()
        self._closed = False
        renewer = renewer or Renewer.of_process()
        sent_at = renewer.clock()
        lease = etcd.grant(ttl)
        self.ttl = lease.ttl
        self._kept = KeptLease(etcd, lease, sent_at, listener, renewer)

    @property
    def lease_id(self) -> int:
        """The lease to put keys under. Raises ForkedProcessError in a child that was forked later."""
        if os.getpid() != self._pid:
            raise ForkedProcessError.of("this session's lease belongs to the parent process")
        return self._kept.id

    @property
    def state(self) -> SessionState:
        return self._kept.state

    def rest(self) -> None:
        """Stop renewing; the keys live on until the TTL is over, unless it is woken up before."""
        self._kept.rest()

    def wake(self) -> None:
        """Renew again after `rest()`."""
        if not self._closed:
            self._kept.resume()

    def renew(self, timeout: float) -> None:
        """Renew once now. Raises LeaseLost when it is too late, and EtcdError."""
        self._kept.renew(timeout)

    def orphan(self) -> None:
        """Stop renewing without revoking: the keys live on until the TTL is over. Idempotent."""
        self._closed = True
        self._kept.stop()

    def close(self, timeout: float | None = None) -> None:
        """Revoke the lease at once, and its keys with it. Idempotent; does nothing in a forked child.

        Raises EtcdError when etcd cannot be reached in time; the lease then expires by itself.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self.orphan()
        if self._kept.state is not SessionState.LOST:
            self._etcd.revoke(self._kept.id, timeout=timeout)
            self._kept.revoked()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
