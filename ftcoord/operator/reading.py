"""Reads jobs: which there are, one of them at one revision of etcd, and one as it changes."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from ftcoord import concurrency
from ftcoord.closing import Closing
from ftcoord.core import layout
from ftcoord.errors import EtcdError, EtcdUnavailable
from ftcoord.etcd.api import Etcd, Get, KeyValue, SnapshotReader, read_snapshot
from ftcoord.operator.job_keys import JobKeys, LeaseTime, spans_of
from ftcoord.operator.report import FORMAT, JobList, JobStatus, Watched
from ftcoord.operator.status import Member, Rules, foremost, tell_job, tell_line
from ftcoord.primitives.mirror import Informer, Mirror

log = logging.getLogger(__name__)

PROBE: Final = 2.0
"""Seconds without a change after which etcd is probed; and seconds that it may take to answer."""
TIMERS_INTERVAL: Final = 2.0
"""The fewest seconds between two reads of a job's timers,"""
TIMERS_REST: Final = 10
"""and the pause after a read, as a multiple of the time that it took."""


class ReadsLeases(Protocol):
    """A client that can ask for the time left of leases."""

    def time_left(self, lease_id: int, *, timeout: float | None = None) -> tuple[int, int]:
        """Whole seconds that a lease has left, and its granted TTL; (-1, 0) for a lease that is gone."""


def read_job(
    etcd: Etcd, key_prefix: str, job: str, *, with_timers: bool = False, with_history: bool = False
) -> JobKeys:
    """A job's keys at one revision, in pages; those of its expiration timers and its history if asked for.

    Raises EtcdError.
    """
    prefix = layout.run_prefix(key_prefix, job)
    spans = [*spans_of(key_prefix, job, with_history=with_history), *[layout.timers_span(prefix)] * with_timers]

    def look(then: SnapshotReader) -> JobKeys:
        found = [kv for span in spans for kv in then.pages(span)]
        exists = then.range(Get(layout.run_span(prefix), count_only=True)).count > 0
        return JobKeys.of(key_prefix, job, found, revision=then.revision, exists=exists)

    return read_snapshot(etcd.range, look)


def read_events(etcd: Etcd, key_prefix: str, job: str) -> tuple[list[KeyValue], list[KeyValue]]:
    """The keys of the two histories of a job, of its rounds and of its quorums. Raises EtcdError."""
    groups = layout.run_prefix(key_prefix, job), layout.quorum_prefix(key_prefix, job)
    rounds, quorums = read_snapshot(etcd.range, lambda then: [then.pages(layout.events_span(one)) for one in groups])
    return rounds, quorums


def read_lease(etcd: ReadsLeases, member: str, timeout: float | None = None) -> LeaseTime | None:
    """The lease of a member; None if it is gone. Raises EtcdError."""
    left, ttl = etcd.time_left(int(member, 16), timeout=timeout)
    return LeaseTime(left, ttl) if left >= 0 else None


def with_leases(etcd: ReadsLeases, status: JobStatus, most: int | None = None) -> JobStatus:
    """The same status, with the leases of the members that are shown if each group has `most` rows: one request each.

    Raises EtcdError.
    """

    def leased(members: Sequence[Member]) -> tuple[Member, ...]:
        found = {one.member: read_lease(etcd, one.member) for one in foremost(members, most)}
        return tuple(
            replace(one, lease_left=lease.left, lease_ttl=lease.ttl) if (lease := found.get(one.member)) else one
            for one in members
        )

    rounds, quorum = status.rounds, status.quorum
    return replace(
        status,
        rounds=rounds and replace(rounds, members=leased(rounds.members)),
        quorum=quorum and replace(quorum, replicas=leased(quorum.replicas)),
    )


# -- all jobs -------------------------------------------------------------------------------------------------------


def job_ids(etcd: Etcd, key_prefix: str) -> Iterator[str]:
    """The ids of all jobs below a key prefix, as they are found. Raises EtcdError."""
    rest = everything = layout.runs_span(key_prefix)
    while (found := etcd.range(Get(rest, limit=1, keys_only=True)).one) is not None:
        job, branch = layout.run_id_of(key_prefix, found.key), layout.branch_of(key_prefix, found.key)
        if job is not None:
            yield job
        behind = layout.decode_key(branch.end) if branch.end else f"{branch.start}\0"
        rest = layout.Span(behind, stop=layout.decode_key(everything.end))


def read_jobs(etcd: Etcd, key_prefix: str) -> JobList:
    """All jobs below a key prefix. Raises EtcdError.

    Costs a few requests for each, and its members; the contents of their stores are skipped.
    """
    found = (tell_job(read_job(etcd, key_prefix, job), Rules()) for job in job_ids(etcd, key_prefix))
    return JobList(FORMAT, key_prefix, tuple(map(tell_line, found)))


# -- one job as it changes ------------------------------------------------------------------------------------------


