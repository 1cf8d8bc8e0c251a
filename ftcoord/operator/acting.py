"""Operators' orders to jobs. Each is one guarded transaction, or reports what it found instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ftcoord import concurrency
from ftcoord.core import rendezvous_records
from ftcoord.core.death_records import REMEMBERED_FOR, Death, encode
from ftcoord.core.layout import (
    death_key,
)
from ftcoord.core.rendezvous import why_not_drained
from ftcoord.core.rendezvous_records import AnyRound, JoinRequest
from ftcoord.errors import EtcdError, OutcomeUnknown
from ftcoord.etcd.api import Compare, EtcdCalls, Put
from ftcoord.etcd.retry import TimeLimit
from ftcoord.operator.naming import NamedMember
from ftcoord.primitives.group.events import ordered
from ftcoord.rendezvous.record_change import RecordChange, change_record, draining, ending

CLOSED_TTL: Final = 3600
"""Seconds that the record of a run that never had one lives: the agents' default."""


def evict(etcd: EtcdCalls, member: NamedMember, cause: str, by: str) -> bool:
    """Revoke a member's lease, after writing why; returns whether it was still there.

    `cause` is what is said of the member, such as `evicted by ann@desk: it smells`.

    Raises EtcdError; OutcomeUnknown if the cause is written and the lease may live. It may be called again.

    The cause is written first: without it, the others would give the member time to come back to its seat.
    """
    grave, who = etcd.grant(REMEMBERED_FOR), member.host or member.owner
    cause = f"{who} was {cause}"
    death = Put(death_key(member.prefix, member.id), encode(Death(cause, int(concurrency.wall() * 1000))), grave.id)
    is_there = Compare(member.kv.key, "lease", "=", member.kv.lease)
    told = ordered(etcd, member.prefix, cause, target=who, by=by)
    if not etcd.txn([is_there], [death, *told]).succeeded:
        etcd.revoke(grave.id)
        return False
    try:
        etcd.revoke(member.kv.lease)
    except EtcdError as error:
        raise OutcomeUnknown(
            f"{member} is said to be evicted, but its lease may still live: evict it again: {error}"
        ) from None
    return True


def close_run(etcd: EtcdCalls, prefix: str, reason: str, by: str, timeout: float) -> str:
    """End a run by hand, within `timeout` seconds for each request; returns why it was already over, or an empty text.

    Its history records `by` whom. Raises StateError if the record is not ftcoord's, and EtcdError.
    """
    over = ""

    def end(now: AnyRound) -> RecordChange | None:
        nonlocal over
        over = now.closed
        return ending(prefix, now, reason, rendezvous_records.CLOSED, speaks=True)

    change_record(etcd, prefix, CLOSED_TTL, end, by=by, within=TimeLimit(timeout))
    return over


def drain_nodes(
    etcd: EtcdCalls, prefix: str, leavers: Callable[[], Sequence[JoinRequest]], reason: str, by: str, timeout: float
) -> str:
    """Have nodes leave a run, within `timeout` seconds for each request. Returns why they were not drained: empty if
    they were.

    They and the others learn of it at once, with the record.

    Args:
        leavers: returns the requests of these nodes' members, or raises to leave them alone. It is called again
            whenever the record has changed: another operator may have drained a node meanwhile, so that too few would
            stay.
        reason: what is written about each, after the name of its host. The history records `by` whom.

    Raises StateError if the record is not ftcoord's, EtcdError, and what `leavers` raises.
    """
    why = ""

    def change(now: AnyRound) -> RecordChange | None:
        nonlocal why
        why = why_not_drained(now, asks := leavers())
        return draining(now, asks, reason)

    change_record(etcd, prefix, CLOSED_TTL, change, by=by, within=TimeLimit(timeout))
    return why
