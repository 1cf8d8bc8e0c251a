"""Reads jobs: which there are, one of them at one revision of etcd, one as it changes, and the metrics of all."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ftcoord import concurrency
from ftcoord.closing import Closing
from ftcoord.config import EtcdConfig
from ftcoord.core import layout
from ftcoord.errors import EtcdError
from ftcoord.etcd.api import Etcd, Get, KeyValue, SnapshotReader, read_snapshot
from ftcoord.etcd.client import EtcdClient
from ftcoord.log_once import LogOnce
from ftcoord.metrics.process import RUN, prometheus
from ftcoord.operator.report import FORMAT, JobList, JobStatus, QuorumStatus, RoundsStatus, Watched
from ftcoord.operator.status import JobKeys, Member, Rules, foremost, line_of, spans_of, status_of
from ftcoord.primitives.mirror import Informer, Mirror

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

PROBE: Final = 2.0
"""Seconds without a change after which etcd is probed; and seconds that it may take to answer."""
TIMERS_INTERVAL: Final = 2.0
"""The fewest seconds between two reads of a job's timers,"""
TIMERS_REST: Final = 10
"""and the pause after a read, as a multiple of the time that it took."""


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


def with_leases(time_left: Callable[[int], tuple[int, int]], status: JobStatus, most: int | None = None) -> JobStatus:
    """The same status, with the leases of the members that are shown if each group has `most` rows: one call each.

    Args:
        time_left: returns the whole seconds that a lease has left, and its TTL; (-1, 0) for one that is gone. What it
            raises is passed on.
    """

    def leased(members: list[Member]) -> list[Member]:
        found = {one["member"]: time_left(int(one["member"], 16)) for one in foremost(members, most)}
        left = [(one, found.get(one["member"], (-1, 0))) for one in members]
        return [{**one, "lease_left": lease[0], "lease_ttl": lease[1]} if lease[0] >= 0 else one for one, lease in left]

    rounds, quorum = status["rounds"], status["quorum"]
    return {
        **status,
        "rounds": rounds and {**rounds, "members": leased(rounds["members"])},
        "quorum": quorum and {**quorum, "replicas": leased(quorum["replicas"])},
    }


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
    found = (status_of(read_job(etcd, key_prefix, job), Rules()) for job in job_ids(etcd, key_prefix))
    return {"format": FORMAT, "key_prefix": key_prefix, "jobs": [*map(line_of, found)]}


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
        self, etcd: Etcd, key_prefix: str, job: str, rules: Rules, *, every_timer: bool, with_history: bool = False
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
            status = last["status"]
        else:
            status = status_of(replace(self.keys, timers=self._timers), self._rules)
        self.last = {"format": FORMAT, "job": self._job, "connected": not error, "error": error, "status": status}
        return self.last if last is None or self._gist(last) != self._gist(self.last) else None

    def _probe(self) -> JobKeys | None:
        """Check whether etcd answers; if it did not, also read the job, since it is unknown what was missed."""
        self._etcd.range(Get(layout.run_span(self._prefix), limit=1, keys_only=True), timeout=PROBE)
        return self._read() if self.last is not None and not self.last["connected"] else None

    def _look_for_timers(self) -> None:
        """Raises EtcdError, within `PROBE` seconds."""
        if (began := concurrency.now()) >= self._timers_due:
            read, span = partial(self._etcd.range, timeout=PROBE), layout.timers_span(self._prefix)
            self._timers = read_snapshot(read, lambda then: tuple(then.pages(span)))
            now = concurrency.now()
            self._timers_due = now + max(TIMERS_INTERVAL, TIMERS_REST * (now - began))

    def _gist(self, one: Watched) -> object:
        """What is compared: all but etcd's revision, and the text of an error. Leases are not followed."""
        status = one["status"]
        timers = [timer for timer in status["timers"] if self._every_timer or timer["standing"] != "running"]
        return one["connected"], status["rounds"], status["quorum"], status["unreadable"], timers


# -- the metrics of all runs ------------------------------------------------------------------------------------------

MOST_RUNS: Final = 200
"""Runs with metrics of their own. Further runs are only counted."""
WAITING: Final = ("waiting", "spare")
"""The standings of nodes that have no seat and want one."""

OF_ETCD: Final = (
    ("ftcoord_etcd_up", "Whether etcd answered this scrape. If not, there are no metrics of runs."),
    ("ftcoord_runs", "Runs and jobs that have keys in etcd."),
    ("ftcoord_runs_not_exported", f"Those beyond the first {MOST_RUNS}, which have no other metrics."),
)
STATE: Final = ("ftcoord_run_state", "1 for the state of the run's rounds and of its quorums; empty for none.")


