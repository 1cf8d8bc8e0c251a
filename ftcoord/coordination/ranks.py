"""What the ranks of one replica group decide together, in their manager's memory: torchft's rules, without I/O.

Ranks call from any thread and wait for a future. When a rank gives up, its call is dropped, so nothing depends on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, TypeAlias

from ftcoord import concurrency
from ftcoord.core.quorum_records import QuorumRecord
from ftcoord.core.vote import Vote, different_steps, tally
from ftcoord.errors import FtcoordError
from ftcoord.metrics import process as metrics

log = logging.getLogger(__name__)

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
            self._there.setdefault(request.rank, {})[future] = request
            if len(self._there) < self._world_size:
                return future, None
            all_there, self._there = self._there, {}  # from here on they belong to this thread
        futures = _futures(all_there)
        return future, GroupAsk(lambda: self._ask_for(all_there, request), lambda error: _fail(futures, error))

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


def _fail(futures: Iterable[Future[QuorumRecord]], error: Exception) -> None:
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
            if outcome is None:
                return future
            answered, self._waiting = self._waiting, {}
            steps = "" if self._has_warned else different_steps(answered.values())
            self._has_warned |= bool(steps)
        if steps:
            log.warning(
                "ranks vote on different steps: %s. The votes count together, as in torchft, but the ranks should name"
                " the same step: check that all of them load the same checkpoint",
                steps,
            )
        metrics.VOTES.add("commit" if outcome else "abort")
        # Without the lock: callbacks of a future run in `set_result`. `leave` finds these calls gone already.
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
