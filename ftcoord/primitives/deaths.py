"""Reads why the processes that held leases died, as their sentinels reported."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from ftcoord.core.death_records import parse_death
from ftcoord.core.layout import Span, death_key, member_id
from ftcoord.errors import StateError
from ftcoord.etcd.api import EtcdCalls, KeyValue, read_snapshot

log = logging.getLogger(__name__)


def cause_of_death(etcd: EtcdCalls, deaths: str, lease_id: int) -> str:
    """Why the process that held a lease died, in one line; empty if no cause is known.

    A sentinel writes the cause before it revokes the lease, so anyone who has seen a key of the lease vanish can read
    it. etcd keeps it for an hour. There is no cause when a whole host is lost, or when the process left in order.

    Args:
        etcd: the etcd client.
        deaths: the `deaths` prefix that the lease's `ftcoord.Session` was given.
        lease_id: the lease.

    Raises EtcdError. Costs one read, which takes up to the client's default timeout.
    """
    member = member_id(lease_id)
    return causes_of(etcd, deaths, [member]).get(member, "")


def causes_of(etcd: EtcdCalls, prefix: str, members: Iterable[str], *, timeout: float | None = None) -> dict[str, str]:
    """The known causes, by member id. Raises EtcdError.

    Costs one request, unless very many processes died within an hour. `timeout` is in seconds, for each request.
    """
    return {member: known.cause for member, known in causes_known(etcd, prefix, members, timeout=timeout).items()}


class KnownCause(NamedTuple):
    """Why a process died, and etcd's revision at which the cause was first written."""

    cause: str
    revision: int


def causes_known(
    etcd: EtcdCalls, prefix: str, members: Iterable[str], *, timeout: float | None = None
) -> dict[str, KnownCause]:
    """As `causes_of`."""
    wanted = {death_key(prefix, member): member for member in members}
    if not wanted:
        return {}
    first, last = min(wanted), max(wanted)
    span = Span(first) if first == last else Span(first, stop=f"{last}\0")
    found = read_snapshot(partial(etcd.range, timeout=timeout), lambda then: then.pages(span))
    causes = {wanted[kv.key]: KnownCause(_cause(kv), kv.create_revision) for kv in found if kv.key in wanted}
    return {member: known for member, known in causes.items() if known.cause}


def _cause(kv: KeyValue) -> str:
    try:
        return parse_death(kv.key, kv.value).cause
    except StateError as error:  # nothing depends on it but a text
        log.warning("%s", error)
        return ""
