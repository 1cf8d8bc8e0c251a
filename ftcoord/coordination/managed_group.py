"""The group behind a ManagerServer: its member of the job, its ranks, its port. Nothing here refers to the server."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from secrets import token_hex
from typing import Final

from ftcoord import concurrency
from ftcoord.coordination.address import Job, parse_address
from ftcoord.coordination.connection import connect, torchft_errors
from ftcoord.coordination.kills import watch_kills
from ftcoord.coordination.own_place import in_url, own_place
from ftcoord.coordination.policy import LEASE_FLOOR
from ftcoord.coordination.rank_group import RankGroup, end_process
from ftcoord.coordination.rank_port import RankPort, listen, stop_listening
from ftcoord.coordination.ranks import RankRequest
from ftcoord.coordination.replica import Replica
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


@dataclass(frozen=True, slots=True)
class GroupIdentity:
    """The constants of a replica group. `hostname` is the name by which others reach the manager's host."""

    replica_id: str
    hostname: str
    store_address: str
    world_size: int


class ManagedGroup:
    """A replica group in a job, from its creation until `close()`.

    Args:
        identity: the group's constants.
        lighthouse_addr: the job's address.
        bind: where to listen for the ranks, see `own_place`.
        heartbeat_interval: seconds between beats, if beats are judged.
        connect_timeout: seconds to wait for etcd.

    Raises RuntimeError. Everything that was made is then released.
    """

    def __init__(
        self,
        identity: GroupIdentity,
        lighthouse_addr: str,
        bind: str,
        heartbeat_interval: float,
        connect_timeout: float,
    ) -> None:
        show_if_asked()
        self._identity, self._pid = identity, os.getpid()
        self._closed = concurrency.event()
        self._made = concurrency.event()
        """Set when the constructor has ended: until then nobody else ends this."""
        self._ends: list[ExitStack] = []
        """The release of all resources. The one call of `close` that does it takes this. Any thread, one step of a list
        at a time."""
        with ExitStack() as ends:
            try:
                serve_process(MetricsAddress.of_environment())
                place, host = own_place(bind, identity.hostname, parse_address(lighthouse_addr))
                listener = listen(place)
                ends.callback(stop_listening, listener)
                job, etcd = connect(lighthouse_addr, connect_timeout)
                ends.callback(etcd.close)
                self._replica = Replica(etcd, job, identity.replica_id, keeps_lease=True)
                ends.callback(self._replica.leave, LEAVE_TIMEOUT)
                self._join(job, connect_timeout)
                ends.callback(watch_kills(etcd, job.prefix, self._obey, self._fail).close)
                interval = heartbeat_interval if job.heartbeat_timeout < LEASE_FLOOR else None
                self._start_beats(interval, job.heartbeat_timeout, ends)
                token, address = token_hex(TOKEN_BYTES), f"http://{in_url(host)}:{listener.getsockname()[1]}"
                self.address = with_token(address, token)
                ranks = RankGroup(identity.replica_id, identity.world_size, self._ask, bool(job.allow_kill))
                ends.callback(RankPort(listener, ranks, token, bool(job.native), self._fail).close)
                ends.callback(ranks.close, address)  # before the port's: so waiting ranks hear of it
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

    def _obey(self, order: KeyValue) -> None:
        """End this process if an order names a member that it is, or was. It writes why, and gives its lease up, so
        that who gave the order sees at once that it goes, also without a sentinel."""
        if self._replica.was(member_of(order.key)):
            message, host = order.value.decode(errors="replace"), f"{socket.gethostname()} (pid {os.getpid()})"
            try:
                self._replica.leave(LEAVE_TIMEOUT, f"{host} was ended by an order: {neutral(message)}")
            finally:
                end_process(message)

    def _join(self, job: Job, timeout: float) -> None:
        try:
            with torchft_errors():
                self._replica.beat(concurrency.now() + timeout)
        except (TimeoutError, RuntimeError) as error:
            raise RuntimeError(f"failed to join the job at {job}: {error}") from None

    def _ask(self, requests: Mapping[int, RankRequest], last: RankRequest) -> QuorumRecord:
        identity = self._identity
        request = QuorumRequest(
            replica_id=identity.replica_id,
            address=self.address,
            store_address=identity.store_address,
            step=last.step,
            world_size=identity.world_size,
            shrink_only=last.shrink_only,
            data="",
            commit_failures=last.commit_failures,
            handles=tuple(requests[rank].handle for rank in range(identity.world_size) if rank in requests),
        )
        return self._replica.ask(request, concurrency.now() + last.timeout)

    # -- the thread of the beats ------------------------------------------------------------------------------------

    def _start_beats(self, interval: float | None, timeout: float, ends: ExitStack) -> None:
        thread = concurrency.thread(self._run_beats, "ftcoord-beats", interval, timeout)

        def end() -> None:
            self._closed.set()
            self._replica.leave(LEAVE_TIMEOUT)  # which wakes the thread
            if thread is not concurrency.current_thread():  # it is when that thread has failed
                thread.join(LEAVE_TIMEOUT)

        thread.start()
        ends.callback(end)

    def _run_beats(self, interval: float | None, timeout: float) -> None:
        try:
            self._stay(interval, timeout)
        finally:
            error = sys.exc_info()[1]
            if error is not None:
                self._fail(error)

    def _stay(self, interval: float | None, timeout: float) -> None:
        """Beat, if beats are judged. Rejoin under a new lease when the last one is lost, even if no rank asks.

        Returns when the group is closed.

        Args:
            interval: seconds between two beats; None if beats are not judged.
            timeout: seconds that one beat may take. It must not be the interval: etcd may take longer for a write than
                the 0.1 s of torchft's default, and a beat that is never answered says nothing.
        """
        pause = REJOIN_PAUSE if interval is None else min(interval, REJOIN_PAUSE)
        retry_pause = REJOIN_TIMEOUT if interval is None else interval
        while not self._closed.is_set():
            self._replica.await_loss(interval)
            if self._closed.is_set():
                return
            comes_back = not self._replica.joined
            try:
                self._replica.beat(concurrency.now() + (REJOIN_TIMEOUT if comes_back else timeout))
                if comes_back:
                    self._closed.wait(pause)
            except (TimeoutError, ServerError, EtcdError) as error:
                log.info("a heartbeat was not sent: %s", error)
                self._closed.wait(retry_pause)

    def _fail(self, error: BaseException) -> None:
        """A thread of this group has failed: leave the job, so that nobody waits for this group.

        The ranks see that the manager is gone, as if its process had died.
        """
        self._made.wait()
        if self._ends:
            what = self._identity.replica_id
            log.critical("manager %s leaves the job, for a thread of it has failed: %r", what, error)
            self.close()
