"""torchft's lighthouse API without a lighthouse: the clients decide quorums among themselves, through etcd.

The API is that of `torchft.coordination` (https://docs.pytorch.org/torchft/coordination.html), 0.2.0 and nightly.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

from ftcoord import concurrency
from ftcoord.coordination import checks
from ftcoord.coordination.address import Job, fresh_name
from ftcoord.coordination.connection import check_process, connect, torchft_errors
from ftcoord.coordination.kills import order_kill
from ftcoord.coordination.replica import Replica
from ftcoord.coordination.types import Quorum, json_text, quorum_reply
from ftcoord.core.quorum_records import QuorumRequest
from ftcoord.etcd.client import SharedClient

SERVER_CONNECT_TIMEOUT: Final = timedelta(seconds=10)
"""How long a new LighthouseServer waits for etcd."""
LEAVE_TIMEOUT: Final = 2.0
"""Seconds that leaving may take. After that the replicas' leases expire."""


class LighthouseServer:
    """Makes the address of a new job, with the rules of its quorums. It is no server: the job's state is in etcd.

    The address contains all of the rules, so this object and its process may end at any time. The endpoints come from
    FTCOORD_ENDPOINTS, else from ETCDCTL_ENDPOINTS, else 127.0.0.1:2379.

    Args:
        bind: `host:port`, as torchft takes it; checked, but not used.
        min_replicas: the fewest replicas that form a quorum.
        join_timeout_ms: how long a quorum waits for replicas that are alive but do not ask, in milliseconds. The
            default is 100, as in torchft; an address without this option has 60000.
        quorum_tick_ms: accepted, but not used: decisions follow events.
        heartbeat_timeout_ms: how long a replica counts as alive after its last beat, in milliseconds; default 5000.
            Below 3000 only a client judges its own replicas by it, and a gateway its own; leases live for 3 s.

    Raises TypeError and OverflowError for arguments of a wrong type or size, and RuntimeError for a bad `bind` or
    value, or when etcd does not answer within 10 s.
    """

    def __init__(
        self,
        bind: str,
        min_replicas: int,
        join_timeout_ms: int | None = None,
        quorum_tick_ms: int | None = None,
        heartbeat_timeout_ms: int | None = None,
    ) -> None:
        _check_bind(checks.string("bind", bind))
        checks.integer("quorum_tick_ms", 100 if quorum_tick_ms is None else quorum_tick_ms)
        job = Job(
            scheme="etcd",
            endpoints="",
            name=fresh_name(),
            min_replicas=checks.integer("min_replicas", min_replicas),
            join_timeout_ms=checks.integer("join_timeout_ms", 100 if join_timeout_ms is None else join_timeout_ms),
            heartbeat_timeout_ms=checks.integer(
                "heartbeat_timeout_ms", 5000 if heartbeat_timeout_ms is None else heartbeat_timeout_ms
            ),
        )
        _, client = connect(str(job), SERVER_CONNECT_TIMEOUT.total_seconds())
        with contextlib.closing(client):
            self._address = str(job.at(client.config))

    def address(self) -> str:
        """`etcd://endpoints/job?options`, for LighthouseClient, ManagerServer and TORCHFT_LIGHTHOUSE."""
        return self._address

    def shutdown(self) -> None:
        """Does nothing: replicas that know the address continue."""


