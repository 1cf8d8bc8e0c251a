"""Which members of a quorum are lost to the others."""

from __future__ import annotations

from math import inf

import pytest

from ftcoord.coordination.observer import Loss, Losses

TIMEOUT = 5.0


@pytest.fixture
def losses() -> Losses:
    return Losses({"1": "a", "2": "b", "3": "c"}, TIMEOUT)


def test_nobody_is_gone_that_is_there_and_strangers_do_not_count(losses: Losses) -> None:
    assert losses.gone({"1", "2", "3", "4"}) == []
    assert losses.due == inf


def test_the_dead_are_lost_at_once_and_once(losses: Losses) -> None:
    assert losses.gone({"1", "3"}) == ["2"]
    assert losses.note("2", "killed", 10.0) == Loss("2", "b", "killed")
    assert losses.gone({"1", "3"}) == []
    assert losses.due == inf
    assert losses.judge(set(), {}, 100.0) == ([], [])


def test_who_is_gone_without_a_word_is_lost_if_it_does_not_come_back_in_time(losses: Losses) -> None:
    assert [losses.note(member, "", at) for member, at in (("1", 10.0), ("2", 11.0), ("3", 12.0))] == [None] * 3
    assert losses.gone(set()) == []
    assert losses.due == 10.0 + TIMEOUT
    assert losses.judge({"b"}, {"1": "it was killed"}, 11.0 + TIMEOUT) == ([Loss("1", "a", "it was killed")], ["b"])
    assert losses.due == 12.0 + TIMEOUT
    assert losses.judge({"b"}, {}, 12.0 + TIMEOUT) == ([Loss("3", "c", "")], [])
    assert losses.due == inf
