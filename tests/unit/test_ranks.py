"""The last rank of a group asks for all, and whatever becomes of it, no rank waits in vain; votes count together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import builders
import pytest
from hypothesis import given, strategies as st

from ftcoord import concurrency
from ftcoord.coordination.ranks import RankGroup, RankRequest, WaitingCall
from ftcoord.core.quorum_records import QuorumRecord


def ask(rank: int) -> RankRequest:
    return RankRequest(rank, 1, "", False, 0, 1.0, "")


class Decides:
    """Gives the group the same quorum again and again, or raises an error, and keeps what it asked."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.asked: list[Mapping[int, RankRequest]] = []
        self._error = error

    def __call__(self, asks: Mapping[int, RankRequest], last: RankRequest) -> QuorumRecord:
        self.asked.append(asks)
        if self._error is not None:
            raise self._error
        return builders.quorum(1)


def group(decides: Decides, world_size: int = 2) -> RankGroup:
    return RankGroup("g", world_size, decides, allow_kill=False)


def test_an_interrupt_is_its_owners_and_the_others_are_told_to_ask_again() -> None:
    ranks = group(Decides(KeyboardInterrupt()))
    first = ranks.quorum(ask(0))
    last = ranks.quorum(ask(1))
    assert last.ask is not None
    with pytest.raises(KeyboardInterrupt):
        last.ask()
    with pytest.raises(RuntimeError, match="ask again"):
        first.outcome.result(0)


def test_a_request_that_was_given_up_does_not_count_for_an_earlier_call_of_its_rank() -> None:
    decides = Decides()
    ranks = group(decides)
    kept = ranks.quorum(ask(0))
    given_up = ranks.quorum(replace(ask(0), handle="given up"))
    assert given_up.leave()
    last = ranks.quorum(ask(1))
    assert last.ask is not None
    last.ask()
    assert kept.outcome.result(0).number == 1
    assert not given_up.outcome.done()
    assert decides.asked[0][0].handle == ""


# -- votes ----------------------------------------------------------------------------------------------------------


acts = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([True, True, False, None])), max_size=40)


@given(acts)
def test_an_outcome_is_what_the_waiting_calls_said(history: list[tuple[int, bool | None]]) -> None:
    """None: the rank gives up all of its calls. So a NO does not end a vote early, and no later YES takes it back."""
    ranks, waiting = group(Decides(), 3), list[tuple[WaitingCall[bool], int, bool]]()
    for rank, yes in history:
        if yes is None:
            assert all(call.leave() for call, one, _ in waiting if one == rank)
            waiting = [one for one in waiting if one[1] != rank]
            continue
        waiting.append((ranks.vote(rank, 5, yes), rank, yes))
        complete = {one for _, one, _ in waiting} == {0, 1, 2}
        assert {call.outcome.done() for call, _, _ in waiting} == {complete}
        if complete:
            assert {call.outcome.result(0) for call, _, _ in waiting} == {all(said for _, _, said in waiting)}
            waiting.clear()


def test_votes_on_different_steps_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    ranks = group(Decides(), 3)
    for _ in range(2):
        for rank, step in ((1, 6), (0, 5), (2, 5)):
            ranks.vote(rank, step, True)
    (said,) = caplog.messages
    assert "rank 0 on 5, rank 1 on 6, rank 2 on 5" in said


def test_a_caller_that_had_gone_before_is_not_waited_for() -> None:
    """gRPC does not call back for a call that has ended already, as that of a native rank that was killed."""
    ranks = group(Decides())
    began = concurrency.now()
    with pytest.raises(TimeoutError):
        ranks.vote(0, 5, True).wait(began + 10, lambda _when_it_goes: False)
    assert concurrency.now() < began + 10
    assert not ranks.vote(1, 5, True).outcome.done(), "its vote is taken back"
