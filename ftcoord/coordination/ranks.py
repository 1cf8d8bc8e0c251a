"""The ranks of one replica group, in their manager's memory, however their calls arrive: torchft's rules, without I/O.

Ranks call from any thread and wait for a future. When a rank gives up, its call is dropped, so nothing depends on it.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, NoReturn, TypeAlias, TypeVar

from ftcoord import concurrency
from ftcoord.coordination.checks import KILL_REFUSED, RANK_NOT_FOUND, Failure
from ftcoord.coordination.types import QuorumResult, quorum_result
from ftcoord.core.quorum_records import QuorumRecord
from ftcoord.core.vote import Vote, different_steps, tally
from ftcoord.errors import FtcoordError, ServerError
from ftcoord.escaping import neutral
from ftcoord.metrics import process as metrics

log = logging.getLogger(__name__)

T = TypeVar("T")

_INTERRUPTED: Final = "the rank that asked for the whole group was interrupted: ask again"


@dataclass(frozen=True, slots=True)
class RankRequest:
    """One rank's request for a quorum. `timeout` is in seconds from when it was received."""

    rank: int
    step: int
    metadata: str
    shrink_only: bool
    commit_failures: int
    timeout: float
    handle: str
    init_sync: bool = True


@dataclass(frozen=True, slots=True)
class TimedVote:
    """One rank's vote on a step, and for how many seconds it stands."""

    rank: int
    step: int
    yes: bool
    timeout: float


@dataclass(frozen=True, slots=True)
class MetadataQuery:
    """A peer asks how to fetch the weights of a rank."""

    rank: int


@dataclass(frozen=True, slots=True)
class KillOrder:
    """An order to end the manager's process, with a reason."""

    message: str


RankCall: TypeAlias = RankRequest | TimedVote | MetadataQuery | KillOrder

_Calls: TypeAlias = "dict[Future[QuorumRecord], RankRequest]"
"""The requests in the waiting calls of one rank, the last one last."""


@dataclass(frozen=True, slots=True)
class GroupAsk:
    """What the caller of `RankBarrier.join` must do if it gets one: call `run` or `fail`. The group's ranks wait for
    it.

    Args:
        run: asks for the group's quorum. Blocks until there is one.
        fail: tells the ranks that this is impossible.
    """

    run: Callable[[], None]
    fail: Callable[[FtcoordError], None]


class RankBarrier:
    """Collects the ranks that ask for a quorum. When all have called, the last one's thread asks for the group.

    Args:
        world_size: how many ranks there are.
        ask: takes the requests by rank, and the last request; returns the quorum, or raises the error for all ranks.
    """

    def __init__(self, world_size: int, ask: Callable[[Mapping[int, RankRequest], RankRequest], QuorumRecord]) -> None:
        self._world_size, self._ask = world_size, ask
        self._lock = concurrency.lock("RankBarrier._lock")
        self._there: dict[int, _Calls] = {}  # by rank; guarded by _lock, as are the calls in it
        self._closed: Exception | None = None  # guarded by _lock
        self._asked: dict[int, tuple[RankRequest, Future[QuorumRecord]]] = {}  # replaced under _lock
        """By rank: the request with which the group asked last, and its outcome, which always comes."""
        self._last_number = 0  # guarded by _lock
        """The number of the last quorum that was reported to ranks."""

    def join(self, request: RankRequest) -> tuple[Future[QuorumRecord], GroupAsk | None]:
        """This rank's future answer; and for the last rank, the object with which to ask for the group's quorum.

        If a rank calls several times, its last request counts, and all of its calls are answered; even one that comes
        while the group's request is in progress.
        """
        future: Future[QuorumRecord] = Future()
        with self._lock:
            if self._closed is not None:
                future.set_exception(self._closed)
                return future, None
            calls = self._there.setdefault(request.rank, {})
            calls[future] = request
            is_last = len(self._there) >= self._world_size
            if is_last:
                all_there, self._there = self._there, {}  # from here on they belong to this thread
                self._asked = {rank: [*calls.items()][-1][::-1] for rank, calls in all_there.items()}
        if not is_last:
            return future, None
        futures = _futures(all_there)
        return future, GroupAsk(lambda: self._ask_for(all_there, request), lambda error: _fail(futures, error))

    def asked_last(self, rank: int) -> tuple[RankRequest, Future[QuorumRecord]] | None:
        """The request of a rank with which the group asked last, and its outcome, which always comes; None if it has
        failed."""
        return self._asked.get(rank)

    def leave(self, rank: int, future: Future[QuorumRecord]) -> bool:
        """A rank gave up a call, before or after the group asked. Always True: see `WaitingCall`."""
        with self._lock:
            calls = self._there.get(rank, {})
            if calls.pop(future, None) is not None and not calls:
                del self._there[rank]
        return True

    def close(self, error: Exception) -> None:
        """End all waiting calls, and all later ones, with this error."""
        with self._lock:
            self._closed = error
            left, self._there = self._there, {}
        _fail(_futures(left), error)

    def _ask_for(self, all_there: Mapping[int, _Calls], last: RankRequest) -> None:
        """Ask without the lock: it takes as long as the quorum, and ranks may join the next barrier meanwhile."""
        futures = _futures(all_there)
        try:
            quorum = self._ask({rank: [*calls.values()][-1] for rank, calls in all_there.items()}, last)
            futures += self._take_second_calls(quorum)
            for future in futures:
                future.set_result(quorum)
        except (TimeoutError, FtcoordError) as error:
            _fail(futures, error)
        finally:  # an interrupt ends the last rank's own call; the other ranks must not wait for it
            for future in futures:
                if not future.done():
                    future.set_exception(RuntimeError(_INTERRUPTED))
            with self._lock:  # an error would keep the frames of its callers, and what these made, until the next call
                self._asked = {rank: one for rank, one in self._asked.items() if not _has_failed(one[1])}

    def _take_second_calls(self, quorum: QuorumRecord) -> list[Future[QuorumRecord]]:
        """Calls of ranks that had called before, which came while this quorum was asked for.

        Nobody had been told of the quorum yet, so nobody can have called for the next one. But if one quorum answers
        two requests of the group, the second request finds ranks that the first has answered.
        """
        with self._lock:
            if quorum.number <= self._last_number:
                return []
            self._last_number = quorum.number
            second, self._there = self._there, {}
        return _futures(second)


