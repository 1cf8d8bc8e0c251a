"""The quorums of a job, from its keys: who trains, who asks, and why there is no next quorum. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ftcoord.core.layout import member_of
from ftcoord.core.manager_address import parted
from ftcoord.core.quorum import QuorumCandidate, QuorumOptions, QuorumSituation, attendance, decide, failing
from ftcoord.core.quorum_head import parse_quorum
from ftcoord.core.quorum_records import Profile, QuorumRecord, ReplicaRecord, parse_replica
from ftcoord.core.recovery import heals_from
from ftcoord.core.verdict import Publish
from ftcoord.errors import StateError
from ftcoord.etcd.api import KeyValue
from ftcoord.operator.job_keys import GroupKeys, OddKey, by_kind, read_member
from ftcoord.operator.told import MissingReplica, NextDecision, QuorumStatus, ReplicaStatus, Unreadable

LOOKED_AT: Final = 0.0
"""The time of a look: everything counts as first seen now, since keys do not record when they were written."""


@dataclass(frozen=True, slots=True)
class _Record:
    """What a member's key says."""

    member: str
    said: ReplicaRecord
    kv: KeyValue

    @property
    def key(self) -> str:
        return self.kv.key

    @property
    def highest(self) -> int:
        return self.said.highest


@dataclass(frozen=True, slots=True)
class _Replica:
    record: _Record
    one: QuorumCandidate

    @property
    def name(self) -> str:
        return self.one.request.replica_id

    @property
    def since(self) -> int:
        return self.record.kv.create_revision


def tell_quorums(keys: GroupKeys, options: QuorumOptions) -> tuple[QuorumStatus, list[Unreadable]]:
    """The state of a job's quorums, and the keys that are not counted in it.

    Args:
        options: the options of the job's address. The replicas' records have its min_replicas: the largest one counts,
            also against this one.
    """
    records, odd = by_kind(map(_read_record, keys.below_members))
    try:
        previous = _last_quorum(keys)
        number = max(previous.number, previous.id) if previous else 0
        records, uncounted = keys.counted(number, records)
    except StateError as error:
        unreadable = [*(one.told for one in odd), Unreadable(error.key, str(error))]
        withheld = NextDecision("withheld", str(error))
        statuses = _statuses(None, [_replica(one, {}) for one in records])
        return _told("unreadable", None, options, withheld, statuses, ()), unreadable
    odd = [*odd, *uncounted]
    fewest = max([options.min_replicas, *(one.said.min_replicas for one in records)])
    options = replace(options, min_replicas=fewest)
    profiles = previous.profiles if previous else {}  # those that replicas may have left out
    replicas = [_replica(one, profiles) for one in records]
    live = [replica.one for replica in replicas]
    unheard = sum(bool(one.member) for one in odd)
    situation = QuorumSituation(live, previous, LOOKED_AT, unreadable=unheard)
    statuses = _statuses(previous, replicas)
    missing = _missing(previous, replicas, keys.causes())
    next_ = _for_people(_next(situation, options), previous, statuses, fewest)
    next_ = replace(next_, reason=keys.with_last_death(next_.reason))
    told = _told(_state(previous, statuses), previous, options, next_, statuses, missing)
    return told, [one.told for one in odd]


def _last_quorum(keys: GroupKeys) -> QuorumRecord | None:
    """None before the first. Raises StateError."""
    if keys.decided is None:
        return None
    return parse_quorum(keys.decided.key, keys.decided.value, keys.roster.value if keys.roster else None)


def _read_record(kv: KeyValue) -> _Record | OddKey:
    return read_member(kv, lambda key, value: _Record(member_of(key), parse_replica(key, value), kv))


def _replica(record: _Record, profiles: Mapping[str, Profile]) -> _Replica:
    kv = record.kv
    at = kv.create_revision, kv.mod_revision, kv.mod_revision
    return _Replica(record, QuorumCandidate.of(record.member, record.said, profiles, LOOKED_AT, *at))


def _next(situation: QuorumSituation, options: QuorumOptions) -> NextDecision:
    verdict = decide(situation, options, LOOKED_AT)
    if not isinstance(verdict, Publish):
        return NextDecision("wait", verdict.reason, verdict.rule)
    return NextDecision("publish", verdict.reason, verdict.rule)


def _for_people(
    next_: NextDecision, previous: QuorumRecord | None, statuses: Sequence[ReplicaStatus], fewest: int
) -> NextDecision:
    """The same decision, with what somebody has to do about it."""
    live = len({status.replica_id for status in statuses})
    asking = {status.replica_id for status in statuses if status.standing == "asking"}
    if next_.decision == "wait" and (live < fewest or not asking):
        more = f"; start {fewest - live} more" if live < fewest else ""
        next_ = replace(next_, reason=f"{attendance([*asking], live, fewest)}{more}")
    trouble = failing(previous, fewest) if previous is not None else ""
    return replace(next_, reason=f"{next_.reason}; {trouble}") if trouble else next_


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
                parted(request.address)[0],
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
    commits = quorum is None or not failing(quorum, options.min_replicas)
    return QuorumStatus(
        state,
        state != "unreadable" and is_enough and commits and not missing and next_.decision != "withheld",
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
