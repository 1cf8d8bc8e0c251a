"""The time of a `Scheduler`'s world: it passes by steps, and jumps to the next time-out when nobody can go on."""

from __future__ import annotations

import heapq
import itertools
from typing import Final

from virtual.tasks import Task

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
