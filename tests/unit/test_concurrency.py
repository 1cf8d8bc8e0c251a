"""Threads that do what a finalizer has found."""

from __future__ import annotations

import threading
from collections import deque

import pytest

from ftcoord import concurrency


def test_threads_that_are_about_to_start_can_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the process waits on the main thread while another one starts them."""
    waiting, done = deque([1, 2]), []
    threads = concurrency.DetachedThreads(lambda: done.append(waiting.popleft()), waiting, 1)
    start = threading.Thread.start

    def join_first(thread: threading.Thread) -> None:
        threads.join(concurrency.now())
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", join_first)
    threads.start()
    while waiting:
        threads.join(concurrency.now() + 60)
    threads.join(concurrency.now() + 60)
    assert done == [1, 2]


def test_a_thread_that_cannot_start_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, done = deque([1]), []
    threads = concurrency.DetachedThreads(lambda: done.append(waiting.popleft()), waiting, 1)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        threads.start()
    began = concurrency.now()
    threads.join(began + 60)
    assert concurrency.now() < began + 30
    threads.start()  # its permit came back
    while waiting:
        threads.join(concurrency.now() + 60)
    assert done == [1]


def test_what_there_is_no_time_to_close_at_the_end_says_so_without_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the sentinel would renew its lease for as long as the process takes to end."""
    monkeypatch.setattr(concurrency, "_exit_deadline", concurrency.now() - 1)
    told: list[str] = []
    ending = concurrency.Ending(lambda: told.append("closed"), concurrency.Stage.LEASES, lambda: told.append("rests"))
    ending.close_at_exit()
    ending.close_at_exit()
    assert told == ["rests"]
