"""What is told of one job, and of each job of a list, from their keys. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ftcoord.core.layout import decided_key, quorum_prefix, roster_key
from ftcoord.core.quorum import QuorumOptions
from ftcoord.core.quorum_records import parse_quorum
from ftcoord.core.rendezvous import RoundOptions
from ftcoord.core.rendezvous_records import parse_decided
from ftcoord.errors import StateError
from ftcoord.etcd.api import KeyValue
from ftcoord.operator.job_keys import JobKeys, LeaseTime
from ftcoord.operator.quorums import tell_quorum
from ftcoord.operator.rounds import tell_rounds
from ftcoord.operator.timers import tell_timers
from ftcoord.operator.told import FORMAT, JobLine, JobStatus, NodeStatus, ReplicaStatus

Member = TypeVar("Member", NodeStatus, ReplicaStatus)


@dataclass(frozen=True, slots=True)
class Rules:
    """What a job's users gave, which no key says: by this the next decision is judged."""

    rounds: RoundOptions = field(default_factory=lambda: RoundOptions(return_to_seat=10.0))
    quorum: QuorumOptions = field(default_factory=lambda: QuorumOptions(1, 60.0))


def tell_job(keys: JobKeys, rules: Rules) -> JobStatus:
    """The status of a job, but for its leases."""
    rounds = quorum = None
    unreadable = []
    if not keys.rounds.is_empty:
        rounds, odd = tell_rounds(keys.rounds, rules.rounds)
        unreadable += odd
    if not keys.quorum.is_empty:
        quorum, odd = tell_quorum(keys.quorum, rules.quorum)
        unreadable += odd
    timers, odd = tell_timers(keys.timers)
    unreadable += odd
    healthy = all(one.healthy for one in (rounds, quorum) if one is not None) and keys.exists and not unreadable
    about = FORMAT, keys.job, keys.revision, keys.exists, healthy
    return JobStatus(*about, rounds, quorum, tuple(unreadable), tuple(timers))


def members_of(status: JobStatus) -> list[str]:
    """The member ids in a status, in its order."""
    nodes = [one.member for one in status.rounds.members] if status.rounds else []
    return nodes + [one.member for one in status.quorum.replicas] if status.quorum else nodes


def with_leases(status: JobStatus, leases: Mapping[str, LeaseTime]) -> JobStatus:
    """The same status, with the leases of those members that are named here."""
    rounds, quorum = status.rounds, status.quorum
    if rounds is not None:
        rounds = replace(rounds, members=tuple(_with_lease(one, leases.get(one.member)) for one in rounds.members))
    if quorum is not None:
        quorum = replace(quorum, replicas=tuple(_with_lease(one, leases.get(one.member)) for one in quorum.replicas))
    return replace(status, rounds=rounds, quorum=quorum)


def _with_lease(one: Member, lease: LeaseTime | None) -> Member:
    return one if lease is None else replace(one, lease_left=lease.left, lease_ttl=lease.ttl)


@dataclass(frozen=True, slots=True)
class JobSummaryKeys:
    """What a line of a list rests on.

    Args:
        decided: of the rounds.
        nodes: how many keys there are among the nodes.
        quorum: the decided record of the quorums and its roster, by key.
        replicas: how many keys there are among the replicas.
    """

    decided: KeyValue | None
    nodes: int
    quorum: Mapping[str, KeyValue]
    replicas: int


def tell_line(key_prefix: str, job: str, keys: JobSummaryKeys) -> JobLine:
    """One job of a list."""
    round_ = nodes = quorum = replicas = None
    states, note = list[str](), ""
    if keys.decided is not None or keys.nodes:
        state, round_, nodes, note = _rounds_line(keys.decided, keys.nodes)
        states.append(state)
    if keys.quorum or keys.replicas:
        state, quorum, replicas = _quorum_line(quorum_prefix(key_prefix, job), keys)
        states.append(state)
    state = states[0] if states else "other"
    return JobLine(job, state, round_, nodes, quorum, replicas, keys.nodes + keys.replicas, note)


def _rounds_line(decided: KeyValue | None, members: int) -> tuple[str, int, int, str]:
    waiting = "forming" if members else "empty"
    if decided is None:
        return waiting, 0, 0, ""
    try:
        record = parse_decided(decided.key, decided.value)
    except StateError as error:
        return "unreadable", 0, 0, str(error)
    state = waiting
    if record.closed:
        state = record.outcome or "closed"
    elif record.size and not record.recalled:
        state = "running" if record.ready else "seating"
        state = state if members >= record.size else "degraded"
    return state, record.number, record.size, record.closed or record.recalled


def _quorum_line(prefix: str, keys: JobSummaryKeys) -> tuple[str, int, int]:
    decided = keys.quorum.get(decided_key(prefix))
    if decided is None:
        return ("forming" if keys.replicas else "empty"), 0, 0
    roster = keys.quorum.get(roster_key(decided.key))
    try:
        quorum = parse_quorum(decided.key, decided.value, roster.value if roster else None)
    except StateError:
        return "unreadable", 0, 0
    size = len(quorum.seats)
    state = "empty" if not keys.replicas else "degraded" if keys.replicas < size else "training"
    return state, quorum.id, size
