"""Leases that end when a test wants it, on any etcd."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from ftcoord.embedded.cluster import EtcdCluster
    from ftcoord.embedded.server import EtcdServer
    from ftcoord.etcd.api import Etcd, Lease
    from ftcoord.primitives.session import Session
    from ftcoord.testing.etcd import MemoryEtcd

    AnyEtcd: TypeAlias = Etcd | EtcdServer | EtcdCluster | MemoryEtcd
    AnyLease: TypeAlias = int | str | Lease | Session


def expire_lease(etcd: AnyEtcd, lease: AnyLease) -> None:
    """End a lease at once, and its keys with it, as if nobody had renewed it for its whole TTL.

    If this process keeps the lease alive, it is renewed right away: so its holder hears that it is lost within
    milliseconds, and not when the next renewal is due.

    Args:
        etcd: an EtcdServer, an EtcdCluster, a MemoryEtcd, or a client of whichever etcd.
        lease: a Session, a Lease, the id of a lease, or a key that lies under it.

    Raises ValueError if there is no such key, or it lies under no lease, and EtcdError.
    """
    from ftcoord.primitives.renewal import Renewer

    with contextlib.ExitStack() as stack:
        client = _client(etcd, stack)
        lease_id = _lease_of(client, lease) if isinstance(lease, str) else _id_of(lease)
        client.revoke(lease_id)
    Renewer.of_process().renew_soon(lease_id)


def _client(etcd: Any, stack: contextlib.ExitStack) -> Etcd:
    """The client that was given, or one of the server that was."""
    from ftcoord.testing.etcd import MemoryEtcd

    if isinstance(etcd, MemoryEtcd):
        client: Etcd = stack.enter_context(etcd.client())
    elif hasattr(etcd, "endpoints"):  # a cluster
        from ftcoord.etcd.client import EtcdClient

        client = stack.enter_context(EtcdClient(etcd.endpoints))
    elif hasattr(etcd, "get_client"):  # a server
        client = stack.enter_context(etcd.get_client())
    else:
        client = etcd
    return client


def _id_of(lease: Any) -> int:
    if isinstance(lease, int):
        return lease
    return int(lease.lease_id if hasattr(lease, "lease_id") else lease.id)


def _lease_of(client: Etcd, key: str) -> int:
    from ftcoord.etcd.api import Get, Span

    kv = client.range(Get(Span(key))).one
    if kv is None or not kv.lease:
        raise ValueError(f"etcd key {key!r} {'lies under no lease' if kv else 'does not exist'}: nothing can expire")
    return kv.lease
