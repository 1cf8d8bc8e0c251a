"""The lease that the decided record is attached to."""

from __future__ import annotations

from ftcoord import concurrency
from ftcoord.etcd.api import Etcd, KeyValue, Lease
from ftcoord.primitives.renewal import KeptLease


class RecordLease:
    """Kept alive by the decider, so that the record lives `ttl` seconds longer than its group.

    Only for the group's thread. Raises EtcdError, and may then be called again.
    """

    def __init__(self, etcd: Etcd, ttl: int) -> None:
        self._etcd, self._ttl = etcd, ttl
        self._kept: KeptLease | None = None

    def keep(self, record: KeyValue | None) -> None:
        """Keep the record's lease alive, if there is one. Costs a request only when it changes."""
        lease_id = record.lease if record else 0
        if self._kept is not None and self._kept.kept and lease_id in (0, self._kept.id):
            return
        self.drop()
        if lease_id:
            now = concurrency.now()
            self._kept = KeptLease(self._etcd, Lease(lease_id, self._etcd.renew(lease_id)), now)

    def for_publishing(self) -> int:
        """The lease to attach the next record to; a new one, if there is none."""
        if self._kept is None or not self._kept.kept:
            now = concurrency.now()
            self._kept = KeptLease(self._etcd, self._etcd.grant(self._ttl), now)
        return self._kept.id

    def drop(self) -> None:
        """Stop renewing it: another decider does, or it expires. Idempotent."""
        if self._kept is not None:
            self._kept.stop()
            self._kept = None
