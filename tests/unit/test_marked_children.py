"""The mark of the processes that end with this one, where one process has several handlers."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from helpers import in_fork

from ftcoord.primitives.orphans import MARK, ProcessId
from ftcoord.primitives.sentinel import Sentinel
from ftcoord.primitives.watched_process import kin_of
from ftcoord.rendezvous.orphans import MarkedChildren


class Told:
    """Stands in for the sentinel: which mark it would look for, and which workers."""

    mark = ""
    workers: Sequence[ProcessId] = ()

    def end_orphans(self, mark: str, workers: Sequence[ProcessId] = ()) -> None:
        self.mark, self.workers = mark, workers


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
    assert sentinel.mark == ""


@pytest.mark.parametrize("first_to_close", [0, 1])
def test_of_two_handlers_both_keep_their_mark_until_the_last_is_closed(sentinel: Told, first_to_close: int) -> None:
    both = [ending(), ending()]
    both.pop(first_to_close).close()
    assert os.environ[MARK] == both[0].mark == sentinel.mark
    both[0].close()
    assert sentinel.mark == ""


def test_a_handler_that_leaves_orphans_alone_ends_nobodys_protection(sentinel: Told) -> None:
    """`orphans=leave`. It needs the mark too, to see its workers fail."""
    ours, leaves = ending(), MarkedChildren()
    assert leaves.mark == ours.mark
    leaves.close()
    assert os.environ[MARK] == ours.mark == sentinel.mark
    leaves = MarkedChildren()
    ours.close()
    assert sentinel.mark == ""
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
    assert sentinel.mark == ""
    monkeypatch.delenv(MARK)


def test_workers_are_named_to_the_sentinel_until_their_handler_is_closed(sentinel: Told) -> None:
    """Those of one round in place of those of the last one; who is gone is left out."""
    first, second = ending(), ending()
    mine, parent = os.getpid(), os.getppid()
    first.note_workers([mine])
    second.note_workers([parent])
    assert [worker.pid for worker in sentinel.workers] == [mine, parent]
    assert all(worker.born == born_of(worker.pid) for worker in sentinel.workers)
    first.note_workers([parent, gone()])
    assert [worker.pid for worker in sentinel.workers] == [parent, parent]
    second.close()
    assert [worker.pid for worker in sentinel.workers] == [parent]
    first.close()
    assert not sentinel.workers


def test_workers_that_are_to_be_left_alone_are_not_named(sentinel: Told) -> None:
    leaves = MarkedChildren()
    leaves.note_workers([os.getpid()])
    assert not sentinel.workers
    leaves.close()


def test_children_that_are_forked_are_named_and_not_those_that_were_there_before(sentinel: Told) -> None:
    """They cannot show the mark. A program that was started without it is no worker either."""
    with forked():
        children = ending()
        with forked() as since, subprocess.Popen(["sleep", "600"], env={}) as program:
            children.note_workers([])
            assert [worker.pid for worker in sentinel.workers] == [since]
            program.kill()
        children.note_workers([])
        assert not sentinel.workers
        children.close()


@contextmanager
def forked() -> Iterator[int]:
    """The number of a child that waits, and is no other program."""
    pid = os.fork()
    if not pid:
        signal.pause()
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def born_of(pid: int) -> int:
    kin = kin_of(pid)
    assert kin is not None
    return kin.born


def gone() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        return process.pid
