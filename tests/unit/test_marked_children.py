"""The mark of the processes that end with this one, where one process has several handlers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from helpers import in_fork

from ftcoord.primitives.orphans import MARK
from ftcoord.primitives.sentinel import Sentinel
from ftcoord.rendezvous.orphans import MarkedChildren


class Told:
    """Stands in for the sentinel: which mark it will look for."""

    mark = ""

    def end_orphans(self, mark: str) -> None:
        self.mark = mark


@pytest.fixture
def sentinel(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()
    monkeypatch.setattr(Sentinel, "of_process", lambda: told)
    return told


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(MARK, raising=False)
    yield
    assert MARK not in os.environ


def ending() -> MarkedChildren:
    children = MarkedChildren()
    children.end_with_this_process()
    return children


def test_one_handler(sentinel: Told) -> None:
    children = ending()
    assert os.environ[MARK] == children.mark == sentinel.mark
    children.close()
    children.close()
    assert sentinel.mark == children.mark, "a worker that was just being started may be nobody's"


@pytest.mark.parametrize("first_to_close", [0, 1])
def test_of_two_handlers_both_keep_their_mark_until_the_last_is_closed(sentinel: Told, first_to_close: int) -> None:
    both = [ending(), ending()]
    both.pop(first_to_close).close()
    assert os.environ[MARK] == both[0].mark == sentinel.mark
    both[0].close()


def test_a_handler_that_leaves_orphans_alone_ends_nobodys_protection(sentinel: Told) -> None:
    """`orphans=leave`. It needs the mark too, to see its workers fail."""
    ours, leaves = ending(), MarkedChildren()
    assert leaves.mark == ours.mark
    leaves.close()
    assert os.environ[MARK] == ours.mark == sentinel.mark
    leaves = MarkedChildren()
    ours.close()
    assert os.environ[MARK] == leaves.mark
    leaves.close()


def test_a_forked_child_ends_nothing_of_its_parents(sentinel: Told) -> None:
    ours = ending()

    def close_in_child() -> tuple[bool, bool]:
        ours.close()
        return sentinel.mark == ours.mark, os.environ[MARK] == ours.mark

    assert in_fork(close_in_child) == "(True, True)"
    ours.close()


def test_a_forked_child_has_a_mark_of_its_own_and_then_its_parents_again(sentinel: Told) -> None:
    ours = ending()

    def handler_in_child() -> tuple[bool, bool]:
        theirs = ending()
        own = os.environ[MARK] == theirs.mark != ours.mark
        theirs.close()
        return own, os.environ[MARK] == ours.mark

    assert in_fork(handler_in_child) == "(True, True)"
    assert sentinel.mark == ours.mark
    ours.close()


def test_what_a_worker_of_an_agent_starts_ends_with_that_agent_again(
    sentinel: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker had a handler of its own for a while."""
    monkeypatch.setenv(MARK, "of the agent")
    MarkedChildren().close()
    assert os.environ[MARK] == "of the agent"
    monkeypatch.delenv(MARK)


def test_what_a_user_has_put_there_meanwhile_stays(sentinel: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    children = ending()
    monkeypatch.setenv(MARK, "mine")
    children.close()
    assert os.environ[MARK] == "mine"
    monkeypatch.delenv(MARK)
