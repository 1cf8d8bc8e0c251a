"""What a quorum means for one rank of one replica: its place, and which replica heals from which. torchft's rules,
pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ftcoord.core.quorum_records import QuorumRequest
from ftcoord.errors import NotInQuorum


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a quorum means for one rank of one replica. The names are those of torchft's QuorumResult.

    Args:
        replica_rank: its place among all participants, of which there are `replica_world_size`.
        recover_src_manager_address, recover_src_replica_rank: the replica to heal from; empty and None if not `heal`.
        recover_dst_replica_ranks: the replicas that heal from this one, ascending.
        store_address: the store in which this rank meets its peers; one for all replicas.
        max_step: the highest step in the quorum.
        max_replica_rank: its place among the `max_world_size` participants at that step; None if it is behind.
        heal: its state differs from that of the others: load theirs before the step.
        replica_ids: the ids of all participants, in order.
        reconfigure_handles: this rank's handle at each participant, in order; empty where there is none.
        commit_failures: the highest number that any participant reports.
    """

    replica_rank: int
    replica_world_size: int
    recover_src_manager_address: str
    recover_src_replica_rank: int | None
    recover_dst_replica_ranks: tuple[int, ...]
    store_address: str
    max_step: int
    max_replica_rank: int | None
    max_world_size: int
    heal: bool
    replica_ids: tuple[str, ...]
    reconfigure_handles: tuple[str, ...]
    commit_failures: int


def recovery(quorum_requests: Sequence[QuorumRequest], replica_id: str, rank: int, init_sync: bool) -> Recovery:
    """What a quorum means for the group rank `rank` of a replica. Raises NotInQuorum.

    Args:
        quorum_requests: the requests of all participants, in any order.
        init_sync: whether all replicas load the state of one replica before the first step.
    """
    group = sorted(quorum_requests, key=lambda one: one.replica_id)
    names = tuple(one.replica_id for one in group)
    if replica_id not in names:
        raise NotInQuorum(replica_id)
    me = names.index(replica_id)
    top = max(one.step for one in group)
    leaders = [place for place, one in enumerate(group) if one.step == top]
    primary = leaders[rank % len(leaders)]
    sources = _sources(len(group), [primary] if init_sync and top == 0 else leaders, rank)
    source = sources.get(me)
    return Recovery(
        replica_rank=me,
        replica_world_size=len(group),
        recover_src_manager_address="" if source is None else group[source].address,
        recover_src_replica_rank=source,
        recover_dst_replica_ranks=tuple(place for place, source in sources.items() if source == me),
        store_address=group[primary].store_address,
        max_step=top,
        max_replica_rank=leaders.index(me) if me in leaders else None,
        max_world_size=len(leaders),
        heal=source is not None,
        replica_ids=names,
        reconfigure_handles=tuple(one.handles[rank] if rank < len(one.handles) else "" for one in group),
        commit_failures=max(one.commit_failures for one in group),
    )


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
