"""What a quorum means for one rank of one replica: its place, and who heals from whom. torchft's rules, pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ftcoord.core.quorum_records import QuorumRequest
from ftcoord.errors import NotInQuorum


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a quorum means for one rank of one replica; the names are those of torchft's QuorumResult.

    Args:
        replica_rank: its place among all participants, of which there are `replica_world_size`.
        recover_src_manager_address, recover_src_replica_rank: whom to heal from; empty and None if not `heal`.
        recover_dst_replica_ranks: who heals from this replica, ascending.
        store_address: the store in which this rank meets its peers; one for all replicas.
        max_step: the highest step in the quorum.
        max_replica_rank: its place among the `max_world_size` participants at that step; None when it is behind.
        heal: its state is not what the others have: load it before the step.
        replica_ids: of all participants, in order.
        reconfigure_handles: of this rank, of all participants, in order; empty where one has none.
        commit_failures: the most that any participant reports.
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
        quorum_requests: of all participants, in any order.
        init_sync: before the first step, all take over the state of one replica.
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
    """Whom the group rank `rank` of each replica that is behind heals from, by their names."""
    group = sorted(quorum_requests, key=lambda one: one.replica_id)
    top = max((one.step for one in group), default=0)
    leaders = [place for place, one in enumerate(group) if one.step == top]
    found = _sources(len(group), leaders, rank)
    return {group[place].replica_id: group[source].replica_id for place, source in found.items()}


def _sources(size: int, fresh: Sequence[int], rank: int) -> dict[int, int]:
    """Whom each of those that are behind heals from, ascending; another one for each rank, to spread the load."""
    up_to_date = set(fresh)
    behind = [place for place in range(size) if place not in up_to_date]
    return {place: fresh[(index + rank) % len(fresh)] for index, place in enumerate(behind)}
