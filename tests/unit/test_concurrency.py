"""Python's own threads and queues, and threads that do what a finalizer has found."""

from __future__ import annotations

import signal
import threading
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


class Owner:
    """What is dropped."""


@pytest.fixture
def end_of_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What the end of the process does with the objects of the test."""
    monkeypatch.setattr(concurrency, "_ends", {})
    monkeypatch.setattr(concurrency, "_exit_deadline", concurrency.exit_deadline())
    return concurrency._close_all


def test_the_end_of_the_process_closes_members_before_the_clients_that_they_need(
    end_of_process: Callable[[], None],
) -> None:
    """A lease that was granted anew is newer than its member."""
    owners, closed = [Owner() for _ in range(4)], list[object]()
    concurrency.when_forgotten(owners[0], closed.append, "client", last=True)
    concurrency.when_forgotten(owners[1], closed.append, "old member")
    concurrency.when_forgotten(owners[2], closed.append, "member")
    concurrency.when_forgotten(owners[3], closed.append, "lease", last=True)
    end_of_process()
    assert closed == ["member", "old member", "lease", "client"]


def test_the_end_of_the_process_waits_for_what_a_thread_is_closing(end_of_process: Callable[[], None]) -> None:
    begun, go_on, closed = threading.Event(), threading.Event(), list[object]()

    def close() -> None:
        begun.set()
        go_on.wait(DEADLINE)
        closed.append("dropped")

    client, owner = Owner(), Owner()
    concurrency.when_forgotten(client, lambda: closed.append("client"), last=True)
    concurrency.when_forgotten(owner, close)
    del owner
    assert begun.wait(DEADLINE)
    helper = threading.Timer(0.1, go_on.set)
    helper.start()
    end_of_process()
    assert closed == ["dropped", "client"]
    helper.join(DEADLINE)
