"""The status of one job, from its keys. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ftcoord.core.quorum import QuorumOptions
from ftcoord.core.round_situation import RoundOptions
from ftcoord.operator.job_keys import JobKeys, LeaseTime
from ftcoord.operator.quorums import QuorumTeller
from ftcoord.operator.rounds import RoundsTeller
from ftcoord.operator.timers import tell_timers
from ftcoord.operator.told import FORMAT, JobStatus, NodeStatus, ReplicaStatus

Member = TypeVar("Member", NodeStatus, ReplicaStatus)


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings of a job's users that are in no key: the next decision is judged by them."""

    rounds: RoundOptions = field(default_factory=lambda: RoundOptions(return_to_seat=10.0))
    quorum: QuorumOptions = field(default_factory=lambda: QuorumOptions(1, 60.0))


def tell_job(keys: JobKeys, rules: Rules) -> JobStatus:
    """The status of a job, but for its leases."""
    return JobTeller(rules).tell(keys)


class JobTeller:
    """Derives the status of one job, without its leases, again and again. For one thread.

    A status depends on the keys alone. What was derived from a key is kept until the key changes, since a job may have
    ten thousand nodes.
    """

    def __init__(self, rules: Rules) -> None:
        self._rounds, self._quorum = RoundsTeller(rules.rounds), QuorumTeller(rules.quorum)

    def tell(self, keys: JobKeys) -> JobStatus:
        """The status by these keys."""
        rounds = quorum = None
        unreadable = []
        if not keys.rounds.is_empty:
            rounds, odd = self._rounds.tell(keys.rounds)
            unreadable += odd
        if not keys.quorum.is_empty:
            quorum, odd = self._quorum.tell(keys.quorum)
            unreadable += odd
        timers, odd = tell_timers(keys.timers)
        unreadable += odd
        healthy = all(one.healthy for one in (rounds, quorum) if one is not None) and keys.exists and not unreadable
        about = FORMAT, keys.job, keys.revision, keys.exists, healthy
        return JobStatus(*about, rounds, quorum, tuple(unreadable), tuple(timers))


def foremost(members: Sequence[Member], most: int | None) -> Sequence[Member]:
    """The first `most` members; None for all. If not all can be shown, those in another standing than the majority come
    first: among ten thousand, an operator looks for these."""
    if most is None or len(members) <= most:
        return members
    usual = Counter(one.standing for one in members).most_common(1)[0][0]
    return sorted(members, key=lambda one: one.standing == usual)[:most]


def members_of(status: JobStatus, most: int | None = None) -> list[str]:
    """The member ids in a status, in order; only those that are shown if each group has `most` rows."""
    nodes = [one.member for one in foremost(status.rounds.members, most)] if status.rounds else []
    return nodes + [one.member for one in foremost(status.quorum.replicas, most)] if status.quorum else nodes


def with_leases(status: JobStatus, leases: Mapping[str, LeaseTime]) -> JobStatus:
    """The same status, with the leases of the members that are named here."""
    rounds, quorum = status.rounds, status.quorum
    if rounds is not None:
        rounds = replace(rounds, members=tuple(_with_lease(one, leases.get(one.member)) for one in rounds.members))
    if quorum is not None:
        quorum = replace(quorum, replicas=tuple(_with_lease(one, leases.get(one.member)) for one in quorum.replicas))
    return replace(status, rounds=rounds, quorum=quorum)


def _with_lease(one: Member, lease: LeaseTime | None) -> Member:
    return one if lease is None else replace(one, lease_left=lease.left, lease_ttl=lease.ttl)
