"""What a quorum means for one rank of one replica: its place, and which replica heals from which. torchft's rules,
pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest
from ftcoord.errors import NotInQuorum


@dataclass(slots=True)
class QuorumResult:
    """What a quorum means for one rank: its place, and which replicas heal from which. The fields are torchft's.

    Args:
        quorum_id: see `ftcoord.coordination.Quorum`.
        replica_rank, replica_world_size: this replica's rank among all members, and their number.
        recover_src_manager_address, recover_src_replica_rank: the replica to fetch the weights from, if `heal`.
        recover_dst_replica_ranks: the replicas that fetch the weights from this one.
        store_address: the store where the ranks of all replicas meet; the same for all with this group rank.
        max_step: the highest step of any member.
        max_replica_rank, max_world_size: this replica's rank among the members at that step (None if it is at an
            earlier one), and their number.
        heal: whether this replica must fetch the weights first.
        replica_ids: the ids of all members, in rank order.
        reconfigure_handles: the handle that this rank of each member sent, in rank order (torchft's nightly builds).
    """

    quorum_id: int = 0
    replica_rank: int = 0
    replica_world_size: int = 1
    recover_src_manager_address: str = ""
    recover_src_replica_rank: int | None = None
    recover_dst_replica_ranks: list[int] = field(default_factory=list)
    store_address: str = ""
    max_step: int = 0
    max_replica_rank: int | None = None
    max_world_size: int = 1
    heal: bool = False
    replica_ids: list[str] = field(default_factory=list)
    reconfigure_handles: list[str] = field(default_factory=list)


def quorum_result(quorum: QuorumRecord, replica_id: str, rank: int, init_sync: bool) -> QuorumResult:
    """What a quorum means for the group rank `rank` of a replica. Raises NotInQuorum.

    Args:
        init_sync: whether all replicas load the state of one replica before the first step.
    """
    group = sorted(quorum.requests, key=lambda one: one.replica_id)
    names = [one.replica_id for one in group]
    if replica_id not in names:
        raise NotInQuorum(replica_id)
    me = names.index(replica_id)
    top = max(one.step for one in group)
    leaders = [place for place, one in enumerate(group) if one.step == top]
    primary = leaders[rank % len(leaders)]
    sources = _sources(len(group), [primary] if init_sync and top == 0 else leaders, rank)
    source = sources.get(me)
    return QuorumResult(
        quorum_id=quorum.id,
        replica_rank=me,
        replica_world_size=len(group),
        recover_src_manager_address="" if source is None else group[source].address,
        recover_src_replica_rank=source,
        recover_dst_replica_ranks=[place for place, source in sources.items() if source == me],
        store_address=group[primary].store_address,
        max_step=top,
        max_replica_rank=leaders.index(me) if me in leaders else None,
        max_world_size=len(leaders),
        heal=source is not None,
        replica_ids=names,
        reconfigure_handles=[one.handles[rank] if rank < len(one.handles) else "" for one in group],
    )


def result_fields(result: QuorumResult) -> dict[str, Any]:
    """The fields of a result, for JSON. `QuorumResult(**fields)` is the result again."""
    return {name: getattr(result, name) for name in QuorumResult.__slots__}


def heals_from(quorum_requests: Sequence[QuorumRequest], rank: int) -> dict[str, str]:
    """For each replica that is behind, by name: the replica from which its group rank `rank` heals."""
    group = sorted(quorum_requests, key=lambda one: one.replica_id)
    top = max((one.step for one in group), default=0)
    leaders = [place for place, one in enumerate(group) if one.step == top]
    found = _sources(len(group), leaders, rank)
    return {group[place].replica_id: group[source].replica_id for place, source in found.items()}


def _sources(size: int, fresh: Sequence[int], rank: int) -> dict[int, int]:
    """For each place that is behind, ascending: the place it heals from; a different one for each rank, to spread the
    load."""
    up_to_date = set(fresh)
    behind = [place for place in range(size) if place not in up_to_date]
    return {place: fresh[(index + rank) % len(fresh)] for index, place in enumerate(behind)}
