"""torchft's ManagerClient: one rank's calls to its manager, in the same process, on another host, or torchft's own.

The API is that of `torchft.coordination` (https://docs.pytorch.org/torchft/coordination.html), 0.2.0 and nightly.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

from ftcoord import concurrency
from ftcoord.coordination import api
from ftcoord.coordination.api import Failure
from ftcoord.coordination.native import NativeManager
from ftcoord.coordination.port import WrongKey
from ftcoord.coordination.rank_port import ManagerLines
from ftcoord.coordination.ranks import KillOrder, MetadataQuery, NoSuchRank, RankCall, RankGroup, RankRequest, TimedVote
from ftcoord.core.manager_address import key_of
from ftcoord.core.recovery import QuorumResult

LOOKUP_INTERVAL: Final = 0.1
"""Seconds between two attempts to reach a manager that does not listen yet."""


class ManagerClient:
    """One rank's calls to its manager, or to another group's: ftcoord's or torchft's own. Thread-safe.

    Args:
        addr: `ManagerServer.address()`, or an address from a quorum that this process got: `http://host:port`, and
            the manager's token unless it is torchft's own.
        connect_timeout: how long to wait for the manager, a timedelta.

    Raises RuntimeError when the manager is not reached in that time. The constructor and every method raise TypeError,
    ValueError (a negative timedelta) or OverflowError for bad arguments; methods raise ForkedProcessError in a forked
    child.
    """

    def __new__(cls, addr: str, connect_timeout: timedelta) -> ManagerClient:
        # torchft's own tests rely on `mock`'s autospec not seeing the signature, as with a native class.
        client = super().__new__(cls)
        client._address, client._token = api.with_known_token(api.string("addr", addr))
        client._pid = os.getpid()
        client._ways = []
        concurrency.when_forgotten(client, _close_all, client._ways)
        if RankGroup.at(client._address) is None:
            client._find(api.seconds("connect_timeout", connect_timeout))
        return client

    _address: str
    _token: str
    """What `parted` found: ftcoord's own protocol is used. Empty: torchft's, without a token."""
    _pid: int
    _ways: list[ManagerLines | NativeManager]
    """The way to a manager in another process; none while it is in this one. Two threads may find the same one."""

    def _quorum(
        self,
        group_rank: int,
        step: int,
        checkpoint_metadata: str,
        shrink_only: bool,
        init_sync: bool,
        commit_failures: int,
        timeout: timedelta,
        reconfigure_handle: str = "",
    ) -> QuorumResult:
        """Ask for a quorum, together with all other ranks of the group.

        Args:
            group_rank: this rank.
            step: the step that the group is at.
            checkpoint_metadata: what a peer needs to fetch the weights of this rank.
            shrink_only: whether to admit no new replicas.
            init_sync: whether all replicas take the weights of one replica at step 0.
            commit_failures: how many steps in a row were not committed.
            timeout: how long to wait, a timedelta. The timeout of the last rank to call applies to the group.
            reconfigure_handle: what peers need to rebuild their process group (nightly).

        Raises:
            TimeoutError: the other ranks have not called, or no quorum was decided, in time.
            RuntimeError: the manager is gone, has left the job or cannot use etcd; or the group has no seat in the
                quorum.
        """
        request = RankRequest(
            rank=api.integer("group_rank", group_rank),
            step=api.integer("step", step, -api.LARGEST - 1),
            metadata=api.string("checkpoint_metadata", checkpoint_metadata),
            shrink_only=api.boolean("shrink_only", shrink_only),
            commit_failures=api.integer("commit_failures", commit_failures, -api.LARGEST - 1),
            timeout=api.seconds("timeout", timeout),
            handle=api.string("reconfigure_handle", reconfigure_handle),
            init_sync=api.boolean("init_sync", init_sync),
        )
        answer = self._call(request, request.timeout)
        result = answer if isinstance(answer, QuorumResult) else QuorumResult(**answer)
        result.recover_src_manager_address = api.without_token(result.recover_src_manager_address)
        return result

    def should_commit(self, group_rank: int, step: int, should_commit: bool, timeout: timedelta) -> bool:
        """Vote on a step, and wait until all ranks of the group have voted; returns whether all voted yes.

        Args:
            group_rank: this rank.
            step: the step.
            should_commit: this rank's vote.
            timeout: how long to wait, a timedelta.

        Raises TimeoutError when the others have not voted in time; the vote then does not count. Raises RuntimeError
        when the manager is gone.
        """
        vote = TimedVote(
            rank=api.integer("group_rank", group_rank),
            step=api.integer("step", step, -api.LARGEST - 1),
            yes=api.boolean("should_commit", should_commit),
            timeout=api.seconds("timeout", timeout),
        )
        return bool(self._call(vote, vote.timeout))

    def _checkpoint_metadata(self, rank: int, timeout: timedelta) -> str:
        """The `checkpoint_metadata` of a rank's last request for a quorum.

        Args:
            rank: the rank.
            timeout: how long to wait for the manager, a timedelta.

        Raises TimeoutError when the manager does not answer in time, and RuntimeError when it is gone or the rank has
        not asked yet.
        """
        query = MetadataQuery(api.integer("rank", rank))
        return str(self._call(query, api.seconds("timeout", timeout)))

    def kill(self, message: str, timeout: timedelta = timedelta(seconds=10)) -> None:
        """Make the manager's process exit with status 1, if its job has `allow_kill=1`. `LighthouseClient.kill` does
        not need that option. In torchft, only the dashboard can do that.

        Args:
            message: the reason, for the manager's log.
            timeout: how long to wait, a timedelta.

        Raises TimeoutError when the manager does not answer in time, and RuntimeError when it is gone or refuses.
        """
        order = KillOrder(api.string("message", message))
        answer = self._answer(order, api.seconds("timeout", timeout))
        if answer != api.TRANSPORT_ERROR:  # that is how it looks when the process has ended before it answered
            raise answer.error()

    def _call(self, call: RankCall, timeout: float) -> Any:
        answer = self._answer(call, timeout)
        if isinstance(answer, Failure):
            raise answer.error()
        return answer

    def _answer(self, call: RankCall, timeout: float) -> Any:
        api.check_process(self._pid)
        deadline = concurrency.now() + timeout
        with api.torchft_errors():
            group = RankGroup.at(self._address)
            try:
                if group is not None:
                    return group.call(call, deadline)
                if not self._ways:  # it was in this process, which it is not any more
                    self._ways.append(self._connect(deadline))
                return self._ways[0].call(call, deadline)
            except NoSuchRank as error:  # as a manager in another process answers it
                return Failure("InvalidArgument", str(error))
            except TimeoutError:
                raise
            except OSError as error:
                return Failure("Unavailable", f"tcp connect error: {error}")

    def _find(self, timeout: float) -> None:
        """Connect to the manager. Raises RuntimeError when that fails for `timeout` seconds."""
        deadline = concurrency.now() + timeout
        try:
            place_of(self._address)
        except ValueError as error:
            raise api.unreachable(self._address, timeout, error, "it is that of a manager") from None
        while True:
            try:
                self._ways.append(self._connect(deadline))
                return
            except OSError as error:
                if isinstance(error, WrongKey) or concurrency.now() + LOOKUP_INTERVAL >= deadline:
                    raise api.unreachable(self._address, timeout, error, "its manager") from None
            concurrency.sleep(LOOKUP_INTERVAL)

    def _connect(self, deadline: float) -> ManagerLines | NativeManager:
        """Raises OSError."""
        host, port = place_of(self._address)
        if not self._token:
            return NativeManager(host, port, deadline)
        key, own_port = key_of(self._token)
        return ManagerLines(host, own_port or port, key, deadline)


def _close_all(ways: list[ManagerLines | NativeManager]) -> None:
    for one in ways:
        one.close()


def place_of(address: str) -> tuple[str, int]:
    """The host and port of `http://host:port`. Raises ValueError."""
    parts = urlsplit(address)
    if parts.scheme != "http" or not parts.hostname or not parts.port:
        raise ValueError("it is not of the form http://host:port")
    parts.hostname.encode("idna")  # as a look-up does: a UnicodeError is a ValueError
    return parts.hostname, parts.port
