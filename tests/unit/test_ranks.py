"""The last rank of a group asks for all, and whatever becomes of it, no rank waits in vain."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace

import builders
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
    return builders.quorum(number)


class Decides:
    """Gives the group the same quorum again and again, and keeps what it asked."""

    def __init__(self) -> None:
        self.asked: list[Mapping[int, RankRequest]] = []

    def __call__(self, asks: Mapping[int, RankRequest], last: RankRequest) -> QuorumRecord:
        self.asked.append(asks)
        return quorum(1)


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


# -- votes ----------------------------------------------------------------------------------------------------------


def test_a_vote_that_was_given_up_has_no_effect() -> None:
    votes = VoteCounter(2)
    assert votes.leave(0, votes.cast(0, 1, False))
    first = votes.cast(1, 1, True)
    assert not first.done()
    second = votes.cast(0, 1, True)
    assert first.result(0) is second.result(0) is True
    assert not votes.leave(0, second), "it has counted"


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
