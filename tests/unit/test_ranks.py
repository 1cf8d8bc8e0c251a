"""The last rank of a group asks for all, and whatever becomes of it, no rank waits in vain."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcoord import concurrency
from ftcoord.coordination.ranks import RankBarrier, RankRequest, VoteCounter, WaitingCall
from ftcoord.core.quorum_records import QuorumRecord
from ftcoord.errors import EtcdUnavailable


def ask(rank: int) -> RankRequest:
    return RankRequest(rank, 1, "", False, 0, 1.0, "")


@pytest.mark.parametrize("error", [TimeoutError("late"), EtcdUnavailable("away")], ids=repr)
def test_a_failure_is_told_to_all(error: Exception) -> None:
    def fail(asks: Mapping[int, RankRequest], last: RankRequest) -> QuorumRecord:
        raise error

    barrier = RankBarrier(2, fail)
    first, _ = barrier.join(ask(0))
    second, conclude = barrier.join(ask(1))
    assert conclude is not None
    conclude.run()
    assert first.exception(0) is second.exception(0) is error


def test_an_interrupt_is_its_owners_and_the_others_are_told_to_ask_again() -> None:
    def interrupt(asks: Mapping[int, RankRequest], last: RankRequest) -> QuorumRecord:
        raise KeyboardInterrupt

    barrier = RankBarrier(2, interrupt)
    first, _ = barrier.join(ask(0))
    _, conclude = barrier.join(ask(1))
    assert conclude is not None
    with pytest.raises(KeyboardInterrupt):
        conclude.run()
    with pytest.raises(RuntimeError, match="ask again"):
        first.result(0)


# -- two calls of one rank ------------------------------------------------------------------------------------------


def quorum(number: int) -> QuorumRecord:
    return QuorumRecord(number, number, (), (), 0.0)


class Decides:
    """Gives the group the same quorum again and again, and keeps what it asked."""

    def __init__(self) -> None:
        self.asked: list[Mapping[int, RankRequest]] = []

    def __call__(self, asks: Mapping[int, RankRequest], last: RankRequest) -> QuorumRecord:
        self.asked.append(asks)
        return quorum(1)


def test_both_calls_of_a_rank_are_answered_and_the_last_request_counts() -> None:
    decide = Decides()
    barrier = RankBarrier(2, decide)
    first, _ = barrier.join(ask(0))
    second, _ = barrier.join(replace(ask(0), step=2))
    third, conclude = barrier.join(ask(1))
    assert conclude is not None
    conclude.run()
    assert [one.result(0).number for one in (first, second, third)] == [1, 1, 1]
    assert [one.step for one in decide.asked[0].values()] == [2, 1]


def test_a_request_that_was_given_up_does_not_count_for_an_earlier_call_of_its_rank() -> None:
    decide = Decides()
    barrier = RankBarrier(2, decide)
    kept, _ = barrier.join(ask(0))
    given_up, _ = barrier.join(replace(ask(0), handle="given up"))
    assert barrier.leave(0, given_up)
    _, conclude = barrier.join(ask(1))
    assert conclude is not None
    conclude.run()
    assert kept.result(0).number == 1
    assert not given_up.done()
    assert decide.asked[0][0].handle == ""


def test_a_second_call_while_the_group_asks_is_answered_too_and_leaves_nothing() -> None:
    late: list[Future[QuorumRecord]] = []

    def decide(asks: Mapping[int, RankRequest], last: RankRequest) -> QuorumRecord:
        late.append(barrier.join(ask(0))[0])
        return quorum(len(late))

    barrier = RankBarrier(2, decide)
    for number in (1, 2):
        first, _ = barrier.join(ask(0))
        _, conclude = barrier.join(ask(1))
        assert conclude is not None
        conclude.run()
        assert first.result(0).number == late[-1].result(0).number == number
    assert barrier.join(ask(1))[1] is None, "the second call does not stand for the rank's next one"


def test_a_call_for_the_next_quorum_is_not_answered_by_the_last_one() -> None:
    """All ranks called twice, so the group asked twice, and one quorum has answered both requests."""
    barrier = RankBarrier(2, lambda asks, last: quorum(1))
    conclusions = []
    for _ in range(2):
        barrier.join(ask(0))
        conclusions.append(barrier.join(ask(1))[1])
    first, second = conclusions
    assert first is not None
    assert second is not None
    first.run()
    following, _ = barrier.join(ask(0))
    second.run()
    assert not following.done()


def test_a_second_call_outlives_the_failure_of_the_first() -> None:
    late: list[Future[QuorumRecord]] = []

    def decide(asks: Mapping[int, RankRequest], last: RankRequest) -> QuorumRecord:
        if late:
            return quorum(1)
        late.append(barrier.join(ask(0))[0])
        raise TimeoutError

    barrier = RankBarrier(2, decide)
    first, _ = barrier.join(ask(0))
    for _ in range(2):
        _, conclude = barrier.join(ask(1))
        assert conclude is not None
        conclude.run()
    assert isinstance(first.exception(0), TimeoutError)
    assert late[0].result(0).number == 1


# -- votes ----------------------------------------------------------------------------------------------------------


def test_both_votes_of_a_rank_are_answered_and_a_no_stays_a_no() -> None:
    votes = VoteCounter(2)
    calls = [votes.cast(0, 1, False), votes.cast(0, 1, True), votes.cast(1, 1, True)]
    assert [one.result(0) for one in calls] == [False, False, False]
    calls = [votes.cast(rank, 1, True) for rank in (0, 1)]
    assert [one.result(0) for one in calls] == [True, True], "the next attempt has nothing of the last one"


def test_a_vote_that_was_given_up_has_no_effect() -> None:
    votes = VoteCounter(2)
    assert votes.leave(0, votes.cast(0, 1, False))
    first = votes.cast(1, 1, True)
    assert not first.done()
    second = votes.cast(0, 1, True)
    assert first.result(0) is second.result(0) is True
    assert not votes.leave(0, second), "it has counted"


def test_one_of_two_votes_is_given_up() -> None:
    votes = VoteCounter(2)
    kept, given_up = votes.cast(0, 1, True), votes.cast(0, 1, False)
    assert votes.leave(0, given_up)
    assert votes.cast(1, 1, True).result(0) is kept.result(0) is True
    assert not given_up.done()


def test_votes_on_different_steps_count_together_and_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    votes = VoteCounter(2)
    for step in (5, 8):
        calls = [votes.cast(0, step, True), votes.cast(1, step + 1, True)]
        assert [one.result(0) for one in calls] == [True, True]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "rank 0 on 5, rank 1 on 6" in line
    assert "check that all of them load the same checkpoint" in line


acts = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([True, True, False, None])), max_size=40)


@given(acts)
def test_an_outcome_is_what_the_waiting_calls_said(history: list[tuple[int, bool | None]]) -> None:
    """None: the rank gives up all of its calls."""
    votes, waiting = VoteCounter(3), dict[Future[bool], tuple[int, bool]]()
    for rank, yes in history:
        if yes is None:
            for call in [call for call, (one, _) in waiting.items() if one == rank]:
                assert votes.leave(rank, call)
                del waiting[call]
            continue
        call = votes.cast(rank, 5, yes)
        waiting[call] = (rank, yes)
        complete = {one for one, _ in waiting.values()} == {0, 1, 2}
        assert {one.done() for one in waiting} == {complete}
        if complete:
            assert {one.result(0) for one in waiting} == {all(said for _, said in waiting.values())}
            waiting.clear()


def test_a_caller_that_had_gone_before_is_not_waited_for() -> None:
    """gRPC does not call back for a call that has ended already, as that of a native rank that was killed."""
    votes = VoteCounter(2)
    outcome = votes.cast(0, 5, True)
    call = WaitingCall(outcome, lambda: votes.leave(0, outcome))
    began = concurrency.now()
    with pytest.raises(TimeoutError):
        call.wait(began + 10, lambda _when_it_goes: False)
    assert concurrency.now() < began + 10
    assert not votes.cast(1, 5, True).done(), "its vote is taken back"
