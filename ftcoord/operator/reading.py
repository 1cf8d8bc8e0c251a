"""Reads what the status of jobs rests on: each job at one revision of etcd, in pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from ftcoord.core.layout import (
    Span,
    branch_of,
    deaths_span,
    decided_key,
    decided_span,
    decode_key,
    events_span,
    members_span,
    quorum_prefix,
    roll_span,
    roster_key,
    run_id_of,
    run_prefix,
    runs_span,
    spans_but_history,
    timers_span,
)
from ftcoord.etcd.api import EtcdCalls, Get, KeyValue, RangeResult
from ftcoord.etcd.reading import SnapshotReader, read_snapshot
from ftcoord.operator.job_keys import GroupKeys, JobKeys, LeaseTime
from ftcoord.operator.rounds import roll_of
from ftcoord.operator.status import JobSummaryKeys, tell_line
from ftcoord.operator.told import FORMAT, JobList


class ReadsLeases(Protocol):
    """A client that can ask how long leases live."""

    def time_left(self, lease_id: int, *, timeout: float | None = None) -> tuple[int, int]:
        """Whole seconds that a lease has left, and that it was granted; (-1, 0) for one that is gone."""


def read_job(etcd: EtcdCalls, key_prefix: str, job: str, *, with_timers: bool = False) -> JobKeys:
    """A job's keys at one revision, and with `with_timers` those of its expiration timers. Raises EtcdError."""
    return read_snapshot(etcd.range, partial(_read_job, key_prefix, job, with_timers))


def read_events(etcd: EtcdCalls, key_prefix: str, job: str) -> tuple[list[KeyValue], list[KeyValue]]:
    """The keys of the two histories of a job, of its rounds and of its quorums. Raises EtcdError."""
    spans = [events_span(prefix) for prefix in (run_prefix(key_prefix, job), quorum_prefix(key_prefix, job))]
    rounds, quorums = read_snapshot(etcd.range, lambda then: [list(then.pages(span)) for span in spans])
    return rounds, quorums


def read_timers(etcd: EtcdCalls, key_prefix: str, job: str, timeout: float) -> tuple[KeyValue, ...]:
    """The keys of a job's expiration timers, within `timeout` seconds for each thousand. Raises EtcdError."""
    span = timers_span(run_prefix(key_prefix, job))
    return read_snapshot(partial(etcd.range, timeout=timeout), lambda then: tuple(then.pages(span)))


def read_leases(etcd: ReadsLeases, members: Iterable[str]) -> dict[str, LeaseTime]:
    """The leases of members, by member id: one request each. Raises EtcdError."""
    found = ((member, read_lease(etcd, member)) for member in members)
    return {member: lease for member, lease in found if lease is not None}


def read_lease(etcd: ReadsLeases, member: str, timeout: float | None = None) -> LeaseTime | None:
    """The lease of a member; None if it is gone. Raises EtcdError."""
    left, ttl = etcd.time_left(int(member, 16), timeout=timeout)
    return LeaseTime(left, ttl) if left >= 0 else None


def read_jobs(etcd: EtcdCalls, key_prefix: str) -> JobList:
    """All jobs below a key prefix. Raises EtcdError.

    A few requests for each, whatever else the jobs have in etcd: what lies in their stores is jumped over.
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
    """The same without those of which only the history is left, which is there for a week. Raises EtcdError."""
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
    """What comes after a part of a span."""
    start = decode_key(span.end) if span.end else f"{span.start}\0"
    return Span(start, stop=decode_key(whole.end))


def _read_job(key_prefix: str, job: str, with_timers: bool, then: SnapshotReader) -> JobKeys:
    prefix, quorum = run_prefix(key_prefix, job), quorum_prefix(key_prefix, job)
    decided = then.range(Get(Span(decided_key(prefix)))).one
    heads = {kv.key: kv for kv in then.range(Get(decided_span(quorum))).kvs}
    keys = sum(found.count for found in then.ranges(Get(one, count_only=True) for one in spans_but_history(prefix)))
    rounds = _group_of(then, prefix, decided, None)
    if (roll := roll_of(rounds)) is not None:
        rounds = replace(rounds, roll={kv.key: kv for kv in then.pages(roll_span(prefix, roll))})
    head = decided_key(quorum)
    quorums = _group_of(then, quorum, heads.get(head), heads.get(roster_key(head)))
    timers = then.pages(timers_span(prefix)) if with_timers else ()
    return JobKeys(job, then.revision, rounds, quorums, keys, tuple(timers))


def _group_of(then: SnapshotReader, prefix: str, decided: KeyValue | None, roster: KeyValue | None) -> GroupKeys:
    members = sorted(then.pages(members_span(prefix)), key=lambda kv: kv.create_revision)
    return GroupKeys(prefix, decided, roster, {}, tuple(members), tuple(then.pages(deaths_span(prefix))))
