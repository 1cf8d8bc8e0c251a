"""What the ranks of one replica group decide together, in their manager's memory: torchft's rules, with no I/O.

Ranks call from any thread and wait for a future. A rank that gives up is forgotten, so that nothing depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Final, TypeVar

from ftcoord import concurrency
from ftcoord.core.quorum_records import QuorumRecord
from ftcoord.core.vote import Ballot, Vote, decide_vote, next_ballot
from ftcoord.errors import FtcoordError

T = TypeVar("T")
_INTERRUPTED: Final = "the rank that asked for the whole group was interrupted: ask again"


@dataclass(frozen=True, slots=True)
class RankRequest:
    """What one rank asks of a quorum. `timeout` in seconds, from when it was received."""

    rank: int
    step: int
    metadata: str
    shrink_only: bool
    commit_failures: int
    timeout: float
    handle: str


@dataclass(frozen=True, slots=True)
class RankVote:
    """One rank's vote on a step."""

    rank: int
    step: int
    yes: bool


@dataclass(slots=True)
class _Arrival:
    """A rank that is there: its last request, and the futures of all its calls."""

    request: RankRequest
    calls: list[Future[QuorumRecord]]


class RankBarrier:
    """Collects the ranks that ask for a quorum; when all are there, the last one's thread asks for the group.

    Args:
        world_size: how many ranks there are.
        ask: takes the requests by rank, and the last one; returns the quorum, or raises what all ranks receive.
    """

    def __init__(self, world_size: int, ask: Callable[[Mapping[int, RankRequest], RankRequest], QuorumRecord]) -> None:
        self._world_size, self._ask = world_size, ask
        self._lock = concurrency.lock("RankBarrier._lock")
        self._there: dict[int, _Arrival] = {}  # guarded by _lock, as are the arrivals in it

    def join(self, request: RankRequest) -> tuple[Future[QuorumRecord], Callable[[], None] | None]:
        """This rank's future answer; and for the last rank, what it must call to have the group's quorum asked for.

        If a rank calls several times, its last request counts, and all of its calls are answered.
        """
        future: Future[QuorumRecord] = Future()
        with self._lock:
            arrival = self._there.setdefault(request.rank, _Arrival(request, []))
            arrival.request = request
            arrival.calls.append(future)
            if len(self._there) < self._world_size:
                return future, None
            all_there, self._there = self._there, {}  # from here on they belong to this thread
        return future, lambda: self._ask_for(all_there, request)

    def leave(self, rank: int, future: Future[QuorumRecord]) -> bool:
        """A rank gave up one call, whether the group has asked already or not. Always True: see `await_outcome`."""
        with self._lock:
            arrival = self._there.get(rank)
            if arrival is not None and future in arrival.calls:
                arrival.calls.remove(future)
                if not arrival.calls:
                    del self._there[rank]
        return True

    def _ask_for(self, all_there: Mapping[int, _Arrival], last: RankRequest) -> None:
        """Without the lock: asking takes as long as the quorum, and ranks may join the next barrier meanwhile."""
        futures = [future for arrival in all_there.values() for future in arrival.calls]
        try:
            quorum = self._ask({rank: arrival.request for rank, arrival in all_there.items()}, last)
            for future in futures:
                future.set_result(quorum)
        except (TimeoutError, FtcoordError) as error:
            for future in futures:
                future.set_exception(error)
        finally:  # an interrupt ends the last rank's own call; the other ranks must not wait for it
            for future in futures:
                if not future.done():
                    future.set_exception(RuntimeError(_INTERRUPTED))


class VoteCounter:
    """Counts the votes on whether a step is committed."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._lock = concurrency.lock("VoteCounter._lock")  # guards all below
        self._votes: dict[int, Vote] = {}  # the last vote of each rank
        self._waiting: dict[Future[bool], tuple[int, Ballot]] = {}  # the rank of each call, and what it waits for
        self._last_ballot: Ballot | None = None  # the last one that was decided

    def cast(self, rank: int, step: int, yes: bool) -> Future[bool]:
        """Vote; the future tells whether all said yes, when all have voted.

        A rank's last vote counts, and all of its calls that wait for that ballot are answered.
        """
        future: Future[bool] = Future()
        with self._lock:
            ballot = next_ballot(self._votes, rank, step, self._last_ballot)
            self._votes[rank] = Vote(ballot.step, ballot.attempt, yes)
            self._waiting[future] = (rank, ballot)
            self._recast(ballot)
            decided = decide_vote(self._votes, self._world_size)
            if decided is None:
                return future
            self._last_ballot = decided.ballot
            answered = [one for one, (_, ballot) in self._waiting.items() if ballot == decided.ballot]
            for one in answered:
                del self._waiting[one]
        # Without the lock: callbacks of a future run in `set_result`. `leave` finds these calls gone already.
        for one in answered:
            one.set_result(decided.yes)
        return future

    def _recast(self, newest: Ballot) -> None:
        """Let calls that wait in an earlier attempt at the same step vote again in this one. Under the lock."""
        for future, (rank, ballot) in self._waiting.items():
            if ballot.step == newest.step and ballot < newest:
                self._waiting[future] = (rank, newest)
                if self._voted(rank, ballot):
                    self._votes[rank] = Vote(newest.step, newest.attempt, self._votes[rank].yes)

    def leave(self, rank: int, future: Future[bool]) -> bool:
        """A rank gave up one call: its vote no longer counts, unless another call of it waits for the same ballot.

        False if the vote has counted; the outcome is then about to come.
        """
        with self._lock:
            waiting = self._waiting.pop(future, None)
            if waiting is None:
                return False
            if self._voted(*waiting) and waiting not in self._waiting.values():
                del self._votes[rank]
            return True

    def _voted(self, rank: int, ballot: Ballot) -> bool:
        """Whether the rank's last vote was for that ballot. Under the lock."""
        vote = self._votes.get(rank)
        return vote is not None and vote.ballot == ballot


def await_outcome(future: Future[T], timeout: float, leave: Callable[[], bool]) -> T:
    """What a rank receives. After `timeout` seconds it leaves, if it still can, and TimeoutError is raised."""
    try:
        return future.result(timeout)
    except FutureTimeout:
        if future.done() or not leave():
            return future.result()  # which may be a TimeoutError that the group's request ended with
        raise TimeoutError("the other ranks did not come in time") from None
