"""The metrics that a process counts itself, with prometheus_client, from when they are served.

`run` is the id of a run or a job; a process has one, or few. docs/monitoring.md describes each metric, and names those
worth an alert.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Literal

from ftcoord import __version__
from ftcoord.errors import ServerError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

Collect = Callable[[], "Iterable[Metric]"]
"""Returns metrics."""
RUN: Final = ("run",)
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""The upper bounds of the buckets for times: from one request to a round that waits for its last node."""


def prometheus() -> ModuleType:
    """The module prometheus_client. Raises ServerError if it is not installed."""
    try:
        return importlib.import_module("prometheus_client")
    except ImportError:
        raise ServerError("prometheus_client is not installed: pip install prometheus_client") from None


def exposed(collect: Collect) -> tuple[bytes, str]:
    """The metrics of `collect` in Prometheus' text format, and that format's media type. Raises ServerError without
    prometheus_client, and what `collect` raises."""
    client = prometheus()
    return client.generate_latest(SimpleNamespace(collect=collect)), client.CONTENT_TYPE_LATEST


SERIES: Final[list[Series]] = []
"""All metrics of a process."""


class Series:
    """A metric of this process. Thread-safe; nothing is counted before `begin_counting()`, nor in a forked child. Not
    for signal handlers: prometheus_client's locks are not reentrant.

    Args:
        kind: its class in prometheus_client.
        name: its name in Prometheus, with its unit and without `_total`.
        about: what it counts, in one line.
        labels: the names of its labels. Their values must not grow without bound, as ids of members do.
    """

    def __init__(
        self, kind: Literal["Counter", "Gauge", "Histogram"], name: str, about: str, labels: tuple[str, ...] = ()
    ) -> None:
        self.kind, self.name, self.about, self.labels = kind, name, about, labels  # never change
        self.made: Any = None  # by prometheus_client, while it is counted
        self.look: Callable[[], float] | None = None
        """Returns the value of a gauge that changes on its own, nan for none. Set once, when its module is loaded."""
        SERIES.append(self)

    def begin(self, *labels: str) -> Any:
        """Start at 0: Prometheus sees no increase in a first value that is not 0. Returns what counts; None if nothing
        does."""
        made = self.made
        return made.labels(*labels) if made is not None and labels else made

    def add(self, *labels: str) -> None:
        """Count once."""
        if (made := self.begin(*labels)) is not None:
            made.inc()

    def set(self, value: float, *labels: str) -> None:
        """Set a gauge."""
        if (made := self.begin(*labels)) is not None:
            made.set(value)

    def observe(self, seconds: float, *labels: str) -> None:
        """Add one duration to a histogram."""
        if (made := self.begin(*labels)) is not None:
            made.observe(seconds)

    def drop(self, *labels: str) -> None:
        """Remove a value."""
        if (made := self.made) is not None:
            made.remove(*labels)


Counter = partial(Series, "Counter")
Gauge = partial(Series, "Gauge")
Histogram = partial(Series, "Histogram")

# -- agents ---------------------------------------------------------------------------------------------------------

ROUND: Final = Gauge("ftcoord_agent_round", "The number of the last round that this agent took part in.", RUN)
RANK: Final = Gauge("ftcoord_agent_rank", "The rank of this agent in its last round.", RUN)
ROUND_SEATS: Final = Gauge("ftcoord_agent_round_seats", "How many agents the last round has.", RUN)
ROUNDS: Final = Counter("ftcoord_agent_rounds", "Rounds that this agent took part in.", RUN)
JOIN_SECONDS: Final = Histogram("ftcoord_agent_join_seconds", "From asking for a round until it was ready.", RUN)
RECALLS: Final = Counter("ftcoord_agent_recalls", "Times that this agent was called back from its round.", RUN)
WORKER_FAILURES: Final = Counter("ftcoord_agent_worker_failures", "Rounds in which a worker of this agent failed.", RUN)

# -- managers of torchft, and gateways ------------------------------------------------------------------------------

