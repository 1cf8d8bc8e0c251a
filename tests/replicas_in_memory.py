"""Replicas that are only keys of an etcd in memory."""

from __future__ import annotations

from virtual import MemoryClient

from ftcoord.core import quorum_records
from ftcoord.core.layout import member_id, member_key, quorum_prefix
from ftcoord.core.quorum_records import QuorumRequest, ReplicaRecord

PREFIX = quorum_prefix("/f", "job")


def join(client: MemoryClient, name: str) -> int:
    """A replica of that name joins; its lease."""
    lease = client.grant(600).id
    request = QuorumRequest(name, f"http://{name}:1", "s", 1, 1, False, "", 0, ())
    record = quorum_records.encode(ReplicaRecord(request, 0, 1, 0))
    client.put(member_key(PREFIX, member_id(lease)), record, lease)
    return lease
