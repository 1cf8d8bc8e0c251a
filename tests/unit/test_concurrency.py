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
