"""The ranks of one replica group, in their manager's memory, however their calls arrive: torchft's rules, without I/O.

Ranks call from any thread and wait for a future. When a rank gives up, its call is dropped, so nothing depends on it.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, NoReturn, TypeAlias, TypeVar

from ftcoord import concurrency
from ftcoord.coordination.api import KILL_REFUSED, RANK_NOT_FOUND, Failure
from ftcoord.core.quorum_records import QuorumRecord
from ftcoord.core.recovery import quorum_result
from ftcoord.errors import FtcoordError, ServerError
from ftcoord.escaping import neutral
from ftcoord.metrics import process as metrics

log = logging.getLogger(__name__)

S = TypeVar("S")
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

OnEnd: TypeAlias = Callable[[Callable[[], None]], bool]
"""Registers a function that is called, and does not block, when a caller goes away; returns False if it has gone."""


class Meeting(Generic[S, T]):
    """Calls of ranks that wait for each other, each with what it says. A rank may call several times. Thread-safe."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._lock = concurrency.lock("Meeting._lock")  # guards all below
        self._waiting: dict[Future[T], tuple[int, S]] = {}  # in the order in which they came
        self._closed: Exception | None = None

    def join(self, rank: int, said: S) -> tuple[Future[T], dict[Future[T], tuple[int, S]]]:
        """The future outcome of this call. If a call of each rank waits now, also all of these calls, with their ranks:
        who gets them answers them, without a lock, for callbacks run in that."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed is not None:
                future.set_exception(self._closed)
                return future, {}
            self._waiting[future] = rank, said
            if len({one for one, _ in self._waiting.values()}) < self._world_size:
                return future, {}
            waiting, self._waiting = self._waiting, {}
        return future, waiting

    def take(self) -> dict[Future[T], tuple[int, S]]:
        """All calls that wait, for who answers them."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        return waiting

    def leave(self, future: Future[T]) -> bool:
        """Give a call up: it counts no more. False if the outcome is about to come."""
        with self._lock:
            return self._waiting.pop(future, None) is not None

    def close(self, error: Exception) -> None:
        """End all calls that wait, and all later ones, with this error."""
        with self._lock:
            self._closed = error
        _fail(self.take(), error)


def _fail(futures: Iterable[Future[T]], error: Exception) -> None:
    for future in futures:
        future.set_exception(error)


def _has_failed(future: Future[T]) -> bool:
    return future.done() and future.exception() is not None


_local: weakref.WeakValueDictionary[str, RankGroup] = weakref.WeakValueDictionary()
"""The groups of this process by their managers' addresses: their ranks in this process need no socket."""
os.register_at_fork(after_in_child=_local.clear)  # a forked child has no manager: the threads are the parent's


