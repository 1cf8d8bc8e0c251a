"""The metrics of all runs on an etcd cluster, as `ftcoord ls` and `ftcoord status` read them: no process of a run is
needed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from ftcoord import concurrency
from ftcoord.config import EtcdConfig
from ftcoord.errors import EtcdError
from ftcoord.etcd.client import EtcdClient
from ftcoord.log_once import LogOnce
from ftcoord.metrics.process import RUN, prometheus
from ftcoord.operator.listing import live_job_ids
from ftcoord.operator.reading import read_job
from ftcoord.operator.status import Rules, tell_job
from ftcoord.operator.told import JobStatus, QuorumStatus, RoundsStatus

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

MOST_RUNS: Final = 200
"""Runs with metrics of their own. Further runs are only counted."""
WAITING: Final = ("waiting", "spare")
"""The standings of nodes that have no seat and want one."""

OF_ETCD: Final = (
    ("ftcoord_etcd_up", "Whether etcd answered this scrape. If not, there are no metrics of runs."),
    ("ftcoord_runs", "Runs and jobs that have keys in etcd, besides a history."),
    ("ftcoord_runs_not_exported", f"Those beyond the first {MOST_RUNS}, which have no other metrics."),
)
OF_RUN: Final = (
    ("ftcoord_run_healthy", "Whether nothing of the run needs attention, as in `ftcoord status`."),
    ("ftcoord_run_unreadable_keys", "Keys of the run whose values this ftcoord cannot read."),
)
OF_ROUNDS: Final = (
    ("ftcoord_run_round", "The number of the last round."),
    ("ftcoord_run_round_seats", "How many nodes the last round has."),
    ("ftcoord_run_round_ready", "Whether all of them took their seats, and the round was not recalled."),
    ("ftcoord_run_nodes", "Nodes that live."),
    ("ftcoord_run_nodes_waiting", "Nodes that live and wait for a seat, spares among them."),
    ("ftcoord_run_nodes_missing", "Nodes that have a seat in the last round and are gone."),
)
OF_QUORUM: Final = (
    ("ftcoord_run_quorum_id", "The id of the last quorum."),
    ("ftcoord_run_quorum_replicas", "How many replicas the last quorum has."),
    ("ftcoord_run_quorum_timestamp_seconds", "When it was decided, by the decider's clock, in seconds since 1970."),
    ("ftcoord_run_max_step", "The highest step in the last quorum."),
    ("ftcoord_run_replicas", "Replicas that live."),
    ("ftcoord_run_replicas_behind", "Replicas of the last quorum that are behind its highest step."),
    ("ftcoord_run_replicas_missing", "Replicas that have a seat in the last quorum and are gone."),
)
STATE: Final = ("ftcoord_run_state", "1 for the state of the run's rounds and of its quorums; empty for none.")


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
                ids = list(live_job_ids(etcd, self._key_prefix))
                found = [tell_job(read_job(etcd, self._key_prefix, id_), Rules()) for id_ in ids[:MOST_RUNS]]
        except EtcdError as error:
            with self._lock:
                self._problem.say(f"cannot read etcd, so only ftcoord_etcd_up is exported: {error}")
            return _gauges(OF_ETCD[:1], {(): (0,)})
        with self._lock:
            self._problem.forget()
        return [*_gauges(OF_ETCD, {(): (1, len(ids), len(ids) - len(found))}), *families_of(found)]


def families_of(runs: Iterable[JobStatus]) -> Iterator[Metric]:
    """The metrics of runs."""
    found = [one for one in runs if one.exists]
    states = {(one.job, *(part.state if part else "" for part in (one.rounds, one.quorum))): (1,) for one in found}
    yield from _gauges((STATE,), states, ("run", "rounds", "quorum"))
    yield from _gauges(OF_RUN, {(one.job,): (one.healthy, len(one.unreadable)) for one in found}, RUN)
    yield from _gauges(OF_ROUNDS, {(one.job,): _of_rounds(one.rounds) for one in found if one.rounds}, RUN)
    yield from _gauges(OF_QUORUM, {(one.job,): _of_quorum(one.quorum) for one in found if one.quorum}, RUN)


def _of_rounds(status: RoundsStatus) -> tuple[float, ...]:
    ready = status.ready and not status.recalled and not status.closed
    waiting = sum(one.standing in WAITING for one in status.members)
    return status.number, status.size, ready, len(status.members), waiting, len(status.missing)


def _of_quorum(status: QuorumStatus) -> tuple[float, ...]:
    behind = sum(one.behind > 0 for one in status.replicas)
    live = len(status.replicas)
    return status.id, status.size, status.created, status.max_step, live, behind, len(status.missing)


def _gauges(
    what: Sequence[tuple[str, str]], values: Mapping[tuple[str, ...], tuple[float, ...]], labels: Sequence[str] = ()
) -> Iterator[Metric]:
    """Gauges with these names and descriptions, from the values of all of them for each set of labels."""
    make = prometheus().metrics_core.GaugeMetricFamily
    for place, (name, about) in enumerate(what):
        family = make(name, about, labels=labels)
        for found, numbers in values.items():
            family.add_metric(found, float(numbers[place]))
        yield family