class JobWatch(Closing):
    """Follows a job on a thread of its own, and reports its status whenever that changes, and whether etcd answers.

    The keys of rounds and quorums come from separate watches: for a moment one may be ahead of the other. Expiration
    timers are not watched but read from time to time: each worker may write one at each of its steps, and a job may
    have ten thousand workers. `next`, `wait` and `take` are for one thread at a time.

    Args:
        etcd: the client; not closed here.
        rules: the rules to judge the job by.
        every_timer: whether the start or release of a timer is a change too; else only an expiry is.
        with_history: whether `keys` includes the job's history.

    Attributes:
        last: what was reported last; None before the first report.
        keys: what that rests on.
    """

    def __init__(
        self,
        etcd: Etcd,
        key_prefix: str,
        job: str,
        rules: Rules,
        *,
        every_timer: bool,
        with_history: bool = False,
    ) -> None:
        self._etcd, self._job, self._rules, self._every_timer = etcd, job, rules, every_timer  # never change
        self._prefix = layout.run_prefix(key_prefix, job)  # never changes
        self._read = partial(read_job, etcd, key_prefix, job, with_history=with_history)  # never changes
        self.last: Watched | None = None
        self.keys: JobKeys | None = None
        self._timers: tuple[KeyValue, ...] = ()
        self._timers_due = -math.inf
        self._inbox: concurrency.Queue[JobKeys | BaseException | None] = concurrency.inbox()

        def look(*mirrors: Mirror) -> None:
            kvs = (kv for mirror in mirrors for kv in mirror.kvs.values())
            self._inbox.put(JobKeys.of(key_prefix, job, kvs, revision=max(one.revision for one in mirrors)))

        spans = spans_of(key_prefix, job, with_history=with_history)
        self._informer = Informer(etcd, spans, look, "ftcoord-follower", self._inbox.put, gathers=True)

    def close(self) -> None:
        """Stop following. A running `next` returns. Idempotent."""
        self.wake()
        self._informer.close()

    def wake(self) -> None:
        """Make a running `next`, or the next one, return soon. From any thread."""
        self._inbox.put(None)

    def next(self) -> Watched | None:
        """Wait for a change; see `wait` and `take`."""
        return self.take(self.wait())

    def wait(self) -> JobKeys | None:
        """The newest keys; None if none come within `PROBE` seconds. Raises the error that ended the thread."""
        try:
            found = self._inbox.get(timeout=PROBE)
            while not self._inbox.empty():
                found = self._inbox.get()
        except concurrency.Empty:
            return None
        if isinstance(found, BaseException):
            raise found
        return found

    def take(self, found: JobKeys | None) -> Watched | None:
        """What is new: the job, or whether etcd answers; None for nothing. If no keys were `found`, probe etcd.

        Raises EtcdError if etcd does not answer and never did.
        """
        before, last, error = (self.keys, self._timers), self.last, ""
        try:
            if found is None:
                found = self._probe()
            self.keys = found or self.keys  # which are true, though the timers may not be found
            if self.keys is not None:
                self._look_for_timers()
        except EtcdError as problem:
            if self.keys is None:
                raise
            error = str(problem)
        if self.keys is None:
            return None  # etcd answers, and the keys are on their way
        if last is not None and before == (self.keys, self._timers):  # a job may have ten thousand members
            status = last.status
        else:
            status = tell_job(replace(self.keys, timers=self._timers), self._rules)
        self.last = Watched(FORMAT, self._job, not error, error, status)
        return self.last if last is None or self._gist(last) != self._gist(self.last) else None

    def _probe(self) -> JobKeys | None:
        """Check whether etcd answers; if it did not, also read the job, since it is unknown what was missed."""
        self._etcd.range(Get(layout.run_span(self._prefix), limit=1, keys_only=True), timeout=PROBE)
        return self._read() if self.last is not None and not self.last.connected else None

    def _look_for_timers(self) -> None:
        """Raises EtcdUnavailable, within `PROBE` seconds."""
        began = concurrency.now()
        if began < self._timers_due:
            return
        try:
            read, span = partial(self._etcd.range, timeout=PROBE), layout.timers_span(self._prefix)
            self._timers = read_snapshot(read, lambda then: tuple(then.pages(span)))
        except EtcdUnavailable:
            raise
        except EtcdError as error:
            log.debug("the timers of %s cannot be read: %s", self._job, error)
            self._timers = ()
        now = concurrency.now()
        self._timers_due = now + max(TIMERS_INTERVAL, TIMERS_REST * (now - began))

    def _gist(self, one: Watched) -> object:
        """What is compared: all but etcd's revision, and the text of an error. Leases are not followed."""
        status = one.status
        timers = [timer for timer in status.timers if self._every_timer or timer.standing != "running"]
        return one.connected, status.rounds, status.quorum, status.unreadable, timers
