"""The scheduler: one thread at a time, virtual time, and mistakes of threads that are found and named."""

from __future__ import annotations

import random
from collections.abc import Callable

from virtual.scheduler import Scheduler, Stuck

from ftcoord import concurrency

SEEDS = range(50)


def outcomes(main: Callable[[], object]) -> set[object]:
    """What `main` returns, under every seed."""
    return {Scheduler(seed).run(main) for seed in SEEDS}


def start(*targets: Callable[[], object]) -> list[concurrency.Thread]:
    threads = [concurrency.thread(target, f"thread {number}") for number, target in enumerate(targets)]
    for thread in threads:
        thread.start()
    return threads


def join(threads: list[concurrency.Thread]) -> None:
    for thread in threads:
        thread.join()


def test_the_seed_decides_and_the_same_one_decides_alike() -> None:
    def main() -> tuple[int, ...]:
        order: list[int] = []
        lock = concurrency.lock("test")

        def work(number: int) -> None:
            for _ in range(3):
                with lock:
                    order.append(number)

        join(start(*(lambda number=number: work(number) for number in range(3))))
        return (*order, random.randrange(1000))

    assert len(outcomes(main)) > 20
    for seed in SEEDS:
        assert Scheduler(seed).run(main) == Scheduler(seed).run(main)


def test_what_a_lock_does_not_guard_is_lost_by_some_seeds() -> None:
    def count(guarded: bool) -> int:
        lock, event, total = concurrency.lock("test"), concurrency.event(), [0]

        def add() -> None:
            if guarded:
                lock.acquire()
            before = total[0]
            event.wait(0)
            total[0] = before + 1
            if guarded:
                lock.release()

        join(start(add, add))
        return total[0]

    assert outcomes(lambda: count(True)) == {2}
    assert outcomes(lambda: count(False)) == {1, 2}


def test_a_deadlock_names_who_waits_for_which_lock() -> None:
    def main() -> None:
        first, second = concurrency.lock("Bank.first"), concurrency.lock("Bank.second")

        def take(one: concurrency.Lock, other: concurrency.Lock) -> None:
            with one, other:
                pass

        join(start(lambda: take(first, second), lambda: take(second, first)))

    said = []
    for seed in SEEDS:
        try:
            Scheduler(seed).run(main)
        except Stuck as error:
            said.append(str(error))
    assert said
    assert len(said) < len(SEEDS)
    for text in said:
        assert "deadlock" in text
        assert "thread 0 of main waits for lock Bank.second, which thread 1 of main holds" in text
        assert "thread 1 of main waits for lock Bank.first, which thread 0 of main holds" in text
        assert "main of main waits for the end of thread" in text
        assert "test_scheduler.py" in text
        assert "in take" in text
