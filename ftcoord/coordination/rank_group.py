"""The ranks of one replica group, in their manager's memory, however their calls arrive."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

from ftcoord import concurrency
from ftcoord.coordination.convert import quorum_result
from ftcoord.coordination.failure import KILL_REFUSED, Failure
from ftcoord.coordination.ranks import GroupAsk, RankBarrier, RankRequest, VoteCounter
from ftcoord.coordination.types import QuorumResult
from ftcoord.core.quorum_records import QuorumRecord
from ftcoord.errors import ServerError
from ftcoord.escaping import neutral

log = logging.getLogger(__name__)

T = TypeVar("T")

_local: weakref.WeakValueDictionary[str, RankGroup] = weakref.WeakValueDictionary()
"""The groups of this process by their managers' addresses: their ranks in this process need no socket."""
os.register_at_fork(after_in_child=_local.clear)  # a forked child has no manager: the threads are the parent's


@dataclass(frozen=True, slots=True)
class WaitingCall(Generic[T]):
    """A rank's call that waits for the other ranks.

    Args:
        outcome: the future outcome.
        leave: withdraws the call; returns False if the outcome is about to come.
    """

    outcome: Future[T]
    leave: Callable[[], bool]

    def wait(self, deadline: float, on_end: Callable[[Callable[[], None]], bool] | None = None) -> T:
        """The outcome. If the wait is interrupted, the call is withdrawn.

        Args:
            deadline: on the monotonic clock. After it the call is withdrawn, and TimeoutError raised.
            on_end: registers a function that is called when the caller goes away, which also ends the wait; returns
                False if the caller has already gone.
        """
        ended = concurrency.event()
        self.outcome.add_done_callback(lambda _: ended.set())
        if on_end is not None and not on_end(ended.set):
            ended.set()
        with ExitStack() as interrupted:
            interrupted.callback(self.leave)
            ended.wait(min(max(deadline - concurrency.now(), 0), concurrency.LONGEST_WAIT))
            interrupted.pop_all()
        if not self.outcome.done() and self.leave():
            raise TimeoutError("the other ranks did not come in time")
        return self.outcome.result()


def end_process(message: str) -> NoReturn:
    """Exit with status 1. `message` is the reason, for the log."""
    log.error("killed: %s", neutral(message))
    os._exit(1)


class NoSuchRank(ValueError):
    """A rank that the group does not have has called."""


class RankGroup:
    """The requests, votes and metadata of a group's ranks. Thread-safe; no method blocks.

    Args:
        replica_id: the group's name.
        world_size: the number of its ranks.
        ask: takes the requests by rank, and the last request; returns the quorum, or raises the error for all ranks.
        allow_kill: whether anyone who reaches the manager may end this process.
    """

    def __init__(
        self,
        replica_id: str,
        world_size: int,
        ask: Callable[[Mapping[int, RankRequest], RankRequest], QuorumRecord],
        allow_kill: bool,
    ) -> None:
        self._replica_id, self._world_size, self._allow_kill = replica_id, world_size, allow_kill  # never change
        self._barrier = RankBarrier(world_size, ask)
        self._votes = VoteCounter(world_size)
        self._metadata: dict[int, str] = {}  # any thread, one step of a dict at a time
        """Of each rank's last request that a quorum answered."""

    @property
    def world_size(self) -> int:
        """The number of its ranks."""
        return self._world_size

    @staticmethod
    def at(address: str) -> RankGroup | None:
        """The group whose manager has this address, which is without its token, if it is in this process."""
        return _local.get(address)

    def listen_at(self, address: str) -> None:
        """Make the group findable for ranks in this process."""
        _local[address] = self

    def quorum(self, request: RankRequest) -> tuple[WaitingCall[QuorumRecord], GroupAsk | None]:
        """Take part in the group's next request. For the last rank, also returns the object with which to ask for the
        quorum.

        Raises NoSuchRank: such a rank would count in place of a missing one.
        """
        self._check(request.rank)
        outcome, ask_for_all = self._barrier.join(request)
        outcome.add_done_callback(lambda _: self._note_metadata(request, outcome))  # before the rank's own, so that
        # who was answered finds it
        return WaitingCall(outcome, lambda: self._barrier.leave(request.rank, outcome)), ask_for_all

    def result(self, quorum: QuorumRecord, request: RankRequest) -> QuorumResult:
        """What a quorum means for the rank that asked. Raises NotInQuorum if this group is not in it."""
        return quorum_result(quorum, self._replica_id, request.rank, request.init_sync)

    def vote(self, rank: int, step: int, yes: bool) -> WaitingCall[bool]:
        """Vote on a step. Raises NoSuchRank."""
        self._check(rank)
        outcome = self._votes.cast(rank, step, yes)
        return WaitingCall(outcome, lambda: self._votes.leave(rank, outcome))

    def metadata(self, rank: int) -> WaitingCall[str | None]:
        """The metadata of a rank's last request that a quorum answered; None if none was.

        What no quorum answered does not count: peers load what it names. But a peer may know the quorum before this
        manager does. So if the group has asked with other metadata, this waits until that request has ended.
        """
        outcome: Future[str | None] = Future()
        known, asked = self._metadata.get(rank), self._barrier.asked_last(rank)
        if asked is None or asked[0].metadata == known:
            outcome.set_result(known)
        else:  # at once if it has ended
            asked[1].add_done_callback(lambda _: outcome.set_result(self._metadata.get(rank)))
        return WaitingCall(outcome, lambda: True)

    def _note_metadata(self, request: RankRequest, outcome: Future[QuorumRecord]) -> None:
        if outcome.exception() is None:
            self._metadata[request.rank] = request.metadata

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self._world_size:
            raise NoSuchRank(
                f"there is no rank {rank}: this group has ranks 0 to {self._world_size - 1}; check the world_size of"
                " its ManagerServer, and RANK and WORLD_SIZE of this process"
            )

    def kill(self, message: str) -> Failure:
        """End this process, if that is allowed; it then does not return."""
        if not self._allow_kill:
            return KILL_REFUSED
        end_process(message)

    def close(self, address: str) -> None:
        """End all waiting calls, and all later ones, with ServerError."""
        if _local.get(address) is self:
            _local.pop(address, None)
        error = ServerError("this manager was shut down")
        self._barrier.close(error)
        self._votes.close(error)
