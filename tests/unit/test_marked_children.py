"""The mark of the processes that end with this one, where one process has several handlers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from helpers import in_fork

from ftcoord.primitives.orphans import MARK, MarkedChildren


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(MARK, raising=False)
    yield
    assert MARK not in os.environ


def test_one_handler() -> None:
    children = MarkedChildren()
    assert os.environ[MARK] == children.mark
    children.close()
    children.close()


@pytest.mark.parametrize("first_to_close", [0, 1])
def test_of_two_handlers_both_keep_their_mark_until_the_last_is_closed(first_to_close: int) -> None:
    both = [MarkedChildren(), MarkedChildren()]
    both.pop(first_to_close).close()
    assert os.environ[MARK] == both[0].mark
    both[0].close()


def test_a_forked_child_has_a_mark_of_its_own_and_then_its_parents_again() -> None:
    ours = MarkedChildren()

    def handler_in_child() -> tuple[bool, bool, bool]:
        ours.close()
        kept = os.environ[MARK] == ours.mark
        theirs = MarkedChildren()
        own = os.environ[MARK] == theirs.mark != ours.mark
        theirs.close()
        return kept, own, os.environ[MARK] == ours.mark

    assert in_fork(handler_in_child) == "(True, True, True)"
    ours.close()


def test_what_a_worker_of_an_agent_starts_ends_with_that_agent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker had a handler of its own for a while."""
    monkeypatch.setenv(MARK, "of the agent")
    MarkedChildren().close()
    assert os.environ[MARK] == "of the agent"
    monkeypatch.delenv(MARK)
