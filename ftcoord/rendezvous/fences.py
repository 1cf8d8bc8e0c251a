"""Which fences of a run's rounds etcd has."""

from __future__ import annotations

from ftcoord.core.layout import number_of, rounds_span
from ftcoord.etcd.api import Etcd, Get


def highest_round(etcd: Etcd, prefix: str, timeout: float | None = None) -> tuple[int, int]:
    """The highest round that has left its fence in etcd, even if the record was deleted; 0 for none. And at which
    revision. Raises EtcdError."""
    found = etcd.range(Get(rounds_span(prefix), keys_only=True), timeout=timeout)
    return max((number_of(kv.key) for kv in found.kvs), default=0), found.revision
