"""The lease that the decided record lies under."""

from __future__ import annotations

from ftcoord import concurrency
from ftcoord.etcd.api import Etcd, KeyValue, Lease
from ftcoord.primitives.session import KeptLease


class RecordLease:
    """Kept alive by the decider, so that the record lives as long as its group, and `ttl` seconds longer.

    The group's turn guards it. Raises EtcdError, and may then be called again.
    """

    def __init__(self, etcd: Etcd, ttl: int) -> None:
        self._etcd, self._ttl = etcd, ttl
        self._kept: KeptLease | None = None

    def keep(self, record: KeyValue | None) -> None:
        """Keep the lease alive that the record lies under, if there is one. Costs a request only when it changes."""
        lease_id = record.lease if record else 0
        if self._kept is not None and self._kept.kept and lease_id in (0, self._kept.id):
            return
        self.drop()
        if lease_id:
            now = concurrency.now()
            self._kept = KeptLease(self._etcd, Lease(lease_id, self._etcd.renew(lease_id)), now)

    def for_publishing(self) -> int:
        """The lease to put the next record under: a new one, if there is none."""
        if self._kept is None or not self._kept.kept:
            now = concurrency.now()
            self._kept = KeptLease(self._etcd, self._etcd.grant(self._ttl), now)
        return self._kept.id

    def drop(self) -> None:
        """Renew it no longer: somebody else does, or it expires. Idempotent."""
        if self._kept is not None:
            self._kept.stop()
            self._kept = None