def _is_ready(rounds: RoundsStatus) -> bool:
    return rounds["ready"] and not rounds["recalled"] and not rounds["closed"]


def _waiting(rounds: RoundsStatus) -> int:
    return sum(one["standing"] in WAITING for one in rounds["members"])


def _behind(quorum: QuorumStatus) -> int:
    return sum(one["behind"] > 0 for one in quorum["replicas"])


OF_RUN: Final[Sequence[tuple[str, str, str, str | Callable[[Any], int]]]] = (
    ("ftcoord_run_healthy", "Whether the run needs no attention, as in `ftcoord status`.", "", "healthy"),
    ("ftcoord_run_unreadable_keys", "Keys of the run that this ftcoord cannot read.", "", "unreadable"),
    ("ftcoord_run_round", "The number of the last round.", "rounds", "number"),
    ("ftcoord_run_round_seats", "How many nodes the last round has.", "rounds", "size"),
    ("ftcoord_run_round_ready", "Whether all took their seats, and it was not recalled.", "rounds", _is_ready),
    ("ftcoord_run_nodes", "Nodes that live.", "rounds", "members"),
    ("ftcoord_run_nodes_waiting", "Nodes that live and wait for a seat, with spares.", "rounds", _waiting),
    ("ftcoord_run_nodes_missing", "Nodes that have a seat in the last round and are gone.", "rounds", "missing"),
    ("ftcoord_run_quorum_id", "The id of the last quorum.", "quorum", "id"),
    ("ftcoord_run_quorum_replicas", "How many replicas the last quorum has.", "quorum", "size"),
    ("ftcoord_run_quorum_timestamp_seconds", "When it was decided, by the decider's clock.", "quorum", "created"),
    ("ftcoord_run_max_step", "The highest step in the last quorum.", "quorum", "max_step"),
    ("ftcoord_run_replicas", "Replicas that live.", "quorum", "replicas"),
    ("ftcoord_run_replicas_behind", "Replicas of the last quorum that are behind its step.", "quorum", _behind),
    ("ftcoord_run_replicas_missing", "Replicas that have a seat in it and are gone.", "quorum", "missing"),
)
"""The name; what it is; the part of the status that it is of, empty for the whole; and the field there (a list's
length), or what counts it."""


class RunsCollector:
    """Reads etcd at each scrape, and returns the metrics of that moment. Thread-safe: each scrape has its own client.

    Args:
        config: how to reach etcd.
        key_prefix: the prefix of the runs' keys.
    """

    def __init__(self, config: EtcdConfig, key_prefix: str) -> None:
        self._config, self._key_prefix = config, key_prefix
        self._problem = LogOnce(log)  # of any thread: at worst, one of them repeats a line

    def collect(self) -> Iterable[Metric]:
        """All metrics; if etcd does not answer, only that. Takes a few request timeouts at most. Raises ServerError
        without prometheus_client."""
        try:
            with EtcdClient(self._config) as etcd:
                ids = list(job_ids(etcd, self._key_prefix))
                found = [status_of(read_job(etcd, self._key_prefix, id_), Rules()) for id_ in ids[:MOST_RUNS]]
        except EtcdError as error:
            self._problem.say(f"cannot read etcd, so only ftcoord_etcd_up is exported: {error}")
            return [_gauge(*OF_ETCD[0], {(): 0})]
        self._problem.forget()
        numbers = zip(OF_ETCD, (1, len(ids), len(ids) - len(found)), strict=True)
        return [*(_gauge(*what, {(): value}) for what, value in numbers), *families_of(found)]


def families_of(runs: Iterable[JobStatus]) -> Iterator[Metric]:
    """The metrics of runs."""
    found: list[Any] = [one for one in runs if one["exists"]]
    yield _gauge(*STATE, {_states(one): 1.0 for one in found}, ("run", "rounds", "quorum"))
    for name, about, part, value in OF_RUN:
        numbers = dict[tuple[str, ...], float]()
        for one in found:
            if (of := one[part] if part else one) is not None:
                number = value(of) if callable(value) else of[value]
                numbers[one["job"],] = float(len(number) if isinstance(number, list) else number)
        yield _gauge(name, about, numbers, RUN)


def _states(one: JobStatus) -> tuple[str, ...]:
    """A run, and the states of its parts."""
    return (one["job"], *(part["state"] if part else "" for part in (one["rounds"], one["quorum"])))


def _gauge(name: str, about: str, values: Mapping[tuple[str, ...], float], labels: Sequence[str] = ()) -> Metric:
    """A gauge with these values, by those of its labels."""
    family: Metric = prometheus().metrics_core.GaugeMetricFamily(name, about, labels=labels)
    for found, value in values.items():
        family.add_sample(name, dict(zip(labels, found, strict=True)), value)
    return family
