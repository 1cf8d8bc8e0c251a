"""The scheduler: one thread at a time, virtual time, and mistakes of threads that are found and named."""

from __future__ import annotations

import gc
import random
import sys
import time
import weakref
from collections.abc import Callable

import pytest
from helpers import in_fork
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


def test_time_passes_only_where_somebody_waits() -> None:
    world = Scheduler(1)

    def main() -> tuple[float, float]:
        before, wall = concurrency.now(), concurrency.wall()
        concurrency.event().wait(1000.0)
        world.sleep(1000.0)
        return concurrency.now() - before, concurrency.wall() - wall

    began = time.monotonic()
    passed, wall = world.run(main)
    assert 2000 <= passed < 2000.1
    assert passed == pytest.approx(wall)
    assert time.monotonic() - began < 60, "it waited indeed"


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


def test_what_never_ends_is_stopped_though_it_catches_everything() -> None:
    def busy() -> None:
        lock = concurrency.lock("test")
        while True:
            try:
                with lock:
                    pass
            except Exception:  # must not catch what ends the run
                raise SystemExit from None

    with pytest.raises(Stuck, match="not done after 1001 steps"):
        Scheduler(1, steps=1000).run(busy)
    with pytest.raises(Stuck, match=r"not done after 100000\.000 virtual seconds"):
        Scheduler(1).run(lambda: concurrency.event().wait(100_000))
    with pytest.raises(Stuck, match="deadlock"):
        Scheduler(1).run(wait_for_nothing)


def wait_for_nothing() -> None:
    concurrency.event().wait()


def test_a_thread_that_fails_fails_the_run_with_its_traceback() -> None:
    def fail() -> None:
        raise ZeroDivisionError("of the test")

    def main() -> None:
        start(fail)
        concurrency.event().wait()

    for seed in SEEDS:
        with pytest.raises(ZeroDivisionError, match="of the test") as caught:
            Scheduler(seed).run(main)
        assert caught.traceback[-1].name == "fail"


def test_a_run_returns_or_raises_as_its_main_does() -> None:
    assert Scheduler().run(lambda: 42) == 42
    with pytest.raises(KeyError):
        Scheduler().run(lambda: {}["missing"])


def test_threads_that_are_left_are_ended() -> None:
    ended: list[str] = []

    def forever(name: str) -> None:
        try:
            concurrency.event().wait()
        finally:
            ended.append(name)

    def main() -> None:
        start(lambda: forever("a"), lambda: forever("b"))
        concurrency.event().wait(1.0)

    Scheduler(3).run(main)
    assert sorted(ended) == ["a", "b"]


def test_a_condition_wakes_who_waits_and_times_out_else() -> None:
    def main() -> tuple[bool, bool, list[int]]:
        changed, items, got = concurrency.condition("test"), list[int](), list[int]()

        def take() -> None:
            with changed, changed:  # reentrant, and let go of as a whole
                changed.wait_for(lambda: items)
                got.append(items.pop())

        threads = start(take, take)
        for number in range(2):
            with changed:
                items.append(number)
                changed.notify()
        join(threads)
        with changed:
            before = concurrency.now()
            late = changed.wait(0.5)
            waited = concurrency.now() - before >= 0.5
        return late, waited, sorted(got)

    assert {repr(Scheduler(seed).run(main)) for seed in SEEDS} == {"(False, True, [0, 1])"}


def test_a_queue_loses_nothing_and_wakes_one_for_each() -> None:
    def main() -> tuple[int, ...]:
        queue, got = concurrency.inbox(), list[int]()

        def take() -> None:
            for _ in range(2):
                while True:
                    try:
                        got.append(queue.get(timeout=0.00005))
                        break
                    except concurrency.Empty:
                        continue

        threads = start(take, take)
        for number in range(4):
            queue.put(number)
        join(threads)
        assert queue.empty()
        with pytest.raises(concurrency.Empty):
            queue.get(block=False)
        return tuple(sorted(got))

    assert outcomes(main) == {(0, 1, 2, 3)}