def _futures(there: Mapping[int, _Calls]) -> list[Future[QuorumRecord]]:
    return [future for calls in there.values() for future in calls]


def _has_failed(future: Future[T]) -> bool:
    return future.done() and future.exception() is not None


def _fail(futures: Iterable[Future[T]], error: Exception) -> None:
    for future in futures:
        future.set_exception(error)


class VoteCounter:
    """Counts the votes on whether a step is committed."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._lock = concurrency.lock("VoteCounter._lock")  # guards all below
        self._waiting: dict[Future[bool], Vote] = {}  # what each call that waits has said
        self._has_warned = False
        self._closed: Exception | None = None

    def cast(self, rank: int, step: int, yes: bool) -> Future[bool]:
        """Vote. The future says whether all voted yes, as soon as a call of each rank waits. All of these calls are
        answered.

        The first time that ranks vote on different steps, that is logged; their votes still count together.
        """
        future: Future[bool] = Future()
        with self._lock:
            if self._closed is not None:
                future.set_exception(self._closed)
                return future
            self._waiting[future] = Vote(rank, step, yes)
            outcome = tally(self._waiting.values(), self._world_size)
            answered: dict[Future[bool], Vote] = {}
            if outcome is not None:
                answered, self._waiting = self._waiting, {}
            steps = "" if self._has_warned else different_steps(answered.values())
            self._has_warned |= bool(steps)
        # Without the lock: callbacks of a future run in `set_result`. `leave` finds these calls gone already.
        if outcome is None:
            return future
        if steps:
            log.warning(
                "ranks vote on different steps: %s. The votes count together, as in torchft, but the ranks should name"
                " the same step: check that all of them load the same checkpoint",
                steps,
            )
        metrics.VOTES.add("commit" if outcome else "abort")
        for one in answered:
            one.set_result(outcome)
        return future

    def leave(self, rank: int, future: Future[bool]) -> bool:
        """A rank gave up a call, which withdraws its vote. False if the vote has counted: the outcome is about to
        come."""
        with self._lock:
            return self._waiting.pop(future, None) is not None

    def close(self, error: Exception) -> None:
        """End all waiting calls, and all later ones, with this error."""
        with self._lock:
            self._closed = error
            left, self._waiting = self._waiting, {}
        for future in left:
            future.set_exception(error)


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

    def begin(
        self, call: RankRequest | TimedVote | MetadataQuery
    ) -> tuple[WaitingCall[Any], Callable[[Any], object], GroupAsk | None]:
        """Make a call; returns what to wait for, what its outcome means for the caller, and see `quorum`. Raises
        NoSuchRank."""
        if isinstance(call, RankRequest):
            waiting, ask_for_all = self.quorum(call)
            return waiting, partial(self.result, request=call), ask_for_all
        if isinstance(call, TimedVote):
            return self.vote(call.rank, call.step, call.yes), bool, None
        return self.metadata(call.rank), _metadata_or_failure, None

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


def _metadata_or_failure(metadata: str | None) -> str | Failure:
    return RANK_NOT_FOUND if metadata is None else metadata
