"""The pool of daemon threads that run calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest
from helpers import DEADLINE

from ftcoord import pool as pool_module
from ftcoord.pool import DaemonPool


@pytest.fixture
def pool() -> Iterator[DaemonPool]:
    pool = DaemonPool(2, "ftcoord-test")
    yield pool
    pool.close()


class Gate:
    """Calls that wait until it is opened."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self._begun = threading.Semaphore(0)

    def pass_through(self, name: str) -> tuple[str, bool]:
        self._begun.release()
        assert self._opened.wait(DEADLINE)
        return name, threading.current_thread().daemon

    def began(self) -> bool:
        return self._begun.acquire(timeout=DEADLINE)

    def open(self) -> None:
        self._opened.set()


def test_calls_run_at_once_up_to_the_limit_and_queue_beyond(pool: DaemonPool) -> None:
    gate = Gate()
    calls = [pool.submit(gate.pass_through, name) for name in ("first", "second", "third")]
    assert gate.began()
    assert gate.began()
    assert not calls[2].running()
    gate.open()
    assert [call.result(DEADLINE) for call in calls] == [("first", True), ("second", True), ("third", True)]


def test_a_call_that_comes_as_its_thread_ends_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "IDLE_THREAD_TIMEOUT", 0.0)
    pool = DaemonPool(1, "ftcoord-idle")
    assert [pool.submit(int, "7").result(DEADLINE) for _ in range(2000)] == [7] * 2000
    pool.close()


def test_what_a_call_raises_is_for_whoever_holds_the_future(pool: DaemonPool) -> None:
    def fail() -> None:
        raise SystemExit(3)

    assert isinstance(pool.submit(fail).exception(DEADLINE), SystemExit)
    assert pool.submit(int, "7").result(DEADLINE) == 7


def test_a_call_that_was_cancelled_while_it_queued_is_not_run(pool: DaemonPool) -> None:
    gate, ran = Gate(), threading.Event()
    calls = [pool.submit(gate.pass_through, name) for name in ("first", "second")]
    assert gate.began()
    assert gate.began()
    third = pool.submit(ran.set)
    assert third.cancel()
    gate.open()
    for call in calls:
        call.result(DEADLINE)
    pool.close()
    with pytest.raises(CancelledError):
        third.result(DEADLINE)
    assert not ran.is_set()


def test_closing_runs_what_was_taken_and_takes_no_more(pool: DaemonPool) -> None:
    calls = [pool.submit(str, number) for number in range(10)]
    pool.close()
    assert [call.result(0) for call in calls] == [str(number) for number in range(10)]
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(str)
    pool.close()
