"""What the ranks of one replica group decide together, in the memory of their manager: torchft's rules, and no wire.

Ranks call from any thread and wait for a future. A rank that gives up is forgotten, so that nothing rests on it.
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
    """What one rank asks a quorum for. `timeout` in seconds, from when it was received."""

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


class RankBarrier:
    """Collects the ranks that ask for a quorum; when all are there the last one's thread asks for all.

    Args:
        world_size: how many ranks there are.
        ask: gets the requests by rank, and the last one; gives the quorum, or raises what all ranks shall be told.
    """

    def __init__(self, world_size: int, ask: Callable[[Mapping[int, RankRequest], RankRequest], QuorumRecord]) -> None:
        self._world_size, self._ask = world_size, ask
        self._lock = concurrency.lock("RankBarrier._lock")
        self._there: dict[int, tuple[RankRequest, list[Future[QuorumRecord]]]] = {}

    def join(self, ask: RankRequest) -> tuple[Future[QuorumRecord], Callable[[], None] | None]:
        """This rank's answer to come; and, for the last rank, what it must call to have the quorum asked for.

        Of several calls of one rank the last one says what it asks, and all are answered.
        """
        future: Future[QuorumRecord] = Future()
        with self._lock:
            _, waiting = self._there.get(ask.rank, (ask, []))
            self._there[ask.rank] = (ask, [*waiting, future])
            if len(self._there) < self._world_size:
                return future, None
            all_there, self._there = self._there, {}
        return future, lambda: self._conclude(all_there, ask)

    def leave(self, rank: int, future: Future[QuorumRecord]) -> bool:
        """A rank gave up, whether the others ask for it already or not."""
        with self._lock:
            ask, waiting = self._there.get(rank, (None, []))
            if future in waiting:
                waiting.remove(future)
            if ask is not None and not waiting:
                del self._there[rank]
        return True

    def _conclude(
        self, all_there: Mapping[int, tuple[RankRequest, list[Future[QuorumRecord]]]], last: RankRequest
    ) -> None:
        futures = [future for _, waiting in all_there.values() for future in waiting]
        try:
            quorum = self._ask({rank: ask for rank, (ask, _) in all_there.items()}, last)
            for future in futures:
                future.set_result(quorum)
        except (TimeoutError, FtcoordError) as error:
            for future in futures:
                future.set_exception(error)
        finally:  # what interrupts the last rank is its own; the others must not wait for it
            for future in futures:
                if not future.done():
                    future.set_exception(RuntimeError(_INTERRUPTED))


class VoteCounter:
    """Counts the votes on whether a step is committed."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._lock = concurrency.lock("VoteCounter._lock")
        self._votes: dict[int, Vote] = {}
        self._waiting: dict[Future[bool], tuple[int, Ballot]] = {}
        self._decided: Ballot | None = None

    def cast(self, rank: int, step: int, yes: bool) -> Future[bool]:
        """Vote; whether all said yes is told by the future when all have voted.

        A rank's last vote counts, and all its calls that wait for that ballot are answered.
        """
        future: Future[bool] = Future()
        with self._lock:
            ballot = next_ballot(self._votes, rank, step, self._decided)
            self._votes[rank] = Vote(ballot.step, ballot.attempt, yes)
            self._waiting[future] = (rank, ballot)
            self._recast(ballot)
            outcome = decide_vote(self._votes, self._world_size)
            if outcome is None:
                return future
            self._decided = outcome.ballot
            told = [one for one, (_, ballot) in self._waiting.items() if ballot == outcome.ballot]
            for one in told:
                del self._waiting[one]
        for one in told:
            one.set_result(outcome.yes)
        return future

    def _recast(self, newest: Ballot) -> None:
        """Who waits in an earlier attempt at the same step votes again in this one."""
        for future, (rank, ballot) in self._waiting.items():
            if ballot.step == newest.step and ballot < newest:
                self._waiting[future] = (rank, newest)
                if self._voted(rank, ballot):
                    self._votes[rank] = Vote(newest.step, newest.attempt, self._votes[rank].yes)

    def leave(self, rank: int, future: Future[bool]) -> bool:
        """A rank gave up: its vote does not count any more, unless another call of it waits for the same ballot. False
        if it has counted, and the outcome is at hand."""
        with self._lock:
            waiting = self._waiting.pop(future, None)
            if waiting is None:
                return False
            if self._voted(*waiting) and waiting not in self._waiting.values():
                del self._votes[rank]
            return True

    def _voted(self, rank: int, ballot: Ballot) -> bool:
        """Whether that is what its last vote was for."""
        vote = self._votes.get(rank)
        return vote is not None and vote.ballot == ballot


def outcome(future: Future[T], timeout: float, give_up: Callable[[], bool]) -> T:
    """What a rank is told. After `timeout` seconds it gives up, if it can, and TimeoutError is raised."""
    try:
        return future.result(timeout)
    except FutureTimeout:
        if future.done() or not give_up():
            return future.result()  # perhaps a TimeoutError of its own
        raise TimeoutError("the other ranks did not come in time") from None
