"""The last rank of a group asks for all, and whatever becomes of it, no rank waits in vain."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ftcoord.coordination.ranks import RankBarrier, RankRequest
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
    conclude()
    assert first.exception(0) is second.exception(0) is error


def test_an_interrupt_is_its_owners_and_the_others_are_told_to_ask_again() -> None:
    def interrupt(asks: Mapping[int, RankRequest], last: RankRequest) -> QuorumRecord:
        raise KeyboardInterrupt

    barrier = RankBarrier(2, interrupt)
    first, _ = barrier.join(ask(0))
    _, conclude = barrier.join(ask(1))
    assert conclude is not None
    with pytest.raises(KeyboardInterrupt):
        conclude()
    with pytest.raises(RuntimeError, match="ask again"):
        first.result(0)
