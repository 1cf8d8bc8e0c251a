"""Votes on a step: all ranks must say yes, and only what is said in the newest ballot counts."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcoord.core.vote import Ballot, Outcome, Vote, decide_vote, next_ballot, tally


def yes(step: int, attempt: int = 1) -> Vote:
    return Vote(step, attempt, True)


def no(step: int, attempt: int = 1) -> Vote:
    return Vote(step, attempt, False)


def outcome(step: int, attempt: int, answer: bool) -> Outcome:
    return Outcome(Ballot(step, attempt), answer)


# -- one ballot ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("votes", "world_size", "result"),
    [
        pytest.param({}, 2, None, id="nobody has voted"),
        pytest.param({0: True}, 2, None, id="one is missing"),
        pytest.param({1: False}, 2, None, id="a no does not end it early"),
        pytest.param({0: True, 1: True}, 2, True, id="torchft: both say yes"),
        pytest.param({0: True, 1: False}, 2, False, id="torchft: one says no"),
        pytest.param({0: False, 1: False}, 2, False, id="both say no"),
        pytest.param({0: True}, 1, True, id="a group of one"),
        pytest.param({0: True, 7: True}, 2, None, id="a rank that is not in the group stands for nobody"),
        pytest.param({0: True, 1: True, 2: False}, 2, True, id="and spoils nothing"),
        pytest.param({}, 0, None, id="no ranks decide nothing"),
    ],
)
def test_tally(votes: dict[int, bool], world_size: int, result: bool | None) -> None:
    assert tally(votes, world_size) is result


@given(st.lists(st.booleans(), min_size=1, max_size=9))
def test_the_tally_is_the_and_of_all(answers: list[bool]) -> None:
    votes = dict(enumerate(answers))
    assert tally(votes, len(answers)) is all(answers)
    votes.popitem()
    assert tally(votes, len(answers)) is None


# -- many ballots -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("votes", "result"),
    [
        pytest.param({}, None, id="nobody has voted"),
        pytest.param({0: yes(5), 1: yes(5)}, outcome(5, 1, True), id="torchft: both say yes"),
        pytest.param({0: yes(5), 1: no(5)}, outcome(5, 1, False), id="torchft: one says no"),
        pytest.param({0: yes(5), 1: yes(6)}, None, id="votes for two steps are not one"),
        pytest.param({0: no(5, 1), 1: yes(5, 2)}, None, id="the attempt is not the same: the no does not count"),
        pytest.param({0: yes(5, 2), 1: yes(5, 2)}, outcome(5, 2, True), id="the second attempt"),
        pytest.param({0: yes(5, 9), 1: yes(6, 1)}, None, id="a step is newer than any attempt at the one before"),
        pytest.param({0: yes(-1), 1: yes(-1)}, outcome(-1, 1, True), id="steps may be negative"),
    ],
)
def test_only_the_newest_ballot_counts(votes: dict[int, Vote], result: Outcome | None) -> None:
    assert decide_vote(votes, 2) == result


@pytest.mark.parametrize(
    ("votes", "decided", "ballot"),
    [
        pytest.param({}, None, Ballot(5, 1), id="the first"),
        pytest.param({1: yes(5, 3)}, None, Ballot(5, 3), id="join what another rank began"),
        pytest.param({0: no(5, 1)}, None, Ballot(5, 2), id="again after a time-out"),
        pytest.param({0: no(5, 1), 1: yes(5, 1)}, Ballot(5, 1), Ballot(5, 2), id="again after a no"),
        pytest.param({0: no(5, 1), 1: yes(5, 2)}, Ballot(5, 1), Ballot(5, 2), id="the other is there already"),
        pytest.param({0: yes(4, 7), 1: yes(4, 7)}, Ballot(4, 7), Ballot(5, 1), id="the next step"),
        pytest.param({1: no(5, 2)}, Ballot(5, 2), Ballot(5, 3), id="its own vote is lost, what was decided is not"),
        pytest.param({0: yes(9), 1: yes(9)}, Ballot(9, 1), Ballot(5, 1), id="back to an earlier step"),
    ],
)
def test_where_rank_0_votes_on_step_5(votes: dict[int, Vote], decided: Ballot | None, ballot: Ballot) -> None:
    assert next_ballot(votes, 0, 5, decided) == ballot


# -- as a manager uses it -----------------------------------------------------------------------------------------


@dataclass
class Group:
    world_size: int = 2
    votes: dict[int, Vote] = field(default_factory=dict)
    decided: Outcome | None = None

    def cast(self, rank: int, step: int, answer: bool) -> Ballot:
        ballot = next_ballot(self.votes, rank, step, self.decided.ballot if self.decided else None)
        self.votes[rank] = Vote(ballot.step, ballot.attempt, answer)
        result = decide_vote(self.votes, self.world_size)
        if result is not None:
            assert self.decided is None or self.decided.ballot != result.ballot
            self.decided = result
        return ballot


def test_a_no_that_timed_out_does_not_spoil_the_next_attempt() -> None:
    group = Group()
    group.cast(0, 5, False)
    group.cast(0, 5, True)
    assert group.decided is None
    group.cast(1, 5, True)
    assert group.decided == outcome(5, 2, True)


def test_both_time_out_one_after_the_other() -> None:
    group = Group()
    group.cast(0, 5, True)
    group.votes.pop(0)
    group.cast(1, 5, False)
    group.votes.pop(1)
    group.cast(0, 5, True)
    group.cast(1, 5, True)
    assert group.decided == outcome(5, 1, True)


def test_a_step_that_was_not_committed_is_voted_on_again() -> None:
    group = Group()
    for attempt, answers in enumerate([(True, False), (False, True), (True, True)], start=1):
        assert [group.cast(rank, 5, answer) for rank, answer in enumerate(answers)] == [Ballot(5, attempt)] * 2
        assert group.decided == outcome(5, attempt, all(answers))
    assert [group.cast(rank, 6, True) for rank in (1, 0)] == [Ballot(6, 1)] * 2


def test_a_group_that_goes_back_to_an_earlier_step_is_not_stuck() -> None:
    group = Group()
    for step in (9, 9, 5):
        for rank in (0, 1):
            group.cast(rank, step, True)
    assert group.decided == outcome(5, 1, True)


acts = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([True, True, False, None])), max_size=40)


@given(acts)
def test_an_outcome_is_what_all_said_in_its_ballot_and_ballots_only_grow(
    history: list[tuple[int, bool | None]],
) -> None:
    """None: the rank gives up and takes its vote back. In the end all have given up, and vote once more."""
    group, said, last = Group(3), dict[tuple[int, Ballot], bool](), Ballot(5, 0)
    for rank, answer in [*history, *((rank, None) for rank in range(3)), *((rank, True) for rank in range(3))]:
        if answer is None:
            group.votes.pop(rank, None)
            continue
        before = group.votes.get(rank)
        ballot = group.cast(rank, 5, answer)
        assert before is None or ballot > before.ballot
        assert ballot > last
        said[rank, ballot] = answer
        if group.decided and group.decided.ballot > last:
            last = group.decided.ballot
            assert last == ballot
            assert group.decided.yes == all(said[one, last] for one in range(3))
    assert group.decided is not None
    assert group.decided.yes
    assert last == ballot