def test_a_lock_that_is_waited_for_in_vain() -> None:
    def main() -> tuple[bool, bool, bool]:
        lock, held, done = concurrency.lock("test"), concurrency.event(), concurrency.event()

        def hold() -> None:
            with lock:
                held.set()
                done.wait()

        threads = start(hold)
        held.wait()
        at_once, soon = lock.acquire(blocking=False), lock.acquire(timeout=0.5)
        done.set()
        later = lock.acquire(timeout=5)
        lock.release()
        join(threads)
        return at_once, soon, later

    assert outcomes(main) == {(False, False, True)}


def test_a_lock_may_be_released_by_another_thread_and_a_reentrant_one_may_not() -> None:
    def main() -> None:
        lock, mine = concurrency.lock("test"), concurrency.rlock("test")
        lock.acquire()
        mine.acquire()
        join(start(lock.release))
        assert lock.acquire(blocking=False)
        with pytest.raises(RuntimeError):
            mine.release(), mine.release()

    outcomes(main)


def test_a_process_that_is_paused_stands_still_while_time_passes() -> None:
    def main() -> tuple[int, int, bool]:
        beats: list[float] = []
        stop = concurrency.event()

        def beat() -> None:
            while not stop.wait(1.0):
                beats.append(concurrency.now())

        with world.process("other"):
            threads = start(beat)
        world.sleep(5.5)
        world.pause("other")
        before = len(beats)
        world.sleep(100)
        during = len(beats) - before
        world.resume("other")
        world.sleep(0.5)
        stop.set()
        join(threads)
        return before, during, len(beats) > before

    for seed in SEEDS:
        world = Scheduler(seed)
        assert world.run(main) == (5, 0, True)


def test_outside_of_a_run_there_is_no_thread() -> None:
    with pytest.raises(RuntimeError, match="within Scheduler"):
        Scheduler().sleep(1)
    assert concurrency.current_thread().ident is not None


def test_each_process_has_one_of_its_own() -> None:
    class Kept:
        pass

    def main() -> None:
        mine = concurrency.of_process(Kept)
        assert concurrency.of_process(Kept) is mine
        assert concurrency.of_process(list) == []
        with world.process("other"):
            theirs = concurrency.of_process(Kept)
            assert theirs is concurrency.of_process(Kept)
        assert theirs is not mine
        found: list[Kept] = []
        with world.process("other"):
            threads = [concurrency.thread(lambda: found.append(concurrency.of_process(Kept)), "thread")]
        threads[0].start()
        join(threads)
        assert found == [theirs]

    world = Scheduler()
    world.run(main)
    outside = concurrency.of_process(Kept)
    assert concurrency.of_process(Kept) is outside
    assert in_fork(lambda: concurrency.of_process(Kept) is not outside) == "True"


def test_a_thread_may_end_itself_and_main_may_not() -> None:
    def main() -> str:
        join(start(sys.exit))
        return "goes on"

    assert Scheduler().run(main) == "goes on"
    with pytest.raises(SystemExit):
        Scheduler().run(sys.exit)


def test_what_outlives_its_world_waits_for_nothing() -> None:
    """As finalizers do, which run on a thread of their own whenever Python collects garbage: that thread ends."""

    def main() -> concurrency.Condition:
        return concurrency.condition("test")

    changed = Scheduler().run(main)
    with changed:
        changed.notify_all()
        with pytest.raises(SystemExit):
            changed.wait(1)
    assert gc.isenabled()


def test_nothing_is_kept_of_a_world_that_has_ended() -> None:
    """Though nobody closed what was made there, and what would have been closed refers to who would have closed it."""
    left: list[weakref.ref[object]] = []

    def main() -> None:
        owner, held = Owner(), Owner()
        held.owner = owner
        left.append(weakref.ref(owner))
        concurrency.when_forgotten(owner, print, held)

    Scheduler().run(main)
    gc.collect()
    assert left[0]() is None


class Owner:
    owner: object = None
