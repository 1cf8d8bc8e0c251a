"""Replicas that are only keys of an etcd in memory."""

from __future__ import annotations

import builders
from virtual import MemoryClient

from ftcoord.core import quorum_records
from ftcoord.core.layout import member_id, member_key, quorum_prefix

PREFIX = quorum_prefix("/f", "job")


def join(client: MemoryClient, name: str) -> int:
    """A replica of that name joins; its lease."""
    lease = client.grant(600).id
    request = builders.request(name, address=f"http://{name}:1", store_address="s", step=1)
    record = quorum_records.encode(builders.replica(request, after=1))
    client.put(member_key(PREFIX, member_id(lease)), record, lease)
    return lease
