"""Python's own threads and queues, and threads that do what a finalizer has found."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from ftcoord import concurrency

DEADLINE = 60.0


@pytest.fixture
def interrupted() -> Iterator[list[Callable[[], object]]]:
    """SIGALRM runs what the test appends, on the main thread."""
    handlers: list[Callable[[], object]] = []
    before = signal.signal(signal.SIGALRM, lambda *_: [run() for run in handlers])
    yield handlers
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_get_ends_in_time_though_a_signal_handler_took_all_of_it(interrupted: list[Callable[[], object]]) -> None:
    """Python 3.11's own queue waits for the next item then."""
    items: concurrency.Queue[str] = concurrency.inbox()
    interrupted.append(lambda: threading.Event().wait(0.4))
    rescue = threading.Timer(DEADLINE, items.put, ["too late"])
    rescue.start()
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(concurrency.Empty):
            items.get(timeout=0.2)
    finally:
        rescue.cancel()


def test_a_signal_handler_may_put_what_its_thread_waits_for(interrupted: list[Callable[[], object]]) -> None:
    items: concurrency.Queue[str] = concurrency.inbox()
    interrupted.append(lambda: items.put("put"))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    assert items.get(timeout=DEADLINE) == "put"


def test_an_empty_queue_says_so_at_once() -> None:
    items: concurrency.Queue[int] = concurrency.inbox()
    items.put(1)
    assert not items.empty()
    assert items.get(block=False) == 1
    assert items.empty()
    for wait in ({"block": False}, {"timeout": 0}):
        with pytest.raises(concurrency.Empty):
            items.get(**wait)


def test_each_item_is_got_once_whoever_waits() -> None:
    """No consumer sleeps while there is an item, though several were put at once."""
    items: concurrency.Queue[int] = concurrency.inbox()
    got: list[list[int]] = [[] for _ in range(4)]

    def consume(mine: list[int]) -> None:
        while (item := items.get()) >= 0:
            mine.append(item)

    def produce(first: int) -> None:
        for item in range(first, 4000, 2):
            items.put(item)

    consumers = [threading.Thread(target=consume, args=(mine,), daemon=True) for mine in got]
    producers = [threading.Thread(target=produce, args=(first,), daemon=True) for first in (0, 1)]
    for thread in (*consumers, *producers):
        thread.start()
    for thread in producers:
        thread.join(DEADLINE)
    for _ in consumers:
        items.put(-1)
    for thread in consumers:
        thread.join(DEADLINE)
    assert not any(thread.is_alive() for thread in (*producers, *consumers))
    assert sorted(item for mine in got for item in mine) == list(range(4000))
    assert all(
        [item for item in mine if item % 2 == odd] == sorted(item for item in mine if item % 2 == odd)
        for mine in got
        for odd in (0, 1)
    ), "in the order in which they were put"


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
