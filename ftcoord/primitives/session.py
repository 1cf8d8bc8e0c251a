"""Sessions: one lease each, which lives until its owner ends it, forgets it, or dies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from ftcoord import concurrency
from ftcoord.closing import Closing
from ftcoord.config import lease_seconds
from ftcoord.core.lease import SessionState
from ftcoord.errors import EtcdError
from ftcoord.etcd.api import Etcd
from ftcoord.fork import OwnerProcess
from ftcoord.primitives.renewal import KeptLease, Listener, Renewer
from ftcoord.primitives.sentinel import SentinelFor

log = logging.getLogger(__name__)

GIVE_BACK_TIMEOUT = 2.0
"""Seconds that etcd may take to revoke a lease that nobody has any longer; after that it expires."""


class Session(Closing):
    """A lease that this process keeps alive until `close()`. Keys attached to it are deleted with it. Thread-safe.

    A session that nobody refers to is closed.

    Args:
        etcd: the etcd client.
        ttl: the TTL to ask for, in whole seconds from 1 to 86400. `Session.ttl` is what etcd granted: at least 2 s on
            default settings.
        listener: called with each new state, on the keep-alive thread: see `state`. It must not block. If it raises,
            the session is LOST.
        renewer: renews the lease; None stands for the one of this process.
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
        renewer: Renewer | None = None,
        *,
        deaths: str | None = None,
        was: Sequence[str] = (),
        timeout: float | None = None,
    ) -> None:
        ttl = lease_seconds("ttl", ttl)
        self._etcd = etcd
        self._owner = OwnerProcess("this session's lease belongs to the parent process")
        self._closed = False  # any thread; becomes True once
        renewer = renewer or Renewer.of_process()
        sent_at = renewer.clock()
        lease = etcd.grant(ttl, timeout=timeout)
        self.ttl = lease.ttl
        with ExitStack() as undo:
            undo.callback(_give_back, etcd, lease.id)  # where no thread can be started
            bystander = None if deaths is None else SentinelFor.of(etcd.config, deaths, was)
            self._kept = KeptLease(etcd, lease, sent_at, listener, renewer, bystander)
            undo.pop_all()
        # In the listener may be whoever has this session: then the renewer keeps both, until that one ends it.
        self._cancel_finalizer = concurrency.when_forgotten(self, _end_forgotten, etcd, self._kept, last=True)

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
        self._kept.rest()

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
        _end(self._kept, lambda: self._etcd.revoke(self._kept.id, timeout=timeout))


def _end(kept: KeptLease, revoke: Callable[[], None]) -> None:
    """Revoke a lease; the sentinel stands by until that is over, for this process may be killed meanwhile."""
    kept.end_renewals()
    try:
        if kept.state is not SessionState.LOST:
            revoke()
            kept.revoked()
    finally:
        kept.stop()


def _end_forgotten(etcd: Etcd, kept: KeptLease) -> None:
    """For a session that nobody refers to any longer."""
    _end(kept, lambda: _give_back(etcd, kept.id))


def _give_back(etcd: Etcd, lease_id: int) -> None:
    try:
        etcd.revoke(lease_id, timeout=GIVE_BACK_TIMEOUT)
    except EtcdError as error:
        log.debug("lease %x was not revoked, it expires by itself: %s", lease_id, error)
