"""What a vote may come to, judged by the calls of the ranks alone: who called when, with which vote, and was told what.

Written apart from `ftcoord.coordination.ranks`: the manager's own memory is not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass
class RankCall:
    """One call of a rank, from one moment of the world to another. Of those two are never the same.

    Args:
        yes: what it votes; None if it asks for a quorum.
        until: when its time is over, in the world's seconds.
        ended: infinite while it waits.
        told: the outcome of the vote; None while it waits, and if it was told none.
    """

    rank: int
    yes: bool | None
    began: int
    until: float = math.inf
    ended: float = math.inf
    told: bool | None = None

    @property
    def waits(self) -> bool:
        return self.ended == math.inf

    def overlaps(self, other: RankCall) -> bool:
        return self.began < other.ended and other.began < self.ended


class RankCalls:
    """All calls of the ranks of one manager.

    Args:
        world_size: how many ranks there are.
    """

    def __init__(self, world_size: int) -> None:
        self._ranks = range(world_size)
        self.votes: list[RankCall] = []
        self._asks: dict[int, RankCall] = {}
        """By the moments at which they began."""

    def begin(self, rank: int, yes: bool | None, moment: int, until: float = math.inf) -> RankCall:
        """A rank is about to call."""
        call = RankCall(rank, yes, moment, until)
        if yes is None:
            self._asks[moment] = call
        else:
            self.votes.append(call)
        return call

    def first_to_give_up(self) -> float:
        """When the time of the first vote is over that waits; infinity if none does."""
        return min((one.until for one in self.votes if one.waits), default=math.inf)

    def problem_of_vote(self, vote: RankCall) -> str:
        """Why a rank must not have been told that; empty if it may. Of those that still wait the best is hoped.

        A step is committed if calls of all ranks wait together and say yes. A call that was told nothing, because its
        time was over, has not counted.
        """
        if vote.told is None:
            return ""
        together = [*self._beside(vote)]
        if not vote.told:
            return "" if any(one.yes is False for one in together) else f"it was told no, and all say yes: {together}"
        if any(one.yes is False and one.told for one in together):
            return f"it was told yes, with one that said no: {together}"
        silent = [rank for rank in self._ranks if not any(one.rank == rank and one.yes for one in together)]
        return f"it was told yes, and ranks {silent} have not said yes: {together}" if silent else ""

    def problem_of_ask(self, asking: Mapping[int, int], last: int) -> str:
        """Why the group must not ask for a quorum for these calls, by rank, of which the `last` one began last; empty
        if it may. Both are told by the moments at which they began."""
        absent = [rank for rank in self._ranks if rank not in asking]
        gone = [rank for rank, moment in asking.items() if self._asks[moment].ended < last]
        return f"ranks {absent} have not asked, and ranks {gone} have given up" if absent or gone else ""

    def _beside(self, vote: RankCall) -> Iterator[RankCall]:
        """The calls that may have counted with it."""
        for one in self.votes:
            if one.overlaps(vote) and (one.waits or one.told is vote.told):
                yield one
