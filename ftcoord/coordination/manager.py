"""torchft's ManagerServer: represents a replica group in the quorums of its job, and answers the group's ranks.

The API is that of `torchft.coordination` (https://docs.pytorch.org/torchft/coordination.html), 0.2.0 and nightly.
"""

from __future__ import annotations

from datetime import timedelta

from ftcoord import concurrency
from ftcoord.coordination import checks
from ftcoord.coordination.managed_group import GroupIdentity, ManagedGroup


class ManagerServer:
    """Represents a replica group in the quorums of its job. It listens for the group's ranks, and for peers that fetch
    the group's weights; both may use ftcoord or torchft's native classes.

    Args:
        replica_id: the group's name; no two groups may have the same.
        lighthouse_addr: the job's address, see `LighthouseClient`.
        hostname: the name or address by which others reach this host; for `address()`.
        bind: where to listen, such as `10.0.0.7:29512` or `0.0.0.0:0`; port 0 takes a free one. `[::]`, which torchft's
            Manager gives, stands for the address of `hostname`; to listen everywhere, the job's address has `bind=::`.
        store_addr: `host:port` of the store of its ranks.
        world_size: the number of its ranks.
        heartbeat_interval: a timedelta, checked and not used: its lease is renewed at a third of its TTL.
        connect_timeout: how long to wait for etcd, a timedelta.
        quorum_retries: accepted, but not used: a request for a quorum is repeated until its timeout, whatever fails.

    Raises TypeError, ValueError and OverflowError for bad arguments, ConfigError for a malformed address. Raises
    RuntimeError when it cannot listen, and when etcd does not answer within `connect_timeout`. A manager that nobody
    refers to is shut down. If one of its threads fails with an unexpected error, the error is logged and the manager
    leaves the job, so its ranks see that it is gone.
    """

    def __init__(
        self,
        replica_id: str,
        lighthouse_addr: str,
        hostname: str,
        bind: str,
        store_addr: str,
        world_size: int,
        heartbeat_interval: timedelta,
        connect_timeout: timedelta,
        quorum_retries: int,
    ) -> None:
        checks.seconds("heartbeat_interval", heartbeat_interval)
        checks.integer("quorum_retries", quorum_retries, -checks.LARGEST - 1)
        identity = GroupIdentity(
            replica_id=checks.string("replica_id", replica_id),
            hostname=checks.string("hostname", hostname),
            store_address=checks.string("store_addr", store_addr),
            world_size=checks.integer("world_size", world_size),
        )
        self._group = ManagedGroup(
            identity,
            checks.string("lighthouse_addr", lighthouse_addr),
            checks.string("bind", bind),
            checks.seconds("connect_timeout", connect_timeout),
        )
        self._cancel_close = concurrency.when_forgotten(self, self._group.close)

    def address(self) -> str:
        """`http://hostname:port#token`, for ManagerClient. Whoever knows it can act as a rank of this group: it belongs
        into no log. torchft's own classes take it too, and do not use the token."""
        return self._group.address

    def shutdown(self) -> None:
        """Leave the job, and close the port. Idempotent; does nothing in a forked child."""
        self._cancel_close()
        self._group.close()
