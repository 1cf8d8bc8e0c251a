"""Whether a step is committed: all ranks of a replica group must vote yes. Pure.

The votes that count are those of calls that wait together. A rank that gives up withdraws its vote, so an attempt that
timed out has no effect on a later one. If several calls of a rank wait at the same time, all of them count: one NO
among them is a NO. As in torchft, the ranks need not name the same step.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vote:
    """One rank's vote on a step."""

    rank: int
    step: int
    yes: bool


def tally(votes: Collection[Vote], world_size: int) -> bool | None:
    """Whether all voted yes; None until all ranks from 0 to `world_size` - 1 have voted. Other ranks do not count."""
    cast = [vote for vote in votes if 0 <= vote.rank < world_size]
    if not cast or len({vote.rank for vote in cast}) < world_size:
        return None
    return all(vote.yes for vote in cast)


def different_steps(votes: Collection[Vote]) -> str:
    """Which ranks voted on which step, in words, if the steps differ; else empty."""
    if len({vote.step for vote in votes}) < 2:
        return ""
    return ", ".join(f"rank {rank} on {step}" for rank, step in sorted({(vote.rank, vote.step) for vote in votes}))
