"""Whether a step is committed: all ranks of a replica group must say yes. Pure.

A step is voted on until its group goes on to the next one: again after a NO, and again after a time-out. So a vote is
for a ballot, which is a step and an attempt, and only the votes of the newest ballot are counted together:

  - what a rank said in an attempt that timed out has no effect on a later one;
  - a rank that comes late joins the newest attempt that anybody cast a vote in;
  - a rank whose ballot was overtaken while it waited casts its vote again, in the newest one;
  - a rank that gives up takes its vote back, so that no outcome rests on somebody who is not there to hear it.

Each rank has one vote, its last: so a group that goes back to an earlier step has all its votes there in the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Ballot:
    """What votes are counted together; later ones are greater. Attempts count from 1."""

    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Vote:
    """The last word of a rank."""

    step: int
    attempt: int
    yes: bool

    @property
    def ballot(self) -> Ballot:
        return Ballot(self.step, self.attempt)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What all ranks said together; `yes` is the answer to everyone who voted in this ballot."""

    ballot: Ballot
    yes: bool


def tally(votes: Mapping[int, bool], world_size: int) -> bool | None:
    """Whether all said yes, by rank; None until all ranks from 0 up to `world_size` have voted."""
    cast = [votes[rank] for rank in range(world_size) if rank in votes]
    return all(cast) if cast and len(cast) == world_size else None


def decide_vote(votes: Mapping[int, Vote], world_size: int) -> Outcome | None:
    """The outcome of the newest ballot that anybody cast a vote in; None until all ranks have voted in it."""
    if not votes:
        return None
    newest = max(vote.ballot for vote in votes.values())
    yes = tally({rank: vote.yes for rank, vote in votes.items() if vote.ballot == newest}, world_size)
    return None if yes is None else Outcome(newest, yes)


def next_ballot(votes: Mapping[int, Vote], rank: int, step: int, decided: Ballot | None = None) -> Ballot:
    """Where a rank that is asked about `step` casts its vote.

    That is the newest attempt at this step, unless the rank has voted in it before or it is decided: then the next.

    Args:
        votes: the last votes of the group, by rank.
        decided: the ballot of the last outcome.
    """
    over = [votes[rank].ballot] if rank in votes else []
    over += [decided] if decided else []
    attempts = [vote.attempt for vote in votes.values() if vote.step == step]
    attempts += [ballot.attempt + 1 for ballot in over if ballot.step == step]
    return Ballot(step, max(attempts, default=1))
