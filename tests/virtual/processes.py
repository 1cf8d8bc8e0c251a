"""The processes of a `Scheduler`'s world: which stand still, what their clocks say, and what each has one of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from virtual.tasks import Task

T = TypeVar("T")

EPOCH: Final = 1_800_000_000.0
"""What `wall()` says at the start."""


class Clock(NamedTuple):
    """How the clocks of a process differ from the world's.

    Args:
        rate: seconds that its monotonic clock counts in one of the world's: 1.01 is one that is 1 % fast.
        wall: seconds that its wall clock is ahead.
    """

    rate: float = 1.0
    wall: float = 0.0


_TRUE: Final = Clock()


class Processes:
    """What is different from process to process, by their names."""

    def __init__(self) -> None:
        self.paused: dict[str, list[Task]] = {}
        """Of each that stands still, the tasks whose turn has come meanwhile."""
        self.rates: dict[str, float] = {}
        """Of the monotonic clocks that are not the world's."""
        self._clocks: dict[str, Clock] = {}
        self._own: dict[tuple[str, Callable[[], Any]], Any] = {}

    def set_clock(self, process: str, clock: Clock) -> None:
        """See `Scheduler.set_clock`."""
        self._clocks[process] = clock
        self.rates.pop(process, None)
        if clock.rate != 1.0:
            self.rates[process] = clock.rate

    def wall(self, process: str, time: float) -> float:
        """What a process's wall clock says at a time of the world's."""
        return EPOCH + time + self._clocks.get(process, _TRUE).wall

    def own(self, process: str, make: Callable[[], T]) -> T:
        """A process's own one, made when it is first asked for."""
        key = (process, make)
        if key not in self._own:
            self._own[key] = make()
        found: T = self._own[key]
        return found
