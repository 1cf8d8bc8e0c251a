"""The keeping of leases: what a process knows of each of its own, the thread that renews them, and sessions.

A `KeptLease` is a lease and what is known of it, renewed by the `Renewer`, one thread for the whole process. A
`Session` has one that lives until its owner ends it, forgets it, or dies.
"""

from __future__ import annotations

import enum
import logging
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final, TypeAlias

from ftcoord import concurrency
from ftcoord.closing import Closing
from ftcoord.config import lease_seconds
from ftcoord.core.lease import RENEW_AFTER, LeaseTimes, SessionState
from ftcoord.errors import ClientClosed, EtcdError, LeaseLost, ThreadNotStarted
from ftcoord.etcd.api import Etcd, Lease
from ftcoord.fork import OwnerProcess
from ftcoord.metrics import process as metrics
from ftcoord.primitives.sentinel import SentinelFor

log = logging.getLogger(__name__)

SHORTEST_RENEWAL_TIMEOUT: Final = 0.25
"""Seconds that a renewal may take even if many others wait behind it."""
INTRODUCED_AFTER: Final = 0.5
"""Seconds after which a sentinel is started for a lease, unless `KeptLease.introduce` is called before. That costs a
tenth of a second of a processor, which a round that forms just then, and a session that ends soon, need not pay for."""
GIVE_BACK_TIMEOUT: Final = 2.0
"""Seconds that etcd may take to revoke a lease that nobody has any longer; after that it expires."""

Listener: TypeAlias = Callable[[SessionState], None]


# -- one lease --------------------------------------------------------------------------------------------------------


class _Phase(enum.Enum):
    """What becomes of a kept lease: from KEPT to ENDING or ENDED, from ENDING to ENDED, and from any to LOST."""

    KEPT = "is renewed on schedule, unless it rests"
    ENDING = "is about to be revoked: the sentinel revokes it if this process dies before that is done"
    ENDED = "is given up: it expires by itself"
    LOST = "is gone"


