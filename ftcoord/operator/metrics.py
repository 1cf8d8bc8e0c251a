"""The metrics of all runs on an etcd cluster, as `ftcoord ls` and `ftcoord status` read them: no process of a run is
needed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ftcoord import concurrency
from ftcoord.config import EtcdConfig
from ftcoord.errors import EtcdError
from ftcoord.etcd.client import EtcdClient
from ftcoord.log_once import LogOnce
from ftcoord.metrics.process import RUN, prometheus
from ftcoord.operator.reading import job_ids, read_job
from ftcoord.operator.report import JobStatus, QuorumStatus, RoundsStatus
from ftcoord.operator.status import Rules, tell_job

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

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
    return rounds.ready and not rounds.recalled and not rounds.closed


def _waiting(rounds: RoundsStatus) -> int:
    return sum(one.standing in WAITING for one in rounds.members)


def _behind(quorum: QuorumStatus) -> int:
    return sum(one.behind > 0 for one in quorum.replicas)


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
        self._lock = concurrency.lock("RunsCollector._lock")  # guards `_problem`
        self._problem = LogOnce(log)

    def collect(self) -> Iterable[Metric]:
        """All metrics; if etcd does not answer, only that. Takes a few request timeouts at most. Raises ServerError
        without prometheus_client."""
        try:
            with EtcdClient(self._config) as etcd:
                ids = list(job_ids(etcd, self._key_prefix))
                found = [tell_job(read_job(etcd, self._key_prefix, id_), Rules()) for id_ in ids[:MOST_RUNS]]
        except EtcdError as error:
            with self._lock:
                self._problem.say(f"cannot read etcd, so only ftcoord_etcd_up is exported: {error}")
            return [_gauge(*OF_ETCD[0], {(): 0})]
        with self._lock:
            self._problem.forget()
        numbers = zip(OF_ETCD, (1, len(ids), len(ids) - len(found)), strict=True)
        return [*(_gauge(*what, {(): value}) for what, value in numbers), *families_of(found)]


def families_of(runs: Iterable[JobStatus]) -> Iterator[Metric]:
    """The metrics of runs."""
    found = [one for one in runs if one.exists]
    states = {(one.job, *(part.state if part else "" for part in (one.rounds, one.quorum))): 1.0 for one in found}
    yield _gauge(*STATE, states, ("run", "rounds", "quorum"))
    for name, about, part, value in OF_RUN:
        numbers = dict[tuple[str, ...], float]()
        for one in found:
            if (of := getattr(one, part) if part else one) is not None:
                number = value(of) if callable(value) else getattr(of, value)
                numbers[one.job,] = float(len(number) if isinstance(number, tuple) else number)
        yield _gauge(name, about, numbers, RUN)


def _gauge(name: str, about: str, values: Mapping[tuple[str, ...], float], labels: Sequence[str] = ()) -> Metric:
    """A gauge with these values, by those of its labels."""
    family: Metric = prometheus().metrics_core.GaugeMetricFamily(name, about, labels=labels)
    for found, value in values.items():
        family.add_sample(name, dict(zip(labels, found, strict=True)), value)
    return family
