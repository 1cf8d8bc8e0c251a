"""Reads why the processes that held leases died, as their sentinels reported."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from ftcoord.core.death_records import KnownCause, causes_in
from ftcoord.core.layout import Span, death_key, member_id
from ftcoord.etcd.api import Etcd, read_snapshot


def cause_of_death(etcd: Etcd, deaths: str, lease_id: int) -> str:
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


def causes_of(etcd: Etcd, prefix: str, members: Iterable[str], *, timeout: float | None = None) -> dict[str, str]:
    """The known causes of death, by member id; none of who left in order. Raises EtcdError.

    Costs one request, unless very many processes died within an hour. `timeout` is in seconds, for each request.
    """
    found = causes_known(etcd, prefix, members, timeout=timeout)
    return {member: known.cause for member, known in found.items() if not known.left}


def causes_known(
    etcd: Etcd, prefix: str, members: Iterable[str], *, timeout: float | None = None
) -> dict[str, KnownCause]:
    """As `causes_of`, with who left in order, and why."""
    wanted = {*members}
    if not wanted:
        return {}
    first, last = death_key(prefix, min(wanted)), death_key(prefix, max(wanted))
    span = Span(first) if first == last else Span(first, stop=f"{last}\0")
    kvs = read_snapshot(partial(etcd.range, timeout=timeout), lambda then: then.pages(span))
    found = causes_in((kv.key, kv.value, kv.create_revision) for kv in kvs)
    return {member: known for member, known in found.items() if member in wanted}
