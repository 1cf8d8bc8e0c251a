"""What jobs have left in etcd: counts it and deletes it. Loads no code that acts on live jobs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ftcoord.core.layout import (
    Span,
    decided_key,
    heartbeats_span,
    members_span,
    quorum_prefix,
    recipe_spans,
    run_prefix,
    run_span,
    spans_but_history,
    timers_span,
)
from ftcoord.etcd.api import Compare, Delete, EtcdCalls, Get, is_member
from ftcoord.etcd.reading import SnapshotReader, read_snapshot
from ftcoord.operator.leftovers import JobRemains
from ftcoord.operator.listing import job_ids
from ftcoord.operator.noting import ordered


def remains_of_all(etcd: EtcdCalls, key_prefix: str) -> Iterator[JobRemains]:
    """The remains of all jobs below a key prefix, with a few requests for each; without jobs of which only the history
    is left, which expires. Raises EtcdError."""
    for job in job_ids(etcd, key_prefix):
        remains = read_snapshot(etcd.range, partial(_remains_of, key_prefix, job))
        if remains.keys:
            yield remains


def _remains_of(key_prefix: str, job: str, then: SnapshotReader) -> JobRemains:
    prefix, quorum = run_prefix(key_prefix, job), quorum_prefix(key_prefix, job)
    decided = then.range(Get(Span(decided_key(prefix)))).one
    has_quorum = then.range(Get(Span(decided_key(quorum)), count_only=True)).count > 0
    keys = sum(found.count for found in then.ranges(Get(one, count_only=True) for one in spans_but_history(prefix)))
    counted = (timers_span(prefix), heartbeats_span(prefix))
    live = sum(found.count for found in then.ranges(Get(span, count_only=True) for span in counted))
    groups = (members_span(prefix), members_span(quorum), *recipe_spans(prefix))
    found = then.ranges(Get(span, keys_only=True) for span in groups)
    live += sum(is_member(kv) for one in found for kv in one.kvs)
    return JobRemains(job, then.revision, decided, has_quorum, live, keys)


def remove(etcd: EtcdCalls, key_prefix: str, remains: JobRemains, by: str) -> bool:
    """Delete all keys of a job except its history, unless one was written since it was read; returns whether they were
    deleted.

    Raises EtcdError.
    """
    prefix = run_prefix(key_prefix, remains.job)
    span = run_span(prefix)
    unchanged = Compare(span.start, "mod", "<", remains.revision + 1, span.end)
    told = ordered(etcd, prefix, f"its keys were deleted by {by}: {remains.keys} of them", "", by)
    return etcd.txn([unchanged], [*(Delete(part) for part in spans_but_history(prefix)), *told]).succeeded
