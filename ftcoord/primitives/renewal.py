"""Leases kept alive: one keep-alive thread for the process, and what it knows of each lease."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ftcoord import concurrency
from ftcoord.core.lease import RENEW_AFTER, LeaseTimes, SessionState
from ftcoord.errors import ClientClosed, EtcdError, LeaseLost, ThreadNotStarted
from ftcoord.etcd.api import Etcd, Lease
from ftcoord.metrics import process as metrics

log = logging.getLogger(__name__)

SHORTEST_RENEWAL_TIMEOUT = 0.25
"""Seconds that a renewal may take even if many others wait behind it."""
INTRODUCED_AFTER = 0.5
"""Seconds after which a lease is told to the sentinel, unless `KeptLease.introduce` is called before. To start that
costs a tenth of a second of a processor, which a round that forms just then, and a session that ends soon, need not pay
for."""

Clock: TypeAlias = Callable[[], float]
Listener: TypeAlias = Callable[[SessionState], None]


class Bystander(Protocol):
    """Who hears what becomes of a lease. Called on any thread; must not block, nor raise."""

    def keep(self, lease_id: int, ttl: float, sent_at: float) -> None:
        """It was renewed for `ttl` seconds, by a request that was sent at that monotonic time."""

    def rest(self, lease_id: int) -> None:
        """It is not renewed for now."""

    def drop(self, lease_id: int) -> None:
        """It has ended, or is to end by time. May be said again, and of one that it never heard of."""


class Renewer:
    """The thread that keeps the leases of this process alive. `Renewer.of_process()` is the one to use.

    Thread-safe. The thread runs while there is a lease to keep.
    """

    def __init__(self, clock: Clock = concurrency.now) -> None:
        self.clock = clock  # never changes
        # Guards all below, and `KeptLease.entry`. Reentrant: `renew_soon` holds it while it calls `schedule`.
        # Never held during a renewal or while a listener runs.
        self._wake = concurrency.condition("Renewer._wake")
        self._due: list[_Entry] = []  # a heap; an entry without a lease does not count
        self._ttls: Counter[float] = Counter()  # of the entries that count
        self._order = itertools.count()  # makes entries comparable: leases are not
        self._thread: concurrency.Thread | None = None
        self._renewing: KeptLease | None = None

    @classmethod
    def of_process(cls) -> Renewer:
        """The renewer of this process; a forked child gets its own, since it has none of the parent's threads."""
        return concurrency.of_process(cls)

    def times_left(self) -> list[float]:
        """Seconds that each lease has left which is kept alive here, as far as is known."""
        return [lease.time_left for lease in self._leases()]

    def shares_left(self) -> list[float]:
        """The same as parts of their TTLs."""
        return [lease.time_left / lease.ttl for lease in self._leases()]

    def _leases(self) -> list[KeptLease]:
        with self._wake:
            leases = [lease for entry in self._due if (lease := entry.lease) is not None]
            return leases + ([self._renewing] if self._renewing is not None else [])

    def schedule(self, lease: KeptLease, due: float, *, hasten: bool = False) -> None:
        """Have `lease` renewed at `due`, unless it was stopped. A lease that is scheduled already keeps its time,
        unless `hasten` is given. Raises ThreadNotStarted; nothing is scheduled then."""
        with self._wake:
            if not lease.kept or (lease.entry is not None and not hasten):
                return
            self._remove(lease)
            lease.entry = entry = _Entry(due, next(self._order), lease.ttl, lease)
            self._ttls[entry.ttl] += 1
            heapq.heappush(self._due, entry)
            try:
                self._start()
            except ThreadNotStarted:
                self._remove(lease)  # or the next thread would keep it alive for nobody
                raise
            if self._due[0] is entry:  # waking the thread costs more than all the rest of this
                self._wake.notify()

    def renew_soon(self, lease_id: int) -> None:
        """Renew a lease now instead of when it is due, if it is kept alive here."""
        with self._wake:
            for lease in [lease for entry in self._due if (lease := entry.lease) and lease.id == lease_id]:
                self.schedule(lease, self.clock(), hasten=True)

    def cancel(self, lease: KeptLease) -> None:
        """Forget a lease that was stopped; a renewal under way is its last."""
        with self._wake:
            self._remove(lease)
            self._wake.notify()

    def _remove(self, lease: KeptLease) -> None:
        """With the lock held. What is in the heap goes later, all at once: then a thousand leases cost no more each
        than one does."""
        entry, lease.entry = lease.entry, None
        if entry is None:
            return
        entry.lease = None
        self._ttls[entry.ttl] -= 1
        if not self._ttls[entry.ttl]:
            del self._ttls[entry.ttl]
        if len(self._due) > 2 * self._ttls.total() + 1:
            self._due = [entry for entry in self._due if entry.lease is not None]
            heapq.heapify(self._due)

    def _start(self) -> None:
        if self._thread is None and self._due:
            thread = concurrency.thread(self._run, "ftcoord-leases")
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        lease: KeptLease | None = None
        try:
            while (lease := self._next()) is not None:
                due = lease.renew_on_schedule(self._timeout_of(lease))
                if due is not None:
                    self.schedule(lease, due)
        finally:
            failure = sys.exc_info()[1]
            with self._wake:
                self._thread = self._renewing = None
                # For what was scheduled since `_next` found nothing; and a failure must not cost others theirs.
                self._start()
            if lease is not None and failure is not None:
                lease.fail(failure)

    def _next(self) -> KeptLease | None:
        """Wait for the next lease that is due; None when there are none left."""
        with self._wake:
            self._renewing = None
            while self._due:
                lease, wait = self._due[0].lease, self._due[0].due - self.clock()
                if lease is not None and wait > 0:
                    del lease  # whoever has it may end it meanwhile, and be forgotten
                    self._wake.wait(wait)
                    continue
                heapq.heappop(self._due)
                if lease is not None:
                    self._remove(lease)
                    self._renewing = lease
                    return lease
            return None

    def _timeout_of(self, lease: KeptLease) -> float:
        """Seconds that a renewal may take: an etcd that hangs must not cost the leases behind it theirs."""
        with self._wake:
            whole = min([lease.ttl, *self._ttls]) * RENEW_AFTER
            shortest = min(whole, SHORTEST_RENEWAL_TIMEOUT)
            waiting = self._waiting(int(whole / shortest))
        return max(whole / (1 + waiting), shortest)

    def _waiting(self, limit: int) -> int:
        """With the lock held: how many leases are due now; it stops counting at the limit."""
        now, count, places = self.clock(), 0, [0]
        while places and count < limit:
            place = places.pop()
            if place < len(self._due) and self._due[place].due <= now:  # else none below it is due
                count += self._due[place].lease is not None
                places += (2 * place + 1, 2 * place + 2)
        return count


