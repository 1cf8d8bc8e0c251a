"""Notices when etcd's history changes: another cluster behind the same name, or one that lost writes."""

from __future__ import annotations

import logging
from typing import Any

from ftcoord import concurrency

log = logging.getLogger(__name__)


class RollbackDetector:
    """What one client knows about its etcd. Thread-safe.

    It only logs. No decision depends on it: every effect is guarded by revisions, and numbers continue from the highest
    that a live member knows.
    """

    def __init__(self) -> None:
        # Written with the lock held. Read without it: a stale value only costs a look with the lock held.
        self._lock = concurrency.lock("RollbackDetector._lock")
        self._cluster = 0  # its id; 0 before the first answer
        self._revision = 0

    @property
    def revision(self) -> int:
        """The highest revision of a linearizable answer: no later request gets a lower one."""
        return self._revision

    def note(self, header: Any, known: int | None, where: str) -> None:
        """Note an answer's header.

        Args:
            known: `revision` before a linearizable call was made; None for others, which may lag.
            where: the member that answered.
        """
        if not header.cluster_id:  # of the grpc-proxy of etcd 3.5.1, for leases
            return
        if header.cluster_id == self._cluster and (known is None or known <= header.revision == self._revision):
            return
        with self._lock:
            before, self._cluster = self._cluster, header.cluster_id
            if before not in (0, header.cluster_id):
                self._revision = 0
                log.error(
                    "etcd at %s belongs to another cluster (%x) than before (%x): check the endpoints; what the old one"
                    " held is not there",
                    where,
                    header.cluster_id,
                    before,
                )
            elif known is not None and header.revision < known <= self._revision:
                self._revision = header.revision
                log.error(
                    "etcd at %s is at revision %d and was at %d before: its data was lost, or restored from a backup",
                    where,
                    header.revision,
                    known,
                )
            elif known is not None:
                self._revision = max(self._revision, header.revision)