@dataclass(frozen=True, slots=True)
class WaitingCall(Generic[T]):
    """A rank's call that waits for the other ranks.

    Args:
        outcome: the future outcome.
        leave: withdraws the call; returns False if the outcome is about to come.
        to_answer: what an outcome means for this rank; a Failure, or an error that it raises, ends the call.
        ask: if the group's ranks wait for this one: asks for their quorum, until there is one. Whoever made the call
            must call this, or `fail` with why that is impossible.
    """

    outcome: Future[T]
    leave: Callable[[], bool] = lambda: True
    to_answer: Callable[[T], object] = lambda outcome: outcome
    ask: Callable[[], None] | None = None
    fail: Callable[[Exception], None] = lambda error: None

    def wait(self, deadline: float, on_end: OnEnd | None = None) -> T:
        """The outcome. If the wait is interrupted, the call is withdrawn.

        Args:
            deadline: on the monotonic clock. After it the call is withdrawn, and TimeoutError raised.
            on_end: for a caller that may go away, which also ends the wait.
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
        self._replica_id, self.world_size, self._allow_kill = replica_id, world_size, allow_kill  # never change
        self._ask = ask
        self._requests = Meeting[RankRequest, QuorumRecord](world_size)
        self._votes = Meeting["tuple[int, bool]", bool](world_size)  # a step, and yes or no
        self._has_warned = False  # of ranks that vote on different steps
        self._metadata: dict[int, str] = {}  # any thread, one step of a dict at a time
        """Of each rank's last request that a quorum answered."""
        self._lock = concurrency.lock("RankGroup._lock")  # guards all below
        self._asked: dict[int, tuple[RankRequest, Future[QuorumRecord]]] = {}  # replaced; any thread reads it
        """By rank: the request with which the group asked last, and its outcome, which always comes."""
        self._last_number = 0
        """The number of the last quorum that was reported to ranks."""

    @staticmethod
    def at(address: str) -> RankGroup | None:
        """The group whose manager has this address, which is without its token, if it is in this process."""
        return _local.get(address)

    def listen_at(self, address: str) -> None:
        """Make the group findable for ranks in this process."""
        _local[address] = self

    def begin(self, call: RankCall) -> WaitingCall[Any]:
        """Make a call. Raises NoSuchRank."""
        if isinstance(call, RankRequest):
            return self.quorum(call)
        if isinstance(call, TimedVote):
            return self.vote(call.rank, call.step, call.yes)
        if isinstance(call, MetadataQuery):
            return self.metadata(call.rank)
        refused: Future[Failure] = Future()
        refused.set_result(self.kill(call.message))
        return WaitingCall(refused)

    def call(self, call: RankCall, deadline: float, on_end: OnEnd | None = None) -> object:
        """Make a call on this thread; see `WaitingCall.wait`. Returns the answer, which may be a Failure; raises the
        call's error."""
        waiting = self.begin(call)
        if waiting.ask is not None:
            waiting.ask()
        return waiting.to_answer(waiting.wait(deadline, on_end))

    def quorum(self, request: RankRequest) -> WaitingCall[QuorumRecord]:
        """Take part in the group's next request: the outcome means a QuorumResult, or raises NotInQuorum if this group
        has no seat. When a call of each rank waits, the last one is to `ask`. Of a rank's calls the last request
        counts, and all are answered.

        Raises NoSuchRank: such a rank would count in place of a missing one.
        """
        self._check(request.rank)
        outcome, calls = self._requests.join(request.rank, request)
        outcome.add_done_callback(lambda _: self._note_metadata(request, outcome))  # before the rank's own, so that
        # who was answered finds it
        # Whoever gives up does not wait for a request of the group that is under way.
        return WaitingCall(
            outcome,
            lambda: self._requests.leave(outcome) or True,
            lambda quorum: quorum_result(quorum, self._replica_id, request.rank, request.init_sync),
            partial(self._ask_for, calls, request) if calls else None,
            partial(_fail, calls),
        )

    def _ask_for(self, calls: Mapping[Future[QuorumRecord], tuple[int, RankRequest]], last: RankRequest) -> None:
        """Ask without a lock: it takes as long as the quorum, and ranks may call for the next one meanwhile."""
        futures = [*calls]
        with self._lock:
            self._asked = {rank: (request, future) for future, (rank, request) in calls.items()}
        try:
            quorum = self._ask(dict(calls.values()), last)
            with self._lock:
                if quorum.number > self._last_number:
                    # What came meanwhile are calls of ranks that had called before: nobody had been told of the quorum
                    # yet, so nobody can have called for the next one. But if one quorum answers two requests of the
                    # group, the second request finds ranks that the first has answered.
                    self._last_number = quorum.number
                    futures += self._requests.take()
            for future in futures:
                future.set_result(quorum)
        except (TimeoutError, FtcoordError) as error:
            _fail(futures, error)
        finally:  # an interrupt ends the last rank's own call; the other ranks must not wait for it
            _fail([one for one in futures if not one.done()], RuntimeError(_INTERRUPTED))
            with self._lock:  # an error would keep the frames of its callers, and what these made, until the next call
                self._asked = {rank: one for rank, one in self._asked.items() if not _has_failed(one[1])}

    def vote(self, rank: int, step: int, yes: bool) -> WaitingCall[bool]:
        """Vote on a step: the outcome is whether the calls of all ranks that wait together said yes, so a vote that is
        given up has no effect. As in torchft, the ranks need not name the same step. Raises NoSuchRank."""
        self._check(rank)
        outcome, calls = self._votes.join(rank, (step, yes))
        if calls:
            self._warn({(rank, step) for rank, (step, _) in calls.values()})
            is_yes = all(yes for _, (_, yes) in calls.values())
            metrics.VOTES.add("commit" if is_yes else "abort")
            for one in calls:
                one.set_result(is_yes)
        return WaitingCall(outcome, partial(self._votes.leave, outcome))

    def _warn(self, steps: Collection[tuple[int, int]]) -> None:
        """Once, if ranks vote on different steps."""
        if not self._has_warned and len({step for _, step in steps}) > 1:
            self._has_warned = True
            log.warning(
                "ranks vote on different steps: %s. The votes count together, as in torchft, but the ranks should name"
                " the same step: check that all of them load the same checkpoint",
                ", ".join(f"rank {rank} on {step}" for rank, step in sorted(steps)),
            )

    def metadata(self, rank: int) -> WaitingCall[str | None]:
        """The metadata of a rank's last request that a quorum answered; None if none was.

        What no quorum answered does not count: peers load what it names. But a peer may know the quorum before this
        manager does. So if the group has asked with other metadata, this waits until that request has ended.
        """
        outcome: Future[str | None] = Future()
        known, asked = self._metadata.get(rank), self._asked.get(rank)
        if asked is None or asked[0].metadata == known:
            outcome.set_result(known)
        else:  # at once if it has ended
            asked[1].add_done_callback(lambda _: outcome.set_result(self._metadata.get(rank)))
        return WaitingCall(outcome, to_answer=lambda found: RANK_NOT_FOUND if found is None else found)

    def _note_metadata(self, request: RankRequest, outcome: Future[QuorumRecord]) -> None:
        if outcome.exception() is None:
            self._metadata[request.rank] = request.metadata

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise NoSuchRank(
                f"there is no rank {rank}: this group has ranks 0 to {self.world_size - 1}; check the world_size of"
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
        self._requests.close(error)
        self._votes.close(error)