class LighthouseClient:
    """Takes part in the quorums of a job, for any number of replica ids. Thread-safe.

    The job's keys are below `/ftcoord/v2/<job>/quorum`.

    Args:
        addr: `etcd://h1:2379,h2:2379/job?min_replicas=2&join_timeout_ms=60000`, or `LighthouseServer.address()`.
        connect_timeout: how long to wait for etcd, a timedelta.

    Raises TypeError and ValueError for bad arguments, and its ConfigError for a malformed address, all at once;
    RuntimeError after `connect_timeout` if etcd does not answer. Every method raises TypeError, ValueError (a negative
    timedelta) or OverflowError for bad arguments, and ForkedProcessError in a forked child.

    A call of `quorum` keeps the replica alive while it waits, and counts as one beat when it returns. A client that
    nobody refers to is closed: its replicas leave at once, so nobody waits for them.
    """

    def __init__(self, addr: str, connect_timeout: timedelta) -> None:
        self._job, self._etcd = connect(checks.string("addr", addr), checks.seconds("connect_timeout", connect_timeout))
        self._pid = os.getpid()
        self._lock = concurrency.lock("LighthouseClient._lock")
        self._replicas: dict[str, Replica] = {}  # guarded by _lock, as the next two
        self._calls = Counter[str]()
        """How many calls of each replica are in progress."""
        self._signs: dict[str, float] = {}
        """When the last call of each replica ended."""
        self._cancel_finalizer = concurrency.when_forgotten(self, _leave_all, self._replicas, self._etcd)

    def quorum(
        self,
        replica_id: str,
        timeout: timedelta,
        address: str = "",
        store_address: str = "",
        step: int = 0,
        world_size: int = 0,
        shrink_only: bool = False,
        data: dict[Any, Any] | None = None,
    ) -> Quorum:
        """Ask for a quorum, and wait until one is decided that contains this replica.

        Args:
            replica_id: the replica's name; no two replicas may have the same.
            timeout: how long to wait, a timedelta.
            address: the address of its manager.
            store_address: the address of its store.
            step: the training step that it is at.
            world_size: the number of its ranks.
            shrink_only: whether to admit no new replicas.
            data: a dict for all members to see; JSON must be able to represent it.

        Raises:
            TimeoutError: no such quorum was decided in time, for the reason that the text tells if it is known, or etcd
                did not answer. The replica no longer asks.
            RuntimeError: the request has more than 64 KiB, etcd refuses, the quorum's record cannot be read, JSON
                cannot represent `data`, or the replica has left.
        """
        deadline = concurrency.now() + checks.seconds("timeout", timeout)
        request = QuorumRequest(
            replica_id=checks.string("replica_id", replica_id),
            address=checks.string("address", address),
            store_address=checks.string("store_address", store_address),
            step=checks.integer("step", step, -checks.LARGEST - 1),
            world_size=checks.integer("world_size", world_size),
            shrink_only=checks.boolean("shrink_only", shrink_only),
            data=json_text(data),
            commit_failures=0,
            handles=(),
        )
        with torchft_errors(), self._calling(replica_id) as replica:
            return quorum_reply(replica.ask(request, deadline))

    def heartbeat(self, replica_id: str, timeout: timedelta = timedelta(seconds=5)) -> None:
        """Show that a replica is alive.

        Args:
            replica_id: the replica's name.
            timeout: how long etcd may take, a timedelta.

        Raises TimeoutError when etcd does not answer in time, and RuntimeError when it refuses.
        """
        deadline = concurrency.now() + checks.seconds("timeout", timeout)
        with torchft_errors(), self._calling(checks.string("replica_id", replica_id)) as replica:
            replica.beat(deadline)

    def leave(self, replica_id: str) -> None:
        """Let a replica leave, so that nobody waits for its heartbeat to time out. Not in torchft.

        Does nothing for a replica that this client does not represent. Takes up to 2 s if etcd is unreachable, and does
        not raise then: the lease expires.

        Args:
            replica_id: the replica's name.
        """
        with self._lock:
            replica = self._replicas.pop(checks.string("replica_id", replica_id), None)
        if replica is not None:
            replica.leave(LEAVE_TIMEOUT)

    def kill(self, replica_id: str, message: str, timeout: timedelta = timedelta(seconds=10)) -> None:
        """Make the process of a replica's manager exit with status 1. In torchft, only the dashboard can do that.

        Returns when the replica is no member of the job any longer. A later replica of the same name is left alone.

        Args:
            replica_id: the replica's name.
            message: the reason, for the manager's log.
            timeout: how long to wait, a timedelta.

        Raises TimeoutError when it is still a member after that time or etcd does not answer; the process may end yet,
        within a minute. Raises RuntimeError when etcd refuses or there is no such replica.
        """
        deadline = concurrency.now() + checks.seconds("timeout", timeout)
        replica, why = checks.string("replica_id", replica_id), checks.string("message", message)
        check_process(self._pid)
        with torchft_errors():
            order_kill(self._etcd, self._job.prefix, replica, why, deadline)

    def close(self) -> None:
        """Let all replicas leave, and disconnect. Not in torchft. Idempotent; does nothing in a forked child.

        Takes up to 2 s if etcd is unreachable, and does not raise then: the leases expire.
        """
        if os.getpid() != self._pid:  # the replicas are the parent's
            return
        self._cancel_finalizer()
        with self._lock:
            replicas = self._replicas.copy()
            self._replicas.clear()
        _leave_all(replicas, self._etcd)

    @contextlib.contextmanager
    def _calling(self, replica_id: str) -> Iterator[Replica]:
        """The replica, for a call of it."""
        check_process(self._pid)
        with self._lock:
            self._calls[replica_id] += 1
            silent = self._take_silent()
            if replica_id not in self._replicas:
                self._replicas[replica_id] = Replica(self._etcd, self._job, replica_id, keeps_lease=False)
            replica = self._replicas[replica_id]
        try:
            for one in silent:
                one.leave(LEAVE_TIMEOUT)
            yield replica
        finally:
            with self._lock:
                self._calls[replica_id] -= 1
                self._signs[replica_id] = concurrency.now()

    def _take_silent(self) -> list[Replica]:
        """With the lock held: the replicas without a call for the heartbeat timeout, if leases cannot show that so
        soon."""
        if self._job.silent_after >= self._job.heartbeat_timeout:
            return []
        since = concurrency.now() - self._job.silent_after
        silent = [name for name in self._replicas if not self._calls[name] and self._signs.get(name, since) < since]
        return [self._replicas.pop(name) for name in silent]


def _leave_all(replicas: dict[str, Replica], etcd: SharedClient) -> None:
    """The timeout is for all of them together: if etcd is unreachable, it is for each."""
    deadline = concurrency.now() + LEAVE_TIMEOUT
    for replica in replicas.values():
        left = deadline - concurrency.now()
        if left > 0:
            replica.leave(left)
        else:
            replica.orphan()
    etcd.close()


def _check_bind(bind: str) -> None:
    host, _, port = bind.rpartition(":")
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        if not port.isdigit() or int(port) > 65535:
            raise ValueError(port)
    except ValueError:
        raise RuntimeError(f"invalid socket address {bind!r}; write it as [::]:29510 or 0.0.0.0:29510") from None
