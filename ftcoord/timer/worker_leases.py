"""Keeps the leases of workers that hold timers: a worker that is stuck in C code cannot renew its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from torch.distributed.elastic.timer import TimerRequest

from ftcoord.core.lease import RENEW_AFTER
from ftcoord.core.timer_records import Worker
from ftcoord.core.timers import Entry
from ftcoord.errors import LeaseLost
from ftcoord.etcd.api import Etcd, Lease
from ftcoord.primitives.renewal import KeptLease, Renewer
from ftcoord.timer.process import lives
from ftcoord.timer.requests import EtcdTimerRequest

KEEP_LEASE_AFTER: Final = 1 / 4
"""The part of a lease's TTL for which a timer must have run: short scopes cost no renewals."""


class _WhileItLives:
    """Renews a worker's lease as long as its process exists, stopped or not."""

    def __init__(self, etcd: Etcd, worker: Worker) -> None:
        self._etcd, self._worker = etcd, worker

    def renew(self, lease_id: int, *, timeout: float | None = None) -> int:
        if not lives(self._worker):
            raise LeaseLost(f"worker {self._worker.pid} has ended, and its timers with it")
        return self._etcd.renew(lease_id, timeout=timeout)


class WorkerLeases:
    """The leases that this server keeps alive. Not thread-safe."""

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd
        self._kept: dict[int, KeptLease] = {}  # only the watchdog's thread, and `close()` when that has ended

    def keep(self, entries: Iterable[Entry[TimerRequest]], now: float) -> None:
        """Keep the leases of these timers alive, and no others."""
        wanted: dict[int, Worker] = {}
        for entry in entries:
            request = entry.item
            if (
                isinstance(request, EtcdTimerRequest)
                and now - entry.since >= request.timer.worker.ttl * KEEP_LEASE_AFTER
            ):
                wanted[request.kv.lease] = request.timer.worker
        for lease in self._kept.keys() - wanted.keys():
            self._kept.pop(lease).stop()
        for lease in wanted.keys() - self._kept.keys():
            ttl = wanted[lease].ttl
            begin = Renewer.of_process().clock() - ttl * RENEW_AFTER  # so that it is renewed at once
            self._kept[lease] = KeptLease(_WhileItLives(self._etcd, wanted[lease]), Lease(lease, ttl), begin)

    def close(self) -> None:
        """Keep no lease alive. Idempotent."""
        self.keep((), 0.0)
