"""The metrics that a process counts itself. `run` is the id of a run or a job; a process has one, or few.

docs/monitoring.md describes each, and names those worth an alert.
"""

from __future__ import annotations

from typing import Final

from ftcoord.metrics.series import Counter, Gauge, Histogram

RUN: Final = ("run",)

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

SERIES: Final = (
    *(ROUND, RANK, ROUND_SEATS, ROUNDS, JOIN_SECONDS, RECALLS, WORKER_FAILURES),
    *(QUORUM_ID, QUORUM_REPLICAS, REPLICA_STEP, QUORUMS, QUORUM_FAILURES, QUORUM_SECONDS, VOTES, GATEWAY_REPLICAS),
    *(LEASES_KEPT, LEASE_LEFT, LEASE_SHARE, LEASES_LOST, TIMERS, TIMERS_EXPIRED, REQUEST_SECONDS, REQUEST_FAILURES),
)


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