class KeptLease:
    """A lease that the process's thread renews until `stop()`.

    Args:
        etcd: renews it.
        lease: the lease.
        sent_at: when its grant or last renewal was sent, in monotonic seconds.
        listener: called on the renewer's thread at each change of state; must not block.
        renewer: the process's own if None.
        sentinel: renews the lease while this process is stuck, and revokes it when this process dies; None for none.
        rests: whether it is not renewed until `resume()`, but by whoever calls `renew`.

    Raises ThreadNotStarted. Its methods may be called from any thread.
    """

    def __init__(
        self,
        etcd: Etcd,
        lease: Lease,
        sent_at: float,
        listener: Listener | None = None,
        renewer: Renewer | None = None,
        sentinel: SentinelFor | None = None,
        *,
        rests: bool = False,
    ) -> None:
        self.id, self._etcd, self._listener, self._sentinel = lease.id, etcd, listener, sentinel  # never change
        self._renewer = renewer or Renewer.of_process()  # the same
        # Replaced as a whole, by whoever renews. If an older one wins, the lease is trusted for less time.
        self.times = LeaseTimes(sent_at, lease.ttl)
        self._phase = _Phase.KEPT  # changes with Renewer._wake held; read by any thread
        self.rests = rests  # any thread, without a lock: only its owner changes it
        # Only the renewer's thread:
        self._reported = SessionState.CONNECTED  # the listener's last state
        self._is_introduced = sentinel is None
        due = self.times.renew_at()
        if sentinel is not None:
            sentinel.keep(self.id, lease.ttl, sent_at, starts=False)
            due = min(due, sent_at + INTRODUCED_AFTER)
        self._renewer.schedule(self, due)

    @property
    def kept(self) -> bool:
        """Whether it is renewed, or would be after a rest."""
        return self._phase is _Phase.KEPT

    @property
    def state(self) -> SessionState:
        """What is known of it: true at any moment, also where it was not renewed for a while.

        On a host that was suspended, from the next renewal on: its clock stood still.
        """
        return SessionState.LOST if self._phase is _Phase.LOST else self.times.state(concurrency.now())

    @property
    def time_left(self) -> float:
        """Seconds that it lives at the least, if it was not revoked."""
        return max(self.times.sent_at + self.times.ttl - concurrency.now(), 0.0)

    def renew(self, timeout: float) -> None:
        """Renew it once, within `timeout` seconds. Raises LeaseLost when it is gone, and EtcdError."""
        sent_at = concurrency.now()
        self.times = LeaseTimes(sent_at, self._etcd.renew(self.id, timeout=timeout))

    def resume(self) -> None:
        """Renew again after it has rested: at once, unless the last renewal was just before."""
        self.rests = False
        now = concurrency.now()
        due = self.times.resume_at(now)
        self._renewer.schedule(self, due, hasten=due <= now)

    def introduce(self) -> None:
        """Have the sentinel know of the lease now, for an owner that leaves others behind if its process dies."""
        self._report(renewal=True)

    def give_up(self, timeout: float | None) -> None:
        """Revoke it; the sentinel stands by until that is over, for this process may be killed meanwhile.

        Raises EtcdError; the lease then expires.
        """
        self._renewer.move(self, _Phase.ENDING, _Phase.KEPT)
        self._report()
        try:
            if self.state is not SessionState.LOST:
                self._etcd.revoke(self.id, timeout=timeout)
                self._renewer.move(self, _Phase.LOST, *_Phase)
        finally:
            self.stop()

    def stop(self) -> None:
        """Stop renewing for good; the lease expires after its TTL."""
        self._renewer.move(self, _Phase.ENDED, _Phase.KEPT, _Phase.ENDING)
        self._report()

    def _report(self, *, renewal: bool = False) -> None:
        """Have the sentinel know of a renewal, or of the end: of that also after each renewal, which may have been
        under way when the owner ended the lease."""
        if self._sentinel is None:
            return
        if renewal:
            self._sentinel.keep(self.id, self.times.ttl, self.times.sent_at)
        if self._phase in (_Phase.ENDED, _Phase.LOST):
            self._sentinel.drop(self.id)
        elif self._phase is _Phase.ENDING or (renewal and self.rests):
            self._sentinel.rest(self.id)

    # -- the renewer's thread -----------------------------------------------------------------------------------

    def renew_on_schedule(self, timeout: float) -> float | None:
        """Renew once, in `timeout` seconds; when to do it again, or None if there is nothing to keep for now."""
        due = self._renew_unless_resting(timeout)
        self._report()
        return due

    def _renew_unless_resting(self, timeout: float) -> float | None:
        is_early = not self._is_introduced and concurrency.now() < self.times.renew_at()
        if not (self.rests or is_early):
            return self._try_to_renew(timeout)
        if not self._is_introduced:  # or nobody would give it up if this process dies
            self._is_introduced = True
            self._report(renewal=True)
        elif self._sentinel is not None:  # only now: most rests are over before a renewal would be due
            self._sentinel.rest(self.id)
        return None if self.rests else self.times.renew_at()

    def _try_to_renew(self, timeout: float) -> float | None:
        try:
            self.renew(min(timeout, self.times.renewal_timeout(concurrency.now())))
            due = self.times.renew_at()
            self._is_introduced = True
            self._report(renewal=True)
        except ClientClosed as error:  # whoever closed it lets the lease expire, and knows
            log.debug("lease %x is left to expire: %s", self.id, error)
            self._renewer.move(self, _Phase.ENDED, _Phase.KEPT)
            return None
        except LeaseLost as error:
            log.debug("lease %x: %s", self.id, error)
            self._note_loss(is_wanted=self.kept)
            return None
        except EtcdError as error:
            log.debug("lease %x was not renewed: %s", self.id, error)
            due = self.times.renew_at(concurrency.now())
        if self.kept:  # else its owner stopped it meanwhile
            self._report_state()
        return due

    def _note_loss(self, is_wanted: bool) -> None:
        self._renewer.move(self, _Phase.LOST, *_Phase)
        if is_wanted:
            metrics.LEASES_LOST.add()
            self._report()
            self._report_state()

    def fail(self, failure: BaseException) -> None:
        """Count as lost: an error that nobody foresaw ended the thread while it renewed this lease, or reported it.

        The lease expires in etcd, because it is not renewed any longer, so its owner must not rely on it.
        """
        if self.kept or self._phase is _Phase.LOST:
            log.error("lease %x is not renewed any longer, and counts as lost: %r", self.id, failure)
            self._note_loss(is_wanted=True)

    def _report_state(self) -> None:
        state = self.state
        if state is not self._reported:
            self._reported = state
            if self._listener is not None:
                self._listener(state)


