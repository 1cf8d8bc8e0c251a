"""torchft's ManagerServer: represents a replica group in the quorums of its job, and answers the group's ranks.

The API is that of `torchft.coordination` (https://docs.pytorch.org/torchft/coordination.html), 0.2.0 and nightly.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from datetime import timedelta
from secrets import token_hex
from typing import Final

from ftcoord import concurrency
from ftcoord.coordination import api
from ftcoord.coordination.address import Job, connect, in_url, own_place, parse_address
from ftcoord.coordination.native import serve_ranks
from ftcoord.coordination.port import listen, stop_listening
from ftcoord.coordination.rank_port import RankPort
from ftcoord.coordination.ranks import RankGroup, RankRequest, end_process
from ftcoord.coordination.replica import Replica, watch_kills
from ftcoord.core.layout import member_of
from ftcoord.core.manager_address import TOKEN_BYTES, with_token
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest
from ftcoord.errors import EtcdError, ServerError
from ftcoord.escaping import neutral
from ftcoord.etcd.api import KeyValue
from ftcoord.logs import show_if_asked
from ftcoord.metrics.exporter import MetricsAddress, serve_process

log = logging.getLogger(__name__)

LEAVE_TIMEOUT: Final = 2.0
"""Seconds that a manager may take to leave the job when it is shut down. After that its lease expires."""
REJOIN_TIMEOUT: Final = 5.0
"""Seconds that a manager tries to rejoin after it lost its lease, before the next attempt."""
REJOIN_PAUSE: Final = 1.0
"""Seconds between two attempts to rejoin: a manager that loses its lease each time must not overload etcd."""


class ManagedGroup:
    """A replica group in a job, from its creation until `close()`.

    The arguments are those of `ManagerServer`; `connect_timeout` in seconds.

    Raises RuntimeError. Everything that was made is then released.
    """

    def __init__(
        self,
        replica_id: str,
        lighthouse_addr: str,
        hostname: str,
        *,
        bind: str,
        store_addr: str,
        world_size: int,
        connect_timeout: float,
    ) -> None:
        show_if_asked()
        self._store_address, self._world_size, self._pid = store_addr, world_size, os.getpid()
        self._closed = concurrency.event()
        self._made = concurrency.event()
        """Set when the constructor has ended: until then nobody else ends this."""
        self._ends: list[ExitStack] = []
        """The release of all resources. The one call of `close` that does it takes this. Any thread, one step of a list
        at a time."""
        with ExitStack() as ends:
            try:
                serve_process(MetricsAddress.of_environment())
                place, host = own_place(bind, hostname, parse_address(lighthouse_addr))
                listener = listen(place)
                ends.callback(stop_listening, listener)
                job, etcd = connect(lighthouse_addr, connect_timeout)
                ends.callback(etcd.close)
                self._replica = Replica(etcd, job, replica_id, keeps_lease=True)
                ends.callback(self._replica.leave, LEAVE_TIMEOUT)
                self._join(job, connect_timeout)
                ends.callback(watch_kills(etcd, job.prefix, self._obey, self._fail).close)
                concurrency.thread(self._stay, "ftcoord-beats").start()
                ends.callback(self._replica.leave, LEAVE_TIMEOUT)  # which wakes that thread
                ends.callback(self._closed.set)
                address = f"http://{in_url(host)}:{listener.getsockname()[1]}"
                ranks = RankGroup(replica_id, world_size, self._ask, bool(job.allow_kill))
                own_port = None
                if job.native:  # torchft's port is that of `bind`, for it is in what its classes see of the address
                    listener = self._serve_native(listener, place, ranks, ends)
                    own_port = listener.getsockname()[1]
                token = token_hex(TOKEN_BYTES)
                self.address = with_token(address, token, own_port)
                ends.callback(RankPort(listener, ranks, bytes.fromhex(token), self._fail).close)
                ends.callback(ranks.close, address)  # before the ports': so waiting ranks are answered
                ranks.listen_at(address)
                self._ends.append(ends.pop_all())
            finally:  # before what was made ends: a thread of it that has failed may wait for this
                self._made.set()

    def close(self) -> None:
        """Leave the job, and end all connections. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with suppress(IndexError):
            self._ends.pop().close()

    @staticmethod
    def _serve_native(reserved: socket.socket, place: str, ranks: RankGroup, ends: ExitStack) -> socket.socket:
        """Serve torchft's own classes at a reserved place; returns a listener at a free port there for ftcoord's."""
        host, port = place.rpartition(":")[0], reserved.getsockname()[1]
        listener = listen(f"{host}:0")
        ends.callback(stop_listening, listener)
        stop_listening(reserved)
        native = serve_ranks(f"{host}:{port}", ranks)
        ends.callback(native.close, wait=False)  # a call that asks for the group ends when the replica leaves
        return listener

    def _obey(self, order: KeyValue) -> None:
        """End this process if an order names a member that it is, or was. It writes why, and gives its lease up, so
        that who gave the order sees at once that it goes, also without a sentinel."""
        if self._replica.participant.was(member_of(order.key)):
            message, host = order.value.decode(errors="replace"), f"{socket.gethostname()} (pid {os.getpid()})"
            try:
                self._replica.leave(LEAVE_TIMEOUT, f"{host} was ended by an order: {neutral(message)}")
            finally:
                end_process(message)

    def _join(self, job: Job, timeout: float) -> None:
        try:
            with api.torchft_errors():
                self._replica.beat(concurrency.now() + timeout)
        except (TimeoutError, RuntimeError) as error:
            raise RuntimeError(f"failed to join the job at {job}: {error}") from None

    def _ask(self, requests: Mapping[int, RankRequest], last: RankRequest) -> QuorumRecord:
        request = QuorumRequest(
            replica_id=self._replica.replica_id,
            address=self.address,
            store_address=self._store_address,
            step=last.step,
            world_size=self._world_size,
            shrink_only=last.shrink_only,
            commit_failures=last.commit_failures,
            handles=tuple(requests[rank].handle for rank in sorted(requests)),
        )
        return self._replica.ask(request, concurrency.now() + last.timeout)

    def _stay(self) -> None:
        """On a thread of its own: rejoin under a new lease when the last one is lost, even if no rank asks."""
        try:
            while True:
                self._replica.await_loss(None)
                if self._closed.is_set():
                    return
                self._closed.wait(self._rejoin())
        finally:
            error = sys.exc_info()[1]
            if error is not None:
                self._fail(error)

    def _rejoin(self) -> float:
        """Returns the seconds until it may be tried again."""
        try:
            self._replica.beat(concurrency.now() + REJOIN_TIMEOUT)
            return REJOIN_PAUSE
        except (TimeoutError, ServerError, EtcdError) as error:
            log.info("the manager did not rejoin, and tries again: %s", error)
            return REJOIN_TIMEOUT

    def _fail(self, error: BaseException) -> None:
        """A thread of this group has failed: leave the job, so that nobody waits for this group.

        The ranks see that the manager is gone, as if its process had died.
        """
        self._made.wait()
        if self._ends:
            what = self._replica.replica_id
            log.critical("manager %s leaves the job, for a thread of it has failed: %r", what, error)
            self.close()


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
        api.seconds("heartbeat_interval", heartbeat_interval)
        api.integer("quorum_retries", quorum_retries, -api.LARGEST - 1)
        self._group = ManagedGroup(
            api.string("replica_id", replica_id),
            api.string("lighthouse_addr", lighthouse_addr),
            api.string("hostname", hostname),
            bind=api.string("bind", bind),
            store_addr=api.string("store_addr", store_addr),
            world_size=api.integer("world_size", world_size),
            connect_timeout=api.seconds("connect_timeout", connect_timeout),
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
