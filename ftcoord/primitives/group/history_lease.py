"""The lease that a job's history is attached to."""

from __future__ import annotations

import logging
from typing import Final

from ftcoord import concurrency
from ftcoord.errors import EtcdError, LeaseLost
from ftcoord.etcd.api import EtcdCalls, Lease
from ftcoord.primitives.renewal import KeptLease

log = logging.getLogger(__name__)

CALL_TIMEOUT: Final = 1.0
"""Seconds that a call for the history alone may take."""


class HistoryLease:
    """The one lease that all of a history is attached to. Not thread-safe.

    The decider keeps it alive. It takes over the existing lease, and grants one only if there is none, or its TTL is
    too short.

    Args:
        etcd: the etcd client.
        ttl: seconds that the history outlives its last decider.
        keeps: whether to keep the lease alive until `drop()`, as a decider does.
    """

    def __init__(self, etcd: EtcdCalls, ttl: int, *, keeps: bool) -> None:
        self._etcd, self._ttl, self._keeps = etcd, ttl, keeps
        self.id = 0
        """0 while no lease is known."""
        self._kept: KeptLease | None = None
        self._is_unused = False
        """Whether this has granted the lease, and nothing has been written under it yet."""

    @property
    def is_lost(self) -> bool:
        """Whether it was kept alive, and no longer is."""
        return self._kept is not None and not self._kept.kept

    def adopt(self, lease: int, timeout: float) -> None:
        """Continue with the lease that others have used, if its TTL is long enough. Raises EtcdError."""
        now = concurrency.now()
        try:
            ttl = self._etcd.renew(lease, timeout=timeout)
        except LeaseLost:
            return
        if ttl >= self._ttl:
            self._use(Lease(lease, ttl), now)

    def grant(self) -> None:
        """Grant a new lease. Raises EtcdError."""
        now, lease = concurrency.now(), self._etcd.grant(self._ttl, timeout=CALL_TIMEOUT)
        self._use(lease, now)
        self._is_unused = True

    def note_used(self) -> None:
        """Note that something is about to be written under it."""
        self._is_unused = False

    def forget(self) -> None:
        """Stop renewing it: it is lost, or useless. Idempotent."""
        if self._kept is not None:
            self._kept.stop()
        self._kept, self.id, self._is_unused = None, 0, False

    def drop(self) -> None:
        """Stop renewing it: another decider does, or it expires. A lease that was never used is revoked. Idempotent."""
        lease, is_unused = self.id, self._is_unused
        self.forget()
        if is_unused:
            try:
                self._etcd.revoke(lease, timeout=CALL_TIMEOUT)
            except EtcdError as error:
                log.debug("the lease of a history that was not written expires by itself: %s", error)

    def _use(self, lease: Lease, now: float) -> None:
        self.id = lease.id
        if self._keeps:
            self._kept = KeptLease(self._etcd, lease, now)
