"""What the ranks of one replica group decide together, in their manager's memory: torchft's rules, without I/O.

Ranks call from any thread and wait for a future. When a rank gives up, its call is dropped, so nothing depends on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from ftcoord import concurrency
from ftcoord.core.quorum_records import QuorumRecord
from ftcoord.core.vote import Vote, different_steps, tally
from ftcoord.errors import FtcoordError, ServerError
from ftcoord.metrics import process as metrics

log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_CALLS: Final = 4
"""The most calls of one rank that wait at a time: it makes one, and another one when it has given up the first and that
is not known here yet. A later call ends the oldest: else anyone who reaches a manager could make any number wait."""
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

        If a rank calls several times, its last request counts, and its last MOST_CALLS calls are answered; even one
        that comes while the group's request is in progress.
        """
        future: Future[QuorumRecord] = Future()
        with self._lock:
            if self._closed is not None:
                future.set_exception(self._closed)
                return future, None
            calls = self._there.setdefault(request.rank, {})
            calls[future] = request
            superseded = _take_oldest(calls)
            is_last = len(self._there) >= self._world_size
            if is_last:
                all_there, self._there = self._there, {}  # from here on they belong to this thread
                self._asked = {rank: [*calls.items()][-1][::-1] for rank, calls in all_there.items()}
        _fail(superseded, _superseded(request.rank))  # without the lock: callbacks run in it
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


def _take_oldest(calls: dict[Future[T], Any]) -> list[Future[T]]:
    """Take the calls of a rank above MOST_CALLS out: the oldest, of which there is one at the most."""
    if len(calls) <= MOST_CALLS:
        return []
    oldest = next(iter(calls))
    del calls[oldest]
    return [oldest]


def _superseded(rank: int) -> ServerError:
    return ServerError(f"{MOST_CALLS} later calls of rank {rank} came: a rank makes one call at a time")


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
        answered, of each rank the last MOST_CALLS.

        The first time that ranks vote on different steps, that is logged; their votes still count together.
        """
        future: Future[bool] = Future()
        with self._lock:
            if self._closed is not None:
                future.set_exception(self._closed)
                return future
            superseded = self._add(future, Vote(rank, step, yes))
            outcome = tally(self._waiting.values(), self._world_size)
            answered: dict[Future[bool], Vote] = {}
            if outcome is not None:
                answered, self._waiting = self._waiting, {}
            steps = "" if self._has_warned else different_steps(answered.values())
            self._has_warned |= bool(steps)
        # Without the lock: callbacks of a future run in `set_result`. `leave` finds these calls gone already.
        _fail(superseded, _superseded(rank))
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

    def _add(self, future: Future[bool], vote: Vote) -> list[Future[bool]]:
        """Under the lock: note a call; returns that which it ends."""
        self._waiting[future] = vote
        if len(self._waiting) <= MOST_CALLS:
            return []
        superseded = _take_oldest({call: one for call, one in self._waiting.items() if one.rank == vote.rank})
        for call in superseded:
            del self._waiting[call]
        return superseded

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