@dataclass(slots=True, eq=False)
class _Entry:
    """When a lease is to be renewed; `ttl` as it was when that was said. The renewer's lock guards it."""

    due: float
    order: int
    ttl: float
    lease: KeptLease | None
    """None once this does not count any longer: what stays in the heap must not keep a lease's owner alive."""

    def __lt__(self, other: _Entry) -> bool:
        return (self.due, self.order) < (other.due, other.order)


class KeptLease:
    """A lease that is renewed until `stop()`, and what is known of it.

    Args:
        etcd: renews it.
        lease: the lease.
        sent_at: when its grant or last renewal was sent, on the renewer's clock.
        listener: called on the renewer's thread at each change of state; must not block.
        renewer: the process's own if None.
        bystander: told of each renewal, of a rest and of the end; None for nobody.

    Raises ThreadNotStarted. Its methods may be called from any thread.
    """

    def __init__(
        self,
        etcd: Etcd,
        lease: Lease,
        sent_at: float,
        listener: Listener | None = None,
        renewer: Renewer | None = None,
        bystander: Bystander | None = None,
    ) -> None:
        self.id = lease.id
        self._etcd, self._listener, self._bystander = etcd, listener, bystander
        self._renewer = renewer or Renewer.of_process()
        self.entry: _Entry | None = None  # guarded by Renewer._wake: when it is to be renewed
        # Without a lock, since each is replaced as a whole and a reader may see either value:
        self.kept = True  # any thread; becomes False once. `Renewer.schedule` checks it with the lock held
        self._dropped = False  # any thread; becomes True once, and `kept` False before: nobody needs the bystander
        self._lost = False  # any thread; becomes True once
        self._resting = False  # any thread
        # The owner's thread (`renew`) and the renewer's. If an older one wins, the lease is trusted for less time.
        self._times = LeaseTimes(sent_at, lease.ttl)
        self._reported = SessionState.CONNECTED  # only the renewer's thread: the listener's last state
        self._is_introduced = bystander is None  # only the renewer's thread
        due = self._times.renew_at()
        self._renewer.schedule(self, due if bystander is None else min(due, sent_at + INTRODUCED_AFTER))

    @property
    def state(self) -> SessionState:
        """True at any moment, also when the keep-alive thread did not run for a while.

        On a host that was suspended, from the next renewal on: its clock stood still.
        """
        return SessionState.LOST if self._lost else self._times.state(self._renewer.clock())

    @property
    def rests(self) -> bool:
        """Whether it is not renewed until `resume()`."""
        return self._resting

    @property
    def ttl(self) -> float:
        """The TTL that was granted last, in seconds."""
        return self._times.ttl

    @property
    def time_left(self) -> float:
        """Seconds that it lives at the least, if it was not revoked."""
        times = self._times
        return max(times.sent_at + times.ttl - self._renewer.clock(), 0.0)

    def rest(self) -> None:
        """Stop renewing until `resume()`; costs nothing if that follows soon."""
        self._resting = True

    def resume(self) -> None:
        """Renew again after `rest()`: at once, unless the last renewal was just before."""
        self._resting = False
        now = self._renewer.clock()
        due = self._times.resume_at(now)
        self._renewer.schedule(self, due, hasten=due <= now)

    def introduce(self) -> None:
        """Tell the bystander of the lease now, for an owner that leaves others behind if its process dies."""
        if self._bystander is not None:
            self._bystander.keep(self.id, self._times.ttl, self._times.sent_at)
            self._tell_of_end()

    def renew(self, timeout: float) -> None:
        """Renew once now, whether it is kept or not. Raises LeaseLost and EtcdError."""
        sent_at = self._renewer.clock()
        self._times = LeaseTimes(sent_at, self._etcd.renew(self.id, timeout=timeout))

    def revoked(self) -> None:
        """Note that the owner has revoked the lease."""
        self._lost = True

    def end_renewals(self) -> None:
        """Stop renewing for good, for somebody who is about to revoke the lease. Until `stop()` the bystander still
        gives it up if this process dies."""
        self.kept = False
        self._renewer.cancel(self)
        if self._bystander is not None:
            self._bystander.rest(self.id)

    def stop(self) -> None:
        """Stop renewing for good; the lease expires after its TTL."""
        self.kept = False
        self._renewer.cancel(self)
        self._drop()

    def _drop(self) -> None:
        self._dropped = True
        if self._bystander is not None:
            self._bystander.drop(self.id)

    def _tell_of_end(self) -> None:
        """Tell the bystander again if renewals have ended: it may have been told of one since."""
        if self._bystander is not None and not self.kept:
            if self._dropped:
                self._bystander.drop(self.id)
            else:
                self._bystander.rest(self.id)

    # -- the renewer's thread -----------------------------------------------------------------------------------

    def renew_on_schedule(self, timeout: float) -> float | None:
        """Renew once, in `timeout` seconds; when to do it again, or None if there is nothing to keep for now."""
        due = self._keep_on_schedule(timeout)
        self._tell_of_end()
        return due

    def _keep_on_schedule(self, timeout: float) -> float | None:
        if self._resting:
            if self._bystander is not None:  # only now: most rests are over before a renewal would be due
                if not self._is_introduced:  # or nobody would give it up if this process dies while it rests
                    self._tell_of_renewal()
                self._bystander.rest(self.id)
            return None
        if not self._is_introduced and self._renewer.clock() < self._times.renew_at():
            self._tell_of_renewal()
            return self._times.renew_at()
        return self._renew_in(timeout)

    def _renew_in(self, timeout: float) -> float | None:
        sent_at = self._renewer.clock()
        due = None
        try:
            ttl = self._etcd.renew(self.id, timeout=min(timeout, self._times.renewal_timeout(sent_at)))
            self._times = LeaseTimes(sent_at, ttl)
            due = self._times.renew_at()
            self._tell_of_renewal()
        except ClientClosed as error:  # whoever closed it lets the lease expire, and knows
            log.debug("lease %x is left to expire: %s", self.id, error)
            self.kept, self._dropped = False, True
            return None
        except LeaseLost as error:
            log.debug("lease %x: %s", self.id, error)
            self._lost = True
            if self.kept:
                metrics.LEASES_LOST.add()
        except EtcdError as error:
            log.debug("lease %x was not renewed: %s", self.id, error)
            due = self._times.renew_at(self._renewer.clock())
        if not self.kept:  # its owner stopped it meanwhile
            return None
        if self._lost:
            self.kept, self._dropped = False, True
        self._report()
        return due

    def _tell_of_renewal(self) -> None:
        self._is_introduced = True
        if self._bystander is not None:
            times = self._times
            self._bystander.keep(self.id, times.ttl, times.sent_at)  # this may have been stopped since the answer

    def fail(self, failure: BaseException) -> None:
        """Count as lost: an error that nobody foresaw ended the thread while it renewed this lease, or told of it.

        The lease expires in etcd, because it is not renewed any longer, so its owner must not rely on it.
        """
        if not self.kept and not self._lost:
            return
        log.error("lease %x is not renewed any longer, and counts as lost: %r", self.id, failure)
        self.kept, self._lost = False, True
        metrics.LEASES_LOST.add()
        self._drop()
        self._report()

    def _report(self) -> None:
        state = self.state
        if state is not self._reported:
            self._reported = state
            if self._listener is not None:
                self._listener(state)


metrics.LEASES_KEPT.look = lambda: len(Renewer.of_process().times_left())
metrics.LEASE_LEFT.look = lambda: min(Renewer.of_process().times_left(), default=math.nan)
metrics.LEASE_SHARE.look = lambda: min(Renewer.of_process().shares_left(), default=math.nan)