# -- the thread that renews -------------------------------------------------------------------------------------------


class Renewer:
    """The thread that keeps the leases of this process alive. `Renewer.of_process()` is the one to use.

    Thread-safe. The thread runs while there is a lease to keep.
    """

    def __init__(self) -> None:
        # Guards all below, and the phases of leases. Never held during a renewal or while a listener runs.
        self._wake = concurrency.condition("Renewer._wake")
        self._due: dict[KeptLease, float] = {}  # when each is to be renewed, but for the one that is renewed just now
        self._thread: concurrency.Thread | None = None
        self._renewing: KeptLease | None = None

    @classmethod
    def of_process(cls) -> Renewer:
        """The renewer of this process; a forked child gets its own, since it has none of the parent's threads."""
        return concurrency.of_process(cls)

    def leases(self) -> list[KeptLease]:
        """Those that are kept alive here."""
        with self._wake:
            return [*self._due, *([self._renewing] if self._renewing is not None else [])]

    def schedule(self, lease: KeptLease, due: float, *, hasten: bool = False) -> None:
        """Have `lease` renewed at `due`, unless it was stopped. A lease that is scheduled already keeps its time,
        unless `hasten` is given. Raises ThreadNotStarted; nothing is scheduled then."""
        with self._wake:
            if not lease.kept or (lease in self._due and not hasten):
                return
            self._due[lease] = due
            try:
                self._start()
            except ThreadNotStarted:
                del self._due[lease]  # or the next thread would keep it alive for nobody
                raise
            if due <= min(self._due.values()):  # waking the thread costs more than all the rest of this
                self._wake.notify()

    def move(self, lease: KeptLease, to: _Phase, *since: _Phase) -> None:
        """Change the phase of a lease if it is one of these. One that is kept no longer is not renewed any more; a
        renewal under way is its last."""
        with self._wake:
            if lease._phase in since:
                lease._phase = to
            if not lease.kept and self._due.pop(lease, None) is not None:
                self._wake.notify()

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
                wait = min(self._due.values()) - concurrency.now()
                if wait <= 0:
                    lease = self._renewing = min(self._due, key=self._due.__getitem__)
                    del self._due[lease]
                    return lease
                self._wake.wait(wait)
            return None

    def _timeout_of(self, lease: KeptLease) -> float:
        """Seconds that a renewal may take: an etcd that hangs must not cost the leases behind it theirs."""
        with self._wake:
            whole = min(one.times.ttl for one in (lease, *self._due)) * RENEW_AFTER
            waiting = sum(due <= concurrency.now() for due in self._due.values())
        return max(whole / (1 + waiting), min(whole, SHORTEST_RENEWAL_TIMEOUT))


metrics.LEASES_KEPT.look = lambda: len(Renewer.of_process().leases())
metrics.LEASE_LEFT.look = lambda: min((one.time_left for one in Renewer.of_process().leases()), default=math.nan)
metrics.LEASE_SHARE.look = lambda: min(
    (one.time_left / one.times.ttl for one in Renewer.of_process().leases()), default=math.nan
)


# -- sessions ---------------------------------------------------------------------------------------------------------


