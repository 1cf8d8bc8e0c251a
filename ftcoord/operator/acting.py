"""What operators do to jobs. Each is one guarded transaction, or says what it found in its place."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from ftcoord import concurrency
from ftcoord.core import rendezvous_records
from ftcoord.core.death_records import REMEMBERED_FOR, Death, encode
from ftcoord.core.event_records import HISTORY_TTL, HistoryEvent
from ftcoord.core.event_records import encode as encode_event
from ftcoord.core.layout import (
    Span,
    death_key,
    decided_key,
    event_key,
    events_span,
    heartbeats_span,
    is_member_key,
    members_span,
    quorum_prefix,
    recipe_spans,
    run_prefix,
    run_span,
    spans_but_history,
    timers_span,
)
from ftcoord.core.rendezvous_records import AnyRound, JoinRequest, parse_decided
from ftcoord.etcd.api import Compare, Delete, EtcdCalls, Get, Op, Put, RangeResult
from ftcoord.etcd.reading import SnapshotReader, read_snapshot
from ftcoord.operator.leftovers import JobRemains
from ftcoord.operator.listing import job_ids
from ftcoord.operator.naming import NamedMember
from ftcoord.rendezvous.record_change import RecordChange, change_record, draining, ending

CLOSED_TTL: Final = 3600
"""Seconds that the record of a run lives that never had one: what agents give a run by default."""


def ordered(etcd: EtcdCalls, prefix: str, what: str, target: str, by: str) -> list[Op]:
    """What adds to a transaction that somebody did this by hand, under a history's lease; nothing where there is no
    history, or etcd takes none.

    Args:
        prefix: of the group whose history it is.
        what: in one line, with the target's name and the reason.
        target: whom it is about: a node, or a replica; empty for all.
        by: who did it.
    """
    newest = etcd.range(Get(events_span(prefix), limit=1, keys_only=True, order="newest")).one
    if newest is None or not newest.lease:
        return []
    event = HistoryEvent("ordered", 0, target, "", what, by=by, wall_ms=int(concurrency.wall() * 1000))
    return [Put(event_key(prefix, newest.mod_revision, uuid.uuid4().hex, 0), encode_event(event), newest.lease)]


def evict(etcd: EtcdCalls, member: NamedMember, cause: str, by: str) -> bool:
    """End a member's lease, after the others can read why; whether it was still there. Raises EtcdError.

    The cause comes first: without it, the others would give the member time to come back to its seat.
    """
    grave = etcd.grant(REMEMBERED_FOR)
    death = Put(death_key(member.prefix, member.id), encode(Death(cause, int(concurrency.wall() * 1000))), grave.id)
    is_there = Compare(member.kv.key, "lease", "=", member.kv.lease)
    told = ordered(etcd, member.prefix, f"{member.host or member.owner}: {cause}", member.host or member.owner, by)
    if not etcd.txn([is_there], [death, *told]).succeeded:
        etcd.revoke(grave.id)
        return False
    etcd.revoke(member.kv.lease)
    return True


def close_run(etcd: EtcdCalls, prefix: str, reason: str, by: str, timeout: float) -> str:
    """End a run by hand, within `timeout` seconds for each request; why it was over already, or empty.

    Its history says `by` whom.

    Raises StateError, if the record is not ftcoord's, and EtcdError.
    """
    over = ""

    def end(now: AnyRound) -> RecordChange | None:
        nonlocal over
        over = now.closed
        return ending(prefix, now, reason, rendezvous_records.CLOSED, speaks=True, by=by)

    history_ttl = HISTORY_TTL if _keeps_history(etcd, prefix, timeout) else 0
    change_record(etcd, prefix, CLOSED_TTL, history_ttl, end, timeout)
    return over


def drain_nodes(
    etcd: EtcdCalls, prefix: str, leavers: Callable[[], Sequence[JoinRequest]], reason: str, by: str, timeout: float
) -> bool:
    """Have nodes leave a run, within `timeout` seconds for each request; whether that was news to it, and it
    has a record to say it in.

    They and the others hear of it at once: with the record.

    Args:
        leavers: finds what the members of these nodes ask, and raises to leave them alone. It is asked anew whenever
            the record has changed: another operator may have drained a node meanwhile, so that too few would stay.
        reason: what is said of each, behind the name of its host. The history says `by` whom.

    Raises StateError, if the record is not ftcoord's, EtcdError, and what `leavers` raises.
    """
    found: RecordChange | None = None

    def change(now: AnyRound) -> RecordChange | None:
        nonlocal found
        found = draining(now, leavers(), reason, by=by)
        return found

    history_ttl = HISTORY_TTL if _keeps_history(etcd, prefix, timeout) else 0
    change_record(etcd, prefix, CLOSED_TTL, history_ttl, change, timeout)
    return found is not None


def _keeps_history(etcd: EtcdCalls, prefix: str, timeout: float) -> bool:
    """Whether a run keeps a history: one that has had a round and wrote none (history_ttl=0) gets none by being closed.

    Raises StateError and EtcdError.
    """
    if etcd.range(Get(events_span(prefix), count_only=True), timeout=timeout).count:
        return True
    decided = etcd.range(Get(Span(decided_key(prefix))), timeout=timeout).one
    return decided is None or parse_decided(decided.key, decided.value).number == 0


def remains_of_all(etcd: EtcdCalls, key_prefix: str) -> Iterator[JobRemains]:
    """What all jobs below a key prefix have, a few requests for each; but not those of which only the history is left,
    which expires. Raises EtcdError."""
    for job in job_ids(etcd, key_prefix):
        remains = read_snapshot(etcd.range, partial(_remains_of, key_prefix, job))
        if remains.keys:
            yield remains


def _remains_of(key_prefix: str, job: str, then: SnapshotReader) -> JobRemains:
    prefix, quorum = run_prefix(key_prefix, job), quorum_prefix(key_prefix, job)
    decided = then.range(Get(Span(decided_key(prefix)))).one
    has_quorum = then.range(Get(Span(decided_key(quorum)), count_only=True)).count > 0
    keys = sum(found.count for found in then.ranges(Get(one, count_only=True) for one in spans_but_history(prefix)))
    counted = (members_span(prefix), members_span(quorum), timers_span(prefix), heartbeats_span(prefix))
    live = sum(found.count for found in then.ranges(Get(span, count_only=True) for span in counted))
    recipes = (Get(span, keys_only=True) for span in recipe_spans(prefix))
    live += sum(_members_in(found) for found in then.ranges(recipes))
    return JobRemains(job, then.revision, decided, has_quorum, live, keys)


def remove(etcd: EtcdCalls, key_prefix: str, remains: JobRemains, by: str) -> bool:
    """Delete all keys of a job but its history, unless anybody has written one since it was looked at; whether they are
    deleted.

    Raises EtcdError.
    """
    prefix = run_prefix(key_prefix, remains.job)
    span = run_span(prefix)
    unchanged = Compare(span.start, "mod", "<", remains.revision + 1, span.end)
    told = ordered(etcd, prefix, f"its keys were deleted by {by}: {remains.keys} of them", "", by)
    return etcd.txn([unchanged], [*(Delete(part) for part in spans_but_history(prefix)), *told]).succeeded


def _members_in(found: RangeResult) -> int:
    return sum(is_member_key(kv.key) for kv in found.kvs)
