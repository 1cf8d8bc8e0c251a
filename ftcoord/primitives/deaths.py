"""Why the processes that held leases are gone, as their sentinels said."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final

from ftcoord.core.death_records import parse_death
from ftcoord.core.layout import death_key, member_id
from ftcoord.errors import StateError
from ftcoord.etcd.api import EtcdCalls, Get, KeyValue, Span

log = logging.getLogger(__name__)

_READ_AT_ONCE: Final = 100
"""Keys of one request: etcd takes 128 operations."""


def cause_of_death(etcd: EtcdCalls, deaths: str, lease_id: int) -> str:
    """Why the process that held a lease is gone, in one line; empty if nobody has said so.

    A sentinel says it before it revokes the lease, and etcd keeps it for an hour: who has seen that a key under the
    lease is gone finds it. Nobody can say it when a whole host is lost, or when the process took its leave in order.

    Args:
        etcd: the etcd client.
        deaths: the prefix that the lease's `ftcoord.Session` was given.
        lease_id: the lease.

    Raises EtcdError.
    """
    member = member_id(lease_id)
    return causes_of(etcd, deaths, [member]).get(member, "")


def causes_of(etcd: EtcdCalls, prefix: str, members: Iterable[str], *, timeout: float | None = None) -> dict[str, str]:
    """By member id, for those of whom it is known. `timeout` is in seconds, for each request. Raises EtcdError."""
    wanted, causes = list(members), dict[str, str]()
    for at in range(0, len(wanted), _READ_AT_ONCE):
        some = wanted[at : at + _READ_AT_ONCE]
        for member, kv in zip(some, _read(etcd, prefix, some, timeout), strict=True):
            if kv is not None and (cause := _cause(kv)):
                causes[member] = cause
    return causes


def _read(etcd: EtcdCalls, prefix: str, members: Sequence[str], timeout: float | None) -> list[KeyValue | None]:
    result = etcd.txn((), [Get(Span(death_key(prefix, member))) for member in members], timeout=timeout)
    return [result.range(at).one for at in range(len(members))]


def _cause(kv: KeyValue) -> str:
    try:
        return parse_death(kv.key, kv.value).cause
    except StateError as error:  # nothing depends on it but a text
        log.warning("%s", error)
        return ""