QUORUM_ID: Final = Gauge("ftcoord_quorum_id", "The id of the last quorum that a replica of this process is in.", RUN)
QUORUM_REPLICAS: Final = Gauge("ftcoord_quorum_replicas", "How many replicas the last quorum has.", RUN)
REPLICA_STEP: Final = Gauge("ftcoord_replica_step", "The step for which a replica of it last asked for a quorum.", RUN)
QUORUMS: Final = Counter("ftcoord_quorums", "Requests for a quorum that were answered.", RUN)
QUORUM_FAILURES: Final = Counter("ftcoord_quorum_failures", "Requests for a quorum that were not answered.", RUN)
QUORUM_SECONDS: Final = Histogram("ftcoord_quorum_wait_seconds", "From asking for a quorum until it was decided.", RUN)
VOTES: Final = Counter("ftcoord_votes", "Steps that the ranks of this replica voted on: commit or abort.", ("outcome",))
GATEWAY_REPLICAS: Final = Gauge("ftcoord_gateway_replicas", "Replicas that this gateway speaks for.", RUN)

# -- leases, timers and etcd ----------------------------------------------------------------------------------------

LEASES_KEPT: Final = Gauge("ftcoord_leases", "Leases that this process keeps alive.")
LEASE_LEFT: Final = Gauge("ftcoord_lease_remaining_seconds", "The time until the first lease of this process may end.")
LEASE_SHARE: Final = Gauge("ftcoord_lease_remaining_ratio", "The least share of its TTL that a lease of it has left.")
LEASES_LOST: Final = Counter("ftcoord_leases_lost", "Leases of this process that ended against its will.")
TIMERS: Final = Gauge("ftcoord_timers_active", "Expiration timers that this process watches.")
TIMERS_EXPIRED: Final = Counter("ftcoord_timers_expired", "Expiration timers that this process found expired.")
REQUEST_SECONDS: Final = Histogram("ftcoord_etcd_request_seconds", "Answered requests to etcd.", ("method",))
REQUEST_FAILURES: Final = Counter("ftcoord_etcd_request_failures", "Requests to etcd that failed.", ("method", "code"))


_registry: Any = None
"""prometheus_client's, without the metrics of the user's program; None while nothing is counted."""


def begin_counting() -> None:
    """Count from now on, until `end_counting()`. Raises ServerError without prometheus_client."""
    global _registry
    if _registry is None:
        client = prometheus()
        _registry = client.CollectorRegistry(auto_describe=False)
        client.Info("ftcoord", "The release of ftcoord.", registry=_registry).info({"version": __version__})
        for one in SERIES:
            more = {"buckets": SECONDS} if one.kind == "Histogram" else {}
            one.made = getattr(client, one.kind)(one.name, one.about, one.labels, registry=_registry, **more)
            if one.look is not None:
                one.made.set_function(one.look)


def end_counting() -> None:
    """Forget all. A forked child begins with nothing, and with no lock that a thread of its parent holds."""
    global _registry
    _registry = None
    for one in SERIES:
        one.made = None


os.register_at_fork(after_in_child=end_counting)


def collect_process() -> Iterator[Metric]:
    """The metrics of this process; counts from now on, if it has not before. Without the time at which each counter
    began, and gauges that have no value."""
    begin_counting()
    for family in _registry.collect():
        family.samples = [one for one in family.samples if one.value == one.value and not one.name.endswith("_created")]
        yield family


def note_round(run: str, number: int, rank: int, seats: int, seconds: float) -> None:
    """An agent got a seat in a round that is ready, after `seconds`."""
    ROUND.set(number, run)
    RANK.set(rank, run)
    ROUND_SEATS.set(seats, run)
    ROUNDS.add(run)
    RECALLS.begin(run)
    WORKER_FAILURES.begin(run)
    JOIN_SECONDS.observe(seconds, run)


def note_quorum(run: str, id_: int, replicas: int, step: int, seconds: float) -> None:
    """A request for a quorum was answered, after `seconds`."""
    QUORUM_ID.set(id_, run)
    QUORUM_REPLICAS.set(replicas, run)
    REPLICA_STEP.set(step, run)
    QUORUMS.add(run)
    QUORUM_FAILURES.begin(run)
    QUORUM_SECONDS.observe(seconds, run)
