"""torchft's manager protocol as bytes: the messages of its gRPC service, for both ends.

Field numbers are those of torchft 0.2.0; its nightly builds add fields.
"""

from __future__ import annotations

import re
from typing import Any, Final

from google.protobuf.message import DecodeError

from ftcoord.coordination.types import QuorumResult
from ftcoord.core.manager_address import parted
from ftcoord.etcd.messages import declare
from ftcoord.etcd.quiet_grpc import grpc

MANAGER_SERVICE: Final = "torchft.ManagerService"

_MESSAGES: Final = declare(
    "ftcoord.torchft.manager",
    {
        "ManagerQuorumRequest": "group_rank 1 int64, step 2 int64, checkpoint_metadata 3 string, shrink_only 4 bool,"
        " init_sync 5 bool, commit_failures 6 int64",
        "ManagerQuorumResponse": "quorum_id 1 int64, recover_src_manager_address 2 string,"
        " recover_src_replica_rank 3 int64?src, recover_dst_replica_ranks 4 int64*, store_address 5 string,"
        " max_step 6 int64, max_replica_rank 7 int64?max, max_world_size 8 int64, replica_rank 9 int64,"
        " replica_world_size 10 int64, heal 11 bool, commit_failures 12 int64, replica_ids 13 string*",
        "CheckpointMetadataRequest": "rank 1 int64",
        "CheckpointMetadataResponse": "checkpoint_metadata 1 string",
        "ShouldCommitRequest": "should_commit 1 bool, group_rank 2 int64, step 3 int64",
        "ShouldCommitResponse": "should_commit 1 bool",
        "KillRequest": "msg 1 string",
        "KillResponse": "",
    },
)
STATUS_CODES: Final = {
    re.sub(r"(?:^|_)(.)([^_]*)", lambda part: part[1] + part[2].lower(), code.name): code for code in grpc.StatusCode
}
"""gRPC's statuses by the names that torchft's users see, such as `InvalidArgument`."""
_PLAIN: Final = (
    *("quorum_id", "recover_src_manager_address", "store_address", "max_step", "max_world_size"),
    *("replica_rank", "replica_world_size", "heal"),
)
_OPTIONAL: Final = ("recover_src_replica_rank", "max_replica_rank")
_LISTS: Final = ("recover_dst_replica_ranks", "replica_ids")


def write(kind: str, **fields: Any) -> bytes:
    """A message of this kind."""
    return bytes(_MESSAGES[kind](**fields).SerializeToString())


def read(kind: str, message: bytes) -> Any:
    """The fields of a message, as attributes. Raises ValueError."""
    try:
        return _MESSAGES[kind].FromString(message)
    except DecodeError as error:
        raise ValueError(f"this is not a {kind}: {error}") from error


def write_result(result: QuorumResult, commit_failures: int) -> bytes:
    """The answer to one rank, without a token: native ranks have shown none. `commit_failures` is the highest number
    of any replica."""
    fields = {name: getattr(result, name) for name in (*_PLAIN, *_LISTS)}
    fields["recover_src_manager_address"] = parted(result.recover_src_manager_address)[0]
    fields |= {name: value for name in _OPTIONAL if (value := getattr(result, name)) is not None}
    return write("ManagerQuorumResponse", commit_failures=commit_failures, **fields)


def read_result(message: bytes) -> QuorumResult:
    """A manager's answer to a rank. Raises ValueError."""
    told, result = read("ManagerQuorumResponse", message), QuorumResult()
    for name in _PLAIN:
        setattr(result, name, getattr(told, name))
    for name in _OPTIONAL:
        setattr(result, name, getattr(told, name) if told.HasField(name) else None)
    for name in _LISTS:
        setattr(result, name, list(getattr(told, name)))
    return result
