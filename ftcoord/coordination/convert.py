"""Converts quorum records to torchft's values and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from ftcoord.coordination import checks
from ftcoord.coordination.tokens import without_token
from ftcoord.coordination.types import Quorum as QuorumReply
from ftcoord.coordination.types import QuorumMember, QuorumResult, Timestamp
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest
from ftcoord.core.recovery import recovery


def quorum_reply(quorum: QuorumRecord) -> QuorumReply:
    """A quorum as a value of torchft's API."""
    return QuorumReply(quorum.id, partial(_members, quorum), timestamp(quorum))


def timestamp(quorum: QuorumRecord) -> Timestamp:
    """When a quorum was decided, on the decider's wall clock."""
    seconds, fraction = divmod(quorum.created, 1)
    return Timestamp(int(seconds), int(fraction * 1e9))


def _members(quorum: QuorumRecord) -> list[QuorumMember]:
    return [_member(request) for request in quorum.requests]


def _member(request: QuorumRequest) -> QuorumMember:
    return QuorumMember(
        request.replica_id,
        without_token(request.address),
        request.store_address,
        request.step,
        request.world_size,
        request.shrink_only,
        json.loads(request.data) if request.data else None,
    )


def quorum_result(quorum: QuorumRecord, replica_id: str, rank: int, init_sync: bool) -> QuorumResult:
    """What a quorum means for one rank of a replica. Raises NotInQuorum."""
    plan = recovery(quorum.requests, replica_id, rank, init_sync)
    result = QuorumResult()
    result.quorum_id = quorum.id
    result.replica_rank, result.replica_world_size = plan.replica_rank, plan.replica_world_size
    result.recover_src_manager_address = plan.recover_src_manager_address
    result.recover_src_replica_rank = plan.recover_src_replica_rank
    result.recover_dst_replica_ranks = list(plan.recover_dst_replica_ranks)
    result.store_address = plan.store_address
    result.max_step, result.max_world_size = plan.max_step, plan.max_world_size
    result.max_replica_rank, result.heal = plan.max_replica_rank, plan.heal
    result.replica_ids = list(plan.replica_ids)
    result.reconfigure_handles = list(plan.reconfigure_handles)
    return result


def result_fields(result: QuorumResult) -> dict[str, Any]:
    """The fields of a result, for JSON."""
    return {name: getattr(result, name) for name in QuorumResult.__slots__}


def result_of(fields: Mapping[str, Any]) -> QuorumResult:
    """The result with the fields that `result_fields` returned. Raises AttributeError for other names."""
    result = QuorumResult()
    for name, value in fields.items():
        setattr(result, name, value)
    return result


def json_text(data: Mapping[Any, Any] | None) -> str:
    """The `data` of a request as JSON. Raises TypeError if it is not a dict, RuntimeError if JSON cannot represent
    it."""
    if data is None:
        return ""
    if not isinstance(data, dict):
        raise TypeError(f"argument 'data': {type(data).__name__!r} object cannot be converted to 'PyDict'")
    try:
        return json.dumps(data)
    except (TypeError, ValueError) as error:
        raise checks.failed("Internal", f"{type(error).__name__}: {error}") from None
