"""A scheduler for tests: threads that run one at a time, in an order that a seed decides, while time is virtual.

Each thread of ftcoord's is a greenlet here. Wherever it takes a lock, waits, wakes somebody or starts a thread, another
one may go on instead. When nobody can go on, time jumps to the next time-out. So a history of minutes takes
milliseconds, and the same seed brings the same one.

Only what comes from `ftcoord.concurrency` is scheduled: code that blocks on a lock of `threading` blocks everything.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import logging
import random
import traceback
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn, TypeVar

from greenlet import GreenletExit, getcurrent, greenlet

from ftcoord import concurrency
from virtual.processes import Clock, Processes
from virtual.tasks import Task, TaskCondition, TaskEvent, TaskLock, TaskQueue

STEP: Final = 20e-6
"""Virtual seconds that a step between two points of preemption takes: so a loop without a wait cannot stop time."""


class VirtualTime:
    """The time, in virtual seconds, and the time-outs of those that wait.

    The scheduler takes the steps itself: a call for each would cost as much as all the rest of a step.

    Args:
        horizon: virtual seconds after which the run is over.
        most_steps: steps after which it is.
    """

    def __init__(self, horizon: float, most_steps: int) -> None:
        self.now = 0.0
        self.steps = 0
        """Those that were taken."""
        self.due = horizon
        """When the first of the time-outs is over, or the run: until then no step looks at either."""
        self.most_steps = most_steps
        self._horizon = horizon
        self._timers: list[tuple[float, int, Task, int]] = []  # a heap; the wait a timer is for, by Task.parked
        self._order = itertools.count()  # makes timers comparable: tasks are not

    @property
    def is_over(self) -> bool:
        """Whether the run has reached one of its limits."""
        return self.steps > self.most_steps or self.now > self._horizon

    def set_timer(self, task: Task, timeout: float) -> None:
        """This task waits from now on, for as many seconds at most."""
        end = self.now + max(timeout, 0)
        heapq.heappush(self._timers, (end, next(self._order), task, task.parked))
        if end < self.due:
            self.due = end

    def take_due(self) -> list[Task]:
        """Those whose time-outs are over, in that order, and that wait still."""
        timers, found = self._timers, []
        while timers and timers[0][0] <= self.now:
            _, _, task, parked = heapq.heappop(timers)
            if task.parked == parked:
                found.append(task)
        self.due = min(self._horizon, timers[0][0]) if timers else self._horizon
        return found

    def jump(self) -> bool:
        """Have time pass until the next time-out is over; False if there is none."""
        timers = self._timers
        while timers and timers[0][3] != timers[0][2].parked:
            heapq.heappop(timers)
        if timers:
            self.now = max(self.now, timers[0][0])
        return bool(timers)


T = TypeVar("T")


class Stuck(AssertionError):
    """Nobody can go on, or not within the limits. The message says who waits for what, and where."""


_LAST_STEPS: Final = 1000
"""Locks that a task may take when it is ended."""


class Scheduler:
    """A world of `concurrency` for one run.

    Args:
        seed: decides who goes on at each point of preemption.
        horizon: virtual seconds after which the run counts as stuck.
        steps: points of preemption after which the run counts as stuck.

    Not thread-safe: the whole world is one thread of Python's.
    """

    def __init__(self, seed: int = 0, *, horizon: float = 3600.0, steps: int = 2_000_000) -> None:
        self.seed = seed
        self.running: Task | None = None
        """The task that runs now, for locks and queues: `current` where there must be one."""
        self._time = VirtualTime(horizon, steps)
        draw = random.Random(seed)
        # Some runs change over all the time, others let a thread go on for a while: each finds other mistakes.
        self._stay = draw.choice((0.0, 0.5, 0.9))
        self._draw = draw.random
        self._ready: list[Task] = []
        self._numbers = itertools.count(1)
        self._tasks: dict[Task, None] = {}
        self._processes = Processes()
        self._main: Task | None = None
        self._hub: Any = None
        self._failure: BaseException | None = None
        self.ending = False
        self._taken_at_the_end = 0

    # -- for tests ----------------------------------------------------------------------------------------------------

    @property
    def time(self) -> float:
        """The world's, in virtual seconds since the run began."""
        return self._time.now

    @property
    def taken(self) -> int:
        """Steps that were taken, each between two points of preemption."""
        return self._time.steps

    def run(self, main: Callable[[], T]) -> T:
        """Call `main` in this world and return what it returns. All that it makes meanwhile belongs to this world.

        Raises what `main` raises, what any other thread raised, and Stuck. Threads that are left in the end are ended
        where they are.
        """
        outcome: list[T] = []
        state, collects = random.getstate(), gc.isenabled()
        random.seed(self.seed)
        gc.disable()  # finalizers start threads, and nobody knows when
        self._hub = getcurrent()
        try:
            with concurrency.use(self):
                self._main = task = self._task(lambda: outcome.append(main()), "main", "main")
                self._begin(task)
                try:
                    while not task.done and self._failure is None:
                        self._go_on(None)
                finally:
                    self._end()
        finally:
            random.setstate(state)
            if collects:
                gc.enable()
        if self._failure is not None:
            raise self._failure
        return outcome[0]

    def sleep(self, seconds: float) -> None:
        """Let time pass, in virtual seconds."""
        self.park("a sleep", seconds)

    @contextmanager
    def process(self, name: str) -> Iterator[None]:
        """What is made meanwhile belongs to another process: it has keepers of its own, and can be paused."""
        task = self.current
        before, task.process = task.process, name
        try:
            yield
        finally:
            task.process = before

    def pause(self, process: str) -> None:
        """Stop all threads of a process where they are, as SIGSTOP does, or C code that holds the interpreter."""
        self._processes.paused.setdefault(process, [])

    def resume(self, process: str) -> None:
        """End of `pause()`."""
        self._ready.extend(self._processes.paused.pop(process, ()))

    def set_clock(self, process: str, clock: Clock) -> None:
        """Give a process clocks of its own. Its wall clock may be set at any time; the rate only before it begins, or
        its monotonic clock would jump."""
        self._processes.set_clock(process, clock)

    def fail(self, error: BaseException) -> NoReturn:
        """End the run: it raises this error. May be called wherever a task runs, also below code that catches errors;
        nothing of that code is run any more but what ends it."""
        if self.ending:
            raise GreenletExit
        self._failure = self._failure or error
        if getcurrent() is self._hub:
            raise self._failure
        self._hub.switch()  # for good: raised here, somebody might catch it
        raise AssertionError("a task that has failed the run goes on")

    def alive(self, but: Container[str] = ()) -> list[str]:
        """The threads that have not ended, without those of some processes: of each a line that says what it waits
        for."""
        return [self._describe(task) for task in self._tasks if task.process not in but]

    # -- for `ftcoord.concurrency` -------------------------------------------------------------------------------------

    def now(self) -> float:
        rates = self._processes.rates
        if not rates:
            return self._time.now
        task = self.running
        if task is None or task.abroad:  # in a server, whose clock is the world's
            return self._time.now
        return self._time.now * rates.get(task.process, 1.0)

    def wall(self) -> float:
        return self._processes.wall(self.process_now, self._time.now)

    def lock(self, name: str) -> TaskLock:
        return TaskLock(self, name)

    def rlock(self, name: str) -> TaskLock:
        return TaskLock(self, name, reentrant=True)

    def condition(self, name: str) -> TaskCondition:
        return TaskCondition(self, name)

    def event(self) -> TaskEvent:
        return TaskEvent(self)

    def queue(self) -> TaskQueue:
        return TaskQueue(self)

    def thread(self, target: Callable[..., object], name: str, args: tuple[object, ...] = ()) -> Task:
        return self._task(lambda: target(*args), name, self.process_now)

    def current_thread(self) -> Task:
        return self.current

    def is_main_thread(self) -> bool:
        return self.current is self._main

    def of_process(self, make: Callable[[], T]) -> T:
        return self._processes.own(self.process_now, make)

    # -- for locks, queues and threads --------------------------------------------------------------------------------

    @property
    def current(self) -> Task:
        """The task that runs this. Raises RuntimeError outside of `run()`."""
        if self.running is not None:
            return self.running
        if self.ending:
            raise SystemExit  # a finalizer of something that outlived its world: its thread ends without a word
        raise RuntimeError("no task of the scheduler runs here: call it from within Scheduler.run()")

    @property
    def process_now(self) -> str:
        """The process to which belongs what is made now."""
        return self.running.process if self.running is not None else "main"

    def start(self, task: Task) -> None:
        """Let a task begin."""
        self._begin(task)
        self.preempt()

    def preempt(self) -> None:
        """A point at which somebody else may go on."""
        if self.ending:
            return
        task, time = self.running or self.current, self._time
        time.now += STEP  # as in `_tick`: nearly all steps are taken here, and a call costs as much as the rest
        time.steps += 1
        if time.now >= time.due or time.steps > time.most_steps:
            self._look_at_clock()
        stands_still = task.process in self._processes.paused and not task.abroad
        if not stands_still and (not self._ready or self._draw() < self._stay):
            return
        self._ready.append(task)
        self._go_on(task)

    def park(self, what: object, timeout: float | None) -> bool:
        """Wait for `wake()`; False when `timeout` seconds were over before. `what` is for whoever asks why."""
        if self.ending:
            raise GreenletExit
        task = self.running or self.current
        task.waits_for, task.woken = what, False
        task.parked += 1
        if timeout is not None:
            rates = self._processes.rates
            if rates and not task.abroad:
                timeout /= rates.get(task.process, 1.0)
            self._time.set_timer(task, timeout)
        self._tick()
        self._go_on(task)
        return task.woken

    def wake(self, task: Task) -> bool:
        """Let a parked task go on; whether it was parked still, and not just about to go on anyway."""
        if task.waits_for is None:
            return False
        task.woken = True
        self._make_ready(task)
        return True

    # -- who is next --------------------------------------------------------------------------------------------------

    def _task(self, target: Callable[[], object], name: str, process: str) -> Task:
        return Task(self, target, name, process, next(self._numbers))

    def _begin(self, task: Task) -> None:
        task.greenlet = greenlet(lambda: self._live(task), parent=self._hub)
        self._tasks[task] = None
        self._ready.append(task)

    def _live(self, task: Task) -> None:
        try:
            task.target()
        except BaseException as error:  # whatever it is: the run ends with it
            ends_alone = isinstance(error, SystemExit) and task is not self._main  # as with Python's threads
            if not self.ending and not ends_alone:
                self._failure = self._failure or error
        finally:
            task.finish()
            self._tasks.pop(task, None)

    def _make_ready(self, task: Task) -> None:
        task.waits_for = None
        task.parked += 1  # so that its time-out finds it gone
        self._ready.append(task)

    def _tick(self) -> None:
        time = self._time
        time.now += STEP
        time.steps += 1
        if time.now >= time.due or time.steps > time.most_steps:
            self._look_at_clock()

    def _look_at_clock(self) -> None:
        self._fire()
        if self._time.is_over:
            self._fail(f"not done after {self.taken} steps and {self.time:.3f} virtual seconds")

    def _fire(self) -> None:
        """Wake whose time-out is over."""
        for task in self._time.take_due():
            self._make_ready(task)

    def _go_on(self, task: Task | None) -> None:
        """Go on with whose turn it is; returns when it is this task's again, or, for the hub, when one has ended."""
        ready, paused = self._ready, self._processes.paused
        while True:
            while not ready:
                self._jump()
            chosen = int(self._draw() * len(ready))
            following, last = ready[chosen], ready.pop()
            if last is not following:
                ready[chosen] = last
            if following.process not in paused or following.abroad:
                break
            paused[following.process].append(following)
        self.running = following
        if following is not task:
            following.greenlet.switch()
        if self.ending:
            raise GreenletExit

    def _jump(self) -> None:
        """Nobody can go on now: time passes until somebody can."""
        if not self._time.jump():
            self._fail("deadlock: nobody can ever go on")
        if self._time.is_over:
            self._fail(f"not done after {self.time:.3f} virtual seconds")
        self._fire()

    def _fail(self, problem: str) -> None:
        lines = [f"{problem} (seed {self.seed})", *(self._describe(task) for task in self._tasks)]
        self.fail(Stuck("\n".join(lines)))

    def _describe(self, task: Task) -> str:
        state = "can go on" if task.waits_for is None else f"waits for {task.waits_for}"
        frame = task.greenlet.gr_frame if task.greenlet is not None else None
        if task is self.running:
            return f"- {task.name} of {task.process} {state}"
        places = traceback.extract_stack(frame) if frame is not None else []
        own = [place for place in places if "tests/virtual/" not in place.filename]
        where = f", at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""
        return f"- {task.name} of {task.process} {state}{where}"

    def go_on_at_the_end(self) -> None:
        """Who is being ended takes a lock. It may do so to clean up, but not for ever: time stands still by now."""
        self._taken_at_the_end += 1
        if self._taken_at_the_end > _LAST_STEPS:
            raise GreenletExit

    def _end(self) -> None:
        """End who is left, one by one: each raises GreenletExit where it waits, and waits no more."""
        self.ending = True
        disabled = logging.root.manager.disable
        logging.disable()  # or each would log that its thread failed
        for task in list(self._tasks):
            self.running, self._taken_at_the_end = task, 0
            if not task.greenlet.dead:
                task.greenlet.throw(GreenletExit)
        self.running = None
        logging.disable(disabled)
