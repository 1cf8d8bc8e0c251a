"""torchft's lighthouse protocol as bytes: the messages of its gRPC service, and what they mean here.

Field numbers are those that torchft 0.2.0 and its nightly builds (9, the handles) send and accept.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.message import DecodeError

from ftcoord.coordination.convert import timestamp
from ftcoord.core.manager_address import parted
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest, data_problem
from ftcoord.etcd.messages import declare

SERVICE: Final = "torchft.LighthouseService"

_MESSAGES: Final = declare(
    "ftcoord.torchft",
    {
        "QuorumMember": "replica_id 1 string, address 2 string, store_address 3 string, step 4 int64,"
        " world_size 5 uint64, shrink_only 6 bool, data 7 string, commit_failures 8 int64, handles 9 string*",
        "Timestamp": "seconds 1 int64, nanos 2 int32",
        "Quorum": "quorum_id 1 int64, participants 2 QuorumMember*, created 3 Timestamp",
        "LighthouseQuorumRequest": "requester 1 QuorumMember",
        "LighthouseQuorumResponse": "quorum 1 Quorum",
        "LighthouseHeartbeatRequest": "replica_id 1 string",
        "LighthouseHeartbeatResponse": "",
    },
)
HEARTBEAT_RESPONSE: Final[bytes] = _MESSAGES["LighthouseHeartbeatResponse"]().SerializeToString()


def read_quorum_request(message: bytes) -> QuorumRequest:
    """A replica's request. Raises ValueError for a message, or for `data` in it, that other replicas could not read."""
    asked = _read("LighthouseQuorumRequest", message)
    if not asked.HasField("requester"):
        raise ValueError("the request names no requester")
    member = asked.requester
    if problem := data_problem(member.data):
        raise ValueError(f"the data of the request is no JSON object: {problem}")
    return QuorumRequest(
        replica_id=member.replica_id,
        address=member.address,
        store_address=member.store_address,
        step=member.step,
        world_size=member.world_size,
        shrink_only=member.shrink_only,
        data=member.data,
        commit_failures=member.commit_failures,
        handles=tuple(member.handles),
    )


def read_heartbeat(message: bytes) -> str:
    """The replica id of a heartbeat. Raises ValueError."""
    return str(_read("LighthouseHeartbeatRequest", message).replica_id)


def quorum_response(quorum: QuorumRecord) -> bytes:
    """The answer to all members of a quorum."""
    at = timestamp(quorum)
    created = _MESSAGES["Timestamp"](seconds=at.seconds, nanos=at.nanos)
    members = [_member(request) for request in quorum.requests]
    message = _MESSAGES["Quorum"](quorum_id=quorum.id, participants=members, created=created)
    return bytes(_MESSAGES["LighthouseQuorumResponse"](quorum=message).SerializeToString())


def _member(request: QuorumRequest) -> Any:
    return _MESSAGES["QuorumMember"](
        replica_id=request.replica_id,
        address=parted(request.address)[0],  # who calls a gateway has shown no right to a token
        store_address=request.store_address,
        step=request.step,
        world_size=request.world_size,
        shrink_only=request.shrink_only,
        data=request.data,
        commit_failures=request.commit_failures,
        handles=request.handles,
    )


def _read(kind: str, message: bytes) -> Any:
    try:
        return _MESSAGES[kind].FromString(message)
    except DecodeError as error:
        raise ValueError(f"this is not a {kind}: {error}") from error
