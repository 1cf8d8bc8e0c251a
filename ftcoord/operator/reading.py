"""Reads everything that the status of a job depends on, at one revision of etcd, in pages."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Protocol

from ftcoord.core.layout import (
    events_span,
    quorum_prefix,
    run_prefix,
    spans_but_history,
    timers_span,
)
from ftcoord.etcd.api import EtcdCalls, Get, KeyValue, SnapshotReader, read_snapshot
from ftcoord.operator.job_keys import JobKeys, LeaseTime, keys_of, spans_of


class ReadsLeases(Protocol):
    """A client that can ask for the time left of leases."""

    def time_left(self, lease_id: int, *, timeout: float | None = None) -> tuple[int, int]:
        """Whole seconds that a lease has left, and its granted TTL; (-1, 0) for a lease that is gone."""


def read_job(etcd: EtcdCalls, key_prefix: str, job: str, *, with_timers: bool = False) -> JobKeys:
    """A job's keys at one revision; with `with_timers`, including its expiration timers. Raises EtcdError."""
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


def _read_job(key_prefix: str, job: str, with_timers: bool, then: SnapshotReader) -> JobKeys:
    prefix = run_prefix(key_prefix, job)
    found = [then.pages(span) for span in spans_of(key_prefix, job)]
    others = sum(one.count for one in then.ranges(Get(one, count_only=True) for one in spans_but_history(prefix)))
    timers = then.pages(timers_span(prefix)) if with_timers else ()
    return keys_of(key_prefix, job, found, revision=then.revision, others=others, timers=timers)
