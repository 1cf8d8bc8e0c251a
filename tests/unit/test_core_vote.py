"""Votes on a step: all ranks must say yes, and whatever step they name, they are counted together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcoord.core.vote import Vote, different_steps, tally


def yes(rank: int, step: int = 5) -> Vote:
    return Vote(rank, step, True)


def no(rank: int, step: int = 5) -> Vote:
    return Vote(rank, step, False)


@pytest.mark.parametrize(
    ("votes", "world_size", "result"),
    [
        pytest.param([], 2, None, id="nobody has voted"),
        pytest.param([yes(0)], 2, None, id="one is missing"),
        pytest.param([no(1)], 2, None, id="a no does not end it early"),
        pytest.param([yes(0), yes(1)], 2, True, id="torchft: both say yes"),
        pytest.param([yes(0), no(1)], 2, False, id="torchft: one says no"),
        pytest.param([no(0), no(1)], 2, False, id="both say no"),
        pytest.param([yes(0)], 1, True, id="a group of one"),
        pytest.param([yes(0), yes(7)], 2, None, id="a rank that is not in the group stands for nobody"),
        pytest.param([yes(0), yes(1), no(2)], 2, True, id="and spoils nothing"),
        pytest.param([], 0, None, id="no ranks decide nothing"),
        pytest.param([yes(0), yes(0)], 2, None, id="two calls of one rank are no two ranks"),
        pytest.param([yes(0), yes(0), yes(1)], 2, True, id="two calls of one rank"),
        pytest.param([no(0), yes(0), yes(1)], 2, False, id="torchft: a later yes does not take a no back"),
        pytest.param([yes(0, 5), yes(1, 6)], 2, True, id="torchft: the step does not matter"),
        pytest.param([yes(0, 5), no(1, -6)], 2, False, id="nor does it for a no"),
    ],
)
def test_tally(votes: list[Vote], world_size: int, result: bool | None) -> None:
    assert tally(votes, world_size) is result


@given(st.lists(st.booleans(), min_size=1, max_size=9))
def test_the_tally_is_the_and_of_all(answers: list[bool]) -> None:
    votes = [Vote(rank, 0, answer) for rank, answer in enumerate(answers)]
    assert tally(votes, len(answers)) is all(answers)
    votes.pop()
    assert tally(votes, len(answers)) is None


@pytest.mark.parametrize(
    ("votes", "words"),
    [
        ([], ""),
        ([yes(0), no(1), yes(0)], ""),
        ([yes(1, 6), yes(0, 5), no(2, 5)], "rank 0 on 5, rank 1 on 6, rank 2 on 5"),
    ],
)
def test_who_votes_on_which_step(votes: list[Vote], words: str) -> None:
    assert different_steps(votes) == words
