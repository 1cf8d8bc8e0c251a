"""torchft's ManagerClient: one rank's calls to its manager, in the same process, on another host, or torchft's own.

The API is that of `torchft.coordination` (https://docs.pytorch.org/torchft/coordination.html), 0.2.0 and nightly.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

from ftcoord import concurrency
from ftcoord.coordination import checks
from ftcoord.coordination.checks import TRANSPORT_ERROR, Failure
from ftcoord.coordination.connection import check_process, torchft_errors, unreachable
from ftcoord.coordination.native import NativeManager
from ftcoord.coordination.port import WrongKey
from ftcoord.coordination.rank_port import ManagerLines
from ftcoord.coordination.ranks import KillOrder, MetadataQuery, NoSuchRank, RankCall, RankGroup, RankRequest, TimedVote
from ftcoord.coordination.types import with_known_token, without_token
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
        client._address, token = with_known_token(checks.string("addr", addr))
        client._pid = os.getpid()
        client._way = ManagerWay(client._address, token)
        concurrency.when_forgotten(client, client._way.close)
        if RankGroup.at(client._address) is None:
            client._way.find(checks.seconds("connect_timeout", connect_timeout))
        return client

    _address: str
    _pid: int
    _way: ManagerWay

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
            rank=checks.integer("group_rank", group_rank),
            step=checks.integer("step", step, -checks.LARGEST - 1),
            metadata=checks.string("checkpoint_metadata", checkpoint_metadata),
            shrink_only=checks.boolean("shrink_only", shrink_only),
            commit_failures=checks.integer("commit_failures", commit_failures, -checks.LARGEST - 1),
            timeout=checks.seconds("timeout", timeout),
            handle=checks.string("reconfigure_handle", reconfigure_handle),
            init_sync=checks.boolean("init_sync", init_sync),
        )
        answer = self._call(request, request.timeout)
        result = answer if isinstance(answer, QuorumResult) else QuorumResult(**answer)
        result.recover_src_manager_address = without_token(result.recover_src_manager_address)
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
            rank=checks.integer("group_rank", group_rank),
            step=checks.integer("step", step, -checks.LARGEST - 1),
            yes=checks.boolean("should_commit", should_commit),
            timeout=checks.seconds("timeout", timeout),
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
        query = MetadataQuery(checks.integer("rank", rank))
        return str(self._call(query, checks.seconds("timeout", timeout)))

    def kill(self, message: str, timeout: timedelta = timedelta(seconds=10)) -> None:
        """Make the manager's process exit with status 1, if its job has `allow_kill=1`. `LighthouseClient.kill` does
        not need that option. In torchft, only the dashboard can do that.

        Args:
            message: the reason, for the manager's log.
            timeout: how long to wait, a timedelta.

        Raises TimeoutError when the manager does not answer in time, and RuntimeError when it is gone or refuses.
        """
        order = KillOrder(checks.string("message", message))
        answer = self._answer(order, checks.seconds("timeout", timeout))
        if answer != TRANSPORT_ERROR:  # that is how it looks when the process has ended before it answered
            raise answer.error()

    def _call(self, call: RankCall, timeout: float) -> Any:
        answer = self._answer(call, timeout)
        if isinstance(answer, Failure):
            raise answer.error()
        return answer

    def _answer(self, call: RankCall, timeout: float) -> Any:
        check_process(self._pid)
        deadline = concurrency.now() + timeout
        with torchft_errors():
            group = RankGroup.at(self._address)
            try:
                return self._way.call(call, deadline) if group is None else call_here(group, call, deadline)
            except NoSuchRank as error:  # as a manager in another process answers it
                return Failure("InvalidArgument", str(error))


class ManagerWay:
    """The connection to a manager in another process.

    Args:
        address: `http://host:port`.
        fragment: what `parted` found: ftcoord's own protocol is used. Empty: torchft's, without a token.
    """

    def __init__(self, address: str, fragment: str) -> None:
        self._address, self._fragment = address, fragment
        # Any thread, as a whole: two that find the manager at the same time find the same one.
        self._calls: ManagerLines | NativeManager | None = None

    def find(self, timeout: float) -> None:
        """Connect to the manager. Raises RuntimeError when that fails for `timeout` seconds."""
        deadline = concurrency.now() + timeout
        try:
            place_of(self._address)
        except ValueError as error:
            raise unreachable(self._address, timeout, error, "it is that of a manager") from None
        while True:
            try:
                self._calls = self._connect(deadline)
                return
            except OSError as error:
                if isinstance(error, WrongKey) or concurrency.now() + LOOKUP_INTERVAL >= deadline:
                    raise unreachable(self._address, timeout, error, "its manager") from None
            concurrency.sleep(LOOKUP_INTERVAL)

    def call(self, call: RankCall, deadline: float) -> Any:
        """The answer to a call, which may be a Failure. Raises TimeoutError after the monotonic `deadline`."""
        try:
            if self._calls is None:  # it was in this process, which it is not any more
                self._calls = self._connect(deadline)
            return self._calls.call(call, deadline)
        except TimeoutError:
            raise
        except OSError as error:
            return Failure("Unavailable", f"tcp connect error: {error}")

    def close(self) -> None:
        """Close the connection. Call it when no call is in progress."""
        if self._calls is not None:
            self._calls.close()

    def _connect(self, deadline: float) -> ManagerLines | NativeManager:
        """Raises OSError."""
        host, port = place_of(self._address)
        if not self._fragment:
            return NativeManager(host, port, deadline)
        key, own_port = key_of(self._fragment)
        return ManagerLines(host, own_port or port, key, deadline)


def place_of(address: str) -> tuple[str, int]:
    """The host and port of `http://host:port`. Raises ValueError."""
    parts = urlsplit(address)
    if parts.scheme != "http" or not parts.hostname or not parts.port:
        raise ValueError("it is not of the form http://host:port")
    parts.hostname.encode("idna")  # as a look-up does: a UnicodeError is a ValueError
    return parts.hostname, parts.port


def call_here(group: RankGroup, call: RankCall, deadline: float) -> Any:
    """Call a manager in this process. Raises the call's error."""
    waiting, to_answer, ask_for_all = group.begin(call)
    if ask_for_all is not None:
        ask_for_all.run()
    return to_answer(waiting.wait(deadline))
