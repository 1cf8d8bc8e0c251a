"""Reads what the status of jobs rests on: each job at one revision of etcd, in pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Protocol

from ftcoord.core.layout import (
    Span,
    branch_of,
    deaths_span,
    decided_key,
    decided_span,
    decode_key,
    members_span,
    quorum_prefix,
    roll_span,
    roster_key,
    run_id_of,
    run_prefix,
    run_span,
    runs_span,
)
from ftcoord.errors import RequestRefused
from ftcoord.etcd.api import EtcdCalls, Get, KeyValue, RangeResult
from ftcoord.operator.job_keys import GroupKeys, JobKeys, LeaseTime
from ftcoord.operator.rounds import roll_of
from ftcoord.operator.status import JobSummaryKeys, tell_line
from ftcoord.operator.told import FORMAT, JobList

READ_AT_ONCE: Final = 1000
"""Keys of one request: some hundred kilobytes."""
READS: Final = 3
"""Attempts to read a job at one revision: etcd may compact its history meanwhile."""


class ReadsLeases(Protocol):
    """A client that can ask how long leases live."""

    def time_left(self, lease_id: int, *, timeout: float | None = None) -> tuple[int, int]:
        """Whole seconds that a lease has left, and that it was granted; (-1, 0) for one that is gone."""


def read_job(etcd: EtcdCalls, key_prefix: str, job: str) -> JobKeys:
    """A job's keys at one revision. Raises EtcdError."""
    for left in reversed(range(READS)):
        try:
            return _read_job(etcd, key_prefix, job)
        except RequestRefused:  # that revision was compacted away
            if not left:
                raise
    raise AssertionError("no attempt was made")


def read_leases(etcd: ReadsLeases, members: Iterable[str]) -> dict[str, LeaseTime]:
    """The leases of members, by member id: one request each. Raises EtcdError."""
    found = {member: etcd.time_left(int(member, 16)) for member in members}
    return {member: LeaseTime(left, ttl) for member, (left, ttl) in found.items() if left >= 0}


def read_jobs(etcd: EtcdCalls, key_prefix: str) -> JobList:
    """All jobs below a key prefix. Raises EtcdError.

    One request for each, whatever else the jobs have in etcd: what lies in their stores is jumped over.
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


def _summaries(etcd: EtcdCalls, key_prefix: str) -> Iterator[tuple[str, JobSummaryKeys]]:
    for job in job_ids(etcd, key_prefix):
        prefix, quorum = run_prefix(key_prefix, job), quorum_prefix(key_prefix, job)
        counted = [Get(members_span(one), count_only=True) for one in (prefix, quorum)]
        read = etcd.txn((), [Get(Span(decided_key(prefix))), Get(decided_span(quorum)), *counted])
        of_quorum = {kv.key: kv for kv in read.range(1).kvs}
        yield job, JobSummaryKeys(read.range(0).one, read.range(2).count, of_quorum, read.range(3).count)


def _behind(span: Span, whole: Span) -> Span:
    """What comes after a part of a span."""
    start = decode_key(span.end) if span.end else f"{span.start}\0"
    return Span(start, stop=decode_key(whole.end))


def _read_job(etcd: EtcdCalls, key_prefix: str, job: str) -> JobKeys:
    prefix, quorum = run_prefix(key_prefix, job), quorum_prefix(key_prefix, job)
    spans = [members_span(prefix), deaths_span(prefix), members_span(quorum), deaths_span(quorum)]
    read = etcd.txn(
        (),
        [
            Get(Span(decided_key(prefix))),
            Get(decided_span(quorum)),
            Get(run_span(prefix), count_only=True),
            *(Get(span, limit=READ_AT_ONCE) for span in spans),
        ],
    )
    whole = [_rest(etcd, span, read.range(3 + at), read.revision) for at, span in enumerate(spans)]
    members, deaths, replicas, replica_deaths = whole
    rounds = GroupKeys(prefix, read.range(0).one, None, {}, _by_age(members), tuple(deaths))
    if (roll := roll_of(rounds)) is not None:
        kvs = _pages(etcd, roll_span(prefix, roll), read.revision)
        rounds = GroupKeys(
            prefix, rounds.decided, None, {kv.key: kv for kv in kvs}, rounds.below_members, rounds.deaths
        )
    heads = {kv.key: kv for kv in read.range(1).kvs}
    head = decided_key(quorum)
    quorums = GroupKeys(
        quorum, heads.get(head), heads.get(roster_key(head)), {}, _by_age(replicas), tuple(replica_deaths)
    )
    return JobKeys(job, read.revision, rounds, quorums, read.range(2).count)


def _by_age(kvs: Iterable[KeyValue]) -> tuple[KeyValue, ...]:
    return tuple(sorted(kvs, key=lambda kv: kv.create_revision))


def _rest(etcd: EtcdCalls, span: Span, first: RangeResult, revision: int) -> list[KeyValue]:
    """A span whose first page was read already, as it was then."""
    if first.count <= len(first.kvs):
        return list(first.kvs)
    rest = Span(f"{first.kvs[-1].key}\0", stop=decode_key(span.end))
    return [*first.kvs, *_pages(etcd, rest, revision)]


def _pages(etcd: EtcdCalls, span: Span, revision: int) -> list[KeyValue]:
    """A span as it was at a revision."""
    first = etcd.range(Get(span, limit=READ_AT_ONCE, revision=revision))
    return _rest(etcd, span, first, revision)