class Session(Closing):
    """A lease that this process keeps alive until `close()`. Keys attached to it are deleted with it. Thread-safe.

    A session that nobody refers to is closed.

    Args:
        etcd: the etcd client.
        ttl: the TTL to ask for, in whole seconds from 1 to 86400. `Session.ttl` is what etcd granted: at least 2 s on
            default settings.
        listener: called with each new state, on the keep-alive thread: see `state`. It must not block. If it raises,
            the session is LOST.
        deaths: a prefix of keys. If given, a process beside this one, the sentinel, also renews the lease while this
            interpreter is stuck. When this process dies, the sentinel writes the cause below that prefix, where
            `cause_of_death` finds it, and revokes the lease at once. If no sentinel can be started, or
            FTCOORD_SENTINEL=0 is set, the lease expires instead.
        was: the ids of members that the owner was under leases that it has lost. Others may know it by one of them, so
            the cause is written under these too.
        timeout: seconds that the grant may take; the client's default if None.

    Raises:
        ConfigError: `ttl` is no such number; nothing was sent.
        EtcdError: no lease was granted within `timeout`.
        ThreadNotStarted: no thread can be started to renew the lease, which was then revoked.
        ForkedProcessError: the client belongs to a parent process.

    Not promised: that nobody else believes at the same moment that the lease is alive, or dead. Put the check into the
    transaction that has the effect.
    """

    def __init__(
        self,
        etcd: Etcd,
        ttl: int,
        listener: Listener | None = None,
        *,
        deaths: str | None = None,
        was: Sequence[str] = (),
        timeout: float | None = None,
    ) -> None:
        ttl = lease_seconds("ttl", ttl)
        self._owner = OwnerProcess("this session's lease belongs to the parent process")
        self._closed = False  # any thread; becomes True once
        sent_at = concurrency.now()
        lease = etcd.grant(ttl, timeout=timeout)
        self.ttl = lease.ttl
        with ExitStack() as undo:
            undo.callback(_give_back, partial(etcd.revoke, lease.id))  # where no thread can be started
            sentinel = None if deaths is None else SentinelFor.of(etcd.config, deaths, was)
            self._kept = KeptLease(etcd, lease, sent_at, listener, sentinel=sentinel)
            undo.pop_all()
        # In the listener may be whoever has this session: then the renewer keeps both, until that one ends it.
        self._cancel_finalizer = concurrency.when_forgotten(self, _give_back, self._kept.give_up, last=True)

    @property
    def lease_id(self) -> int:
        """The lease to attach keys to. Raises ForkedProcessError in a child that was forked later."""
        self._owner.check()
        return self._kept.id

    @property
    def state(self) -> SessionState:
        """What is known of the lease. Costs no request.

        CONNECTED: the lease is alive. SUSPENDED: it was not renewed in time, so it may have expired; do not rely on it,
        but keep the session: it may become CONNECTED again. LOST: the lease and its keys are gone; this is final, so
        make a new session.
        """
        return self._kept.state

    @property
    def rests(self) -> bool:
        """Whether renewal is paused, see `rest()`."""
        return self._kept.rests

    def rest(self) -> None:
        """Pause renewal. The keys live until the TTL is over, unless `wake()` is called before."""
        self._kept.rests = True

    def wake(self) -> None:
        """Resume renewal after `rest()`. Does nothing in a forked child."""
        if not self._closed and self._owner.is_current:
            self._kept.resume()

    def renew(self, timeout: float) -> None:
        """Renew once now, within `timeout` seconds. Raises LeaseLost when the lease is gone, and EtcdError."""
        self._kept.renew(timeout)

    def introduce(self) -> None:
        """Have the sentinel know of this lease now, instead of half a second after the grant. Does nothing without
        `deaths`, and in a forked child."""
        if not self._closed and self._owner.is_current:
            self._kept.introduce()

    def orphan(self) -> None:
        """Stop renewing, without revoking: the keys live until the TTL is over.

        Idempotent; does nothing in a forked child.
        """
        if not self._owner.is_current:  # the renewer's lock may be held there forever
            return
        self._closed = True
        self._cancel_finalizer()
        self._kept.stop()

    def close(self, timeout: float | None = None) -> None:
        """Revoke the lease, which deletes its keys. Idempotent; does nothing in a forked child.

        Waits `timeout` seconds for etcd; None stands for the client's default (5 s). Raises EtcdError when etcd does
        not answer in time or refuses; the lease then expires.
        """
        if self._closed or not self._owner.is_current:
            return
        self._closed = True
        self._cancel_finalizer()
        self._kept.give_up(timeout)


def _give_back(revoke: Callable[..., None]) -> None:
    """Of a lease that nobody has any longer."""
    try:
        revoke(timeout=GIVE_BACK_TIMEOUT)
    except EtcdError as error:
        log.debug("a lease was not revoked, it expires by itself: %s", error)
