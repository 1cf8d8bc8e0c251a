"""A small etcd cluster on one machine, to test what happens when members fail."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence

from ftcoord import concurrency
from ftcoord.embedded.member import POLL_INTERVAL, EtcdMember
from ftcoord.embedded.ports import PortLost
from ftcoord.errors import ConfigError, EtcdError, ServerError

logger = logging.getLogger(__name__)

_STATUS_TIMEOUT = 2.0


class EtcdCluster:
    """`n` etcd members on 127.0.0.1, each with temporary data that is removed on `stop`.

        with EtcdCluster(3) as cluster:
            cluster.kill(cluster.leader())

    They end with the process that started them, as `EtcdServer` does. Without a majority no member serves, and
    `restart(i)` of one member waits in vain (use ``wait=False``).

    Methods that take the index of a member, from 0 to `n` - 1, raise IndexError for a bad one, and ServerError before
    `start()` and after `stop()`.

    Args:
        n: the number of members, at least 1.
        heartbeat_interval_ms, election_timeout_ms, extra_args: for every member, as in `EtcdServer`.

    Raises:
        ConfigError: an argument is not valid.
    """

    def __init__(
        self,
        n: int = 3,
        *,
        heartbeat_interval_ms: int = 100,
        election_timeout_ms: int = 1000,
        extra_args: Sequence[str] = (),
    ) -> None:
        if n < 1:
            raise ConfigError("n", n, "at least 1 member")
        self.members: tuple[EtcdMember, ...] = tuple(
            EtcdMember(
                name=f"m{i}",
                heartbeat_interval_ms=heartbeat_interval_ms,
                election_timeout_ms=election_timeout_ms,
                extra_args=extra_args,
            )
            for i in range(n)
        )
        self._started = False

    @property
    def endpoints(self) -> str:
        """``host:port`` of every member, in order, joined by commas. Raises ServerError if never started."""
        return ",".join(member.get_endpoint() for member in self.members)

    def start(self, timeout: float = 60, num_retries: int = 3) -> None:
        """Start all members, and wait until each one serves.

        Args:
            timeout: seconds that this may take in all.
            num_retries: how often to try in all if another process takes a port first.

        Raises:
            ServerError: it is already started, or a member did not come up; the message has the end of its log.
        """
        if self._started:
            raise ServerError(f"the cluster is started already on {self.endpoints}: use it, or call stop()")
        deadline = concurrency.now() + timeout
        for tries_left in reversed(range(max(1, num_retries))):
            try:
                self._start(deadline)
            except PortLost as error:
                if not tries_left:
                    raise
                logger.info("starting the etcd cluster again on other ports: %s", error)
            else:
                return

    def stop(self) -> None:
        """End all members and remove their data. Idempotent; does nothing in a forked child."""
        for member in self.members:
            member.stop()
        self._started = False

    def kill(self, i: int) -> None:
        """End member `i` with SIGKILL; its data and port are kept for `restart`."""
        self.members[i].kill()

    def restart(self, i: int, timeout: float = 60, *, wait: bool = True) -> None:
        """Start member `i` again, on the same port with the same data. A running member is ended first.

        Args:
            i: the member's index.
            timeout: seconds to wait until it serves.
            wait: False to return as soon as the process runs: a member without a majority cannot serve yet.

        Raises:
            ServerError: the cluster is not started, or the member does not come up. It can be tried again.
        """
        self.members[i].restart(timeout, wait=wait)

    def pause(self, i: int) -> None:
        """Stop member `i` with SIGSTOP: it hangs, with its connections open, until `resume`. No effect if it ended."""
        self.members[i].pause()

    def resume(self, i: int) -> None:
        """Let a paused member go on."""
        self.members[i].resume()

    def wipe(self, timeout: float = 60) -> None:
        """Kill all members, remove their data, and start a new cluster on the same ports.

        Waits `timeout` seconds until it serves.

        Raises:
            ServerError: the cluster is not started, or the new one does not come up.
        """
        for member in self.members:
            member.wipe()
        for member in self.members:
            member.restart(wait=False)
        self.wait_healthy(timeout)

    def leader(self, timeout: float = 60) -> int:
        """The index of the leader among the members that run and are not paused. Waits for an election if need be.

        Raises:
            ServerError: there is no leader within `timeout` seconds.
        """
        deadline = concurrency.now() + timeout
        while (index := self._leader()) is None:
            if concurrency.now() >= deadline:
                raise ServerError(f"no leader within {timeout:g} s: restart or resume members until a majority runs")
            concurrency.sleep(POLL_INTERVAL)
        return index

    def wait_healthy(self, timeout: float = 60) -> None:
        """Wait until every member that is neither killed nor paused serves.

        Raises:
            ServerError: a member did not serve within `timeout` seconds, or ended meanwhile; or no member is running.
        """
        deadline = concurrency.now() + timeout
        active = self._active()
        if not active:
            raise ServerError("no member of the cluster is running: call start(), restart(i) or resume(i)")
        self._wait_ready(active, deadline)

    def __enter__(self) -> EtcdCluster:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def _start(self, deadline: float) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(self.stop)
            initial_cluster = ",".join([member.prepare() for member in self.members])
            for member in self.members:
                member.launch(initial_cluster)
            self._started = True
            self._wait_ready(range(len(self.members)), deadline)
            undo.pop_all()

    def _wait_ready(self, indices: Iterable[int], deadline: float) -> None:
        for i in indices:
            self.members[i].wait_ready(deadline - concurrency.now())

    def _active(self) -> list[int]:
        return [i for i, member in enumerate(self.members) if member.is_running() and not member.is_paused()]

    def _leader(self) -> int | None:
        """The member that claims to lead, in the highest term: a member that was just resumed may still claim to."""
        from ftcoord.embedded import rpc  # loads gRPC

        claims: list[tuple[int, int]] = []
        for i in self._active():
            with contextlib.suppress(EtcdError):
                status = rpc.status(self.members[i].config(_STATUS_TIMEOUT))
                if status.leader == status.header.member_id:
                    claims.append((status.header.raft_term, i))
        return max(claims)[1] if claims else None
