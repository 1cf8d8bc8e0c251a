"""The quorums of a job, from its keys: who trains, who asks, and why there is no next quorum. Pure.

A replica counts as alive while its lease lives. If heartbeats are judged by writes (timeouts below 3 s), only the
decider knows who is silent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ftcoord.core.invariants import InvariantBroken, check_quorum
from ftcoord.core.layout import member_of
from ftcoord.core.quorum import QuorumCandidate, QuorumOptions, QuorumSituation, decide
from ftcoord.core.quorum_head import parse_quorum
from ftcoord.core.quorum_records import Profile, QuorumRecord, parse_replica
from ftcoord.core.recovery import heals_from
from ftcoord.core.verdict import Publish
from ftcoord.errors import StateError
from ftcoord.operator.job_keys import GroupKeys
from ftcoord.operator.told import MissingReplica, NextDecision, QuorumStatus, ReplicaStatus, Unreadable

LOOKED_AT: Final = 0.0
"""The time of a look: everything counts as first seen now, since keys do not record when they were written."""


@dataclass(frozen=True, slots=True)
class _Replica:
    one: QuorumCandidate
    since: int

    @property
    def name(self) -> str:
        return self.one.request.replica_id


def tell_quorum(keys: GroupKeys, options: QuorumOptions) -> tuple[QuorumStatus, list[Unreadable]]:
    """The state of a job's quorums, and the keys that do not count.

    Args:
        options: the options of the job's address, which etcd does not have.
    """
    try:
        previous = _last_quorum(keys)
    except StateError as error:
        replicas, unreadable = _replicas(keys, {})
        unreadable.append(Unreadable(error.key, str(error)))
        withheld = NextDecision("withheld", str(error))
        return _told("unreadable", None, options, withheld, _statuses(None, replicas), ()), unreadable
    replicas, unreadable = _replicas(keys, previous.profiles if previous else {})
    live = [replica.one for replica in replicas]
    situation = QuorumSituation(live, previous, LOOKED_AT, unreadable=len(keys.members()) - len(live))
    missing = _missing(previous, replicas, keys.causes())
    next_ = _next(situation, options)
    statuses = _statuses(previous, replicas)
    return _told(_state(previous, statuses), previous, options, next_, statuses, missing), unreadable


def _last_quorum(keys: GroupKeys) -> QuorumRecord | None:
    """The last quorum. Raises StateError."""
    if keys.decided is None:
        return None
    return parse_quorum(keys.decided.key, keys.decided.value, keys.roster.value if keys.roster else None)


def _replicas(keys: GroupKeys, profiles: Mapping[str, Profile]) -> tuple[list[_Replica], list[Unreadable]]:
    """Oldest first."""
    found, unreadable = list[_Replica](), keys.strangers()
    for kv in keys.members():
        try:
            record = parse_replica(kv.key, kv.value)
        except StateError as error:
            unreadable.append(Unreadable(kv.key, str(error)))
            continue
        at = kv.create_revision, kv.mod_revision, kv.mod_revision
        found.append(_Replica(QuorumCandidate.of(member_of(kv.key), record, profiles, LOOKED_AT, *at), at[0]))
    return found, unreadable


def _next(situation: QuorumSituation, options: QuorumOptions) -> NextDecision:
    verdict = decide(situation, options, LOOKED_AT)
    if not isinstance(verdict, Publish):
        return NextDecision("wait", verdict.reason, verdict.rule)
    try:
        check_quorum(situation, options, verdict.record)
    except InvariantBroken as error:
        return NextDecision("withheld", f"{verdict.reason}; that would break {error}", verdict.rule)
    return NextDecision("publish", verdict.reason, verdict.rule)


def _missing(
    previous: QuorumRecord | None, replicas: Sequence[_Replica], causes: Mapping[str, str]
) -> tuple[MissingReplica, ...]:
    """By name: a replica may have another lease since."""
    live = {replica.name for replica in replicas}
    seats = enumerate(previous.seats) if previous else ()
    return tuple(
        MissingReplica(rank, seat.request.replica_id, seat.member, causes.get(seat.member, ""))
        for rank, seat in seats
        if seat.request.replica_id not in live
    )


def _statuses(previous: QuorumRecord | None, replicas: Sequence[_Replica]) -> tuple[ReplicaStatus, ...]:
    newest = {replica.name: replica.one.member for replica in replicas}
    ranks = {seat.request.replica_id: rank for rank, seat in enumerate(previous.seats)} if previous else {}
    steps = {seat.request.replica_id: seat.request.step for seat in previous.seats} if previous else {}
    sources = heals_from([seat.request for seat in previous.seats], 0) if previous else {}
    answered = previous.answered if previous else {}
    top = max(steps.values(), default=0)
    told = []
    for replica in replicas:
        one, request = replica.one, replica.one.request
        is_newest = newest[replica.name] == one.member
        rank = ranks.get(replica.name) if is_newest else None
        told.append(
            ReplicaStatus(
                rank,
                replica.name,
                one.member,
                _standing(one, answered, rank) if is_newest else "replaced",
                request.step,
                top - steps[replica.name] if rank is not None else 0,
                request.commit_failures,
                request.shrink_only,
                request.world_size,
                request.address,
                replica.since,
                heals_from=sources.get(replica.name, "") if rank is not None else "",
                store_address=request.store_address,
            )
        )
    return tuple(sorted(told, key=lambda status: (status.rank is None, status.rank or 0)))


def _standing(one: QuorumCandidate, answered: Mapping[str, int], rank: int | None) -> str:
    if one.asked > answered.get(one.member, 0):
        return "asking" if one.is_whole else "unclear"
    return "idle" if rank is None else "training"


def _state(previous: QuorumRecord | None, statuses: Sequence[ReplicaStatus]) -> str:
    if any(status.standing in ("asking", "unclear") for status in statuses):
        return "forming"
    return "training" if statuses and previous is not None else "idle" if statuses else "empty"


def _told(
    state: str,
    quorum: QuorumRecord | None,
    options: QuorumOptions,
    next_: NextDecision,
    statuses: tuple[ReplicaStatus, ...],
    missing: tuple[MissingReplica, ...],
) -> QuorumStatus:
    alive = len({status.replica_id for status in statuses})
    is_enough = alive >= max(options.min_replicas, 1)
    return QuorumStatus(
        state,
        state != "unreadable" and is_enough and not missing and next_.decision != "withheld",
        quorum.number if quorum else 0,
        quorum.id if quorum else 0,
        len(quorum.seats) if quorum else 0,
        max((seat.request.step for seat in quorum.seats), default=0) if quorum else 0,
        quorum.created if quorum else 0.0,
        options.min_replicas,
        next_,
        statuses,
        missing,
    )
