"""Reads which jobs there are, and a summary of each, at one revision of etcd per job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from ftcoord.core.layout import (
    Span,
    branch_of,
    decided_key,
    decided_span,
    decode_key,
    members_span,
    quorum_prefix,
    run_id_of,
    run_prefix,
    runs_span,
    spans_but_history,
)
from ftcoord.etcd.api import EtcdCalls, Get, RangeResult
from ftcoord.etcd.reading import SnapshotReader, read_snapshot
from ftcoord.operator.summary import JobSummaryKeys, tell_line
from ftcoord.operator.told import FORMAT, JobList


def read_jobs(etcd: EtcdCalls, key_prefix: str) -> JobList:
    """All jobs below a key prefix. Raises EtcdError.

    Costs a few requests for each, however many keys the jobs have: the contents of their stores are skipped.
    """
    lines = [tell_line(key_prefix, job, keys) for job, keys in _summaries(etcd, key_prefix)]
    return JobList(FORMAT, key_prefix, tuple(lines))


def job_ids(etcd: EtcdCalls, key_prefix: str) -> Iterator[str]:
    """The ids of all jobs below a key prefix, as they are found. Raises EtcdError."""
    everything = runs_span(key_prefix)
    rest = everything
    while (found := etcd.range(Get(rest, limit=1, keys_only=True)).one) is not None:
        job = run_id_of(key_prefix, found.key)
        if job is not None:
            yield job
        rest = _behind(branch_of(key_prefix, found.key), everything)


def live_job_ids(etcd: EtcdCalls, key_prefix: str) -> Iterator[str]:
    """The same, without jobs of which only the history is left, which stays for a week. Raises EtcdError."""
    for job in job_ids(etcd, key_prefix):
        spans = spans_but_history(run_prefix(key_prefix, job))
        if any(etcd.range(Get(one, limit=1, keys_only=True)).one for one in spans):
            yield job


def _summaries(etcd: EtcdCalls, key_prefix: str) -> Iterator[tuple[str, JobSummaryKeys]]:
    for job in job_ids(etcd, key_prefix):
        prefix, quorum = run_prefix(key_prefix, job), quorum_prefix(key_prefix, job)
        counted = [Get(members_span(one), count_only=True) for one in (prefix, quorum)]
        gets = [Get(Span(decided_key(prefix))), Get(decided_span(quorum)), *counted]
        decided, of_quorum, nodes, replicas = read_snapshot(etcd.range, partial(_ranges, gets))
        heads = {kv.key: kv for kv in of_quorum.kvs}
        yield job, JobSummaryKeys(decided.one, nodes.count, heads, replicas.count)


def _ranges(gets: Sequence[Get], then: SnapshotReader) -> list[RangeResult]:
    return then.ranges(gets)


def _behind(span: Span, whole: Span) -> Span:
    """The part of a span after another one."""
    start = decode_key(span.end) if span.end else f"{span.start}\0"
    return Span(start, stop=decode_key(whole.end))
