"""Counters, gauges and histograms as plain numbers. They know nothing of Prometheus, and are read when it asks.

Counting costs a lock that nobody holds for longer than an addition, so it may stand on the path of a step.
"""

from __future__ import annotations

import abc
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Generic, TypeVar

from ftcoord import concurrency

V = TypeVar("V")
Labels = tuple[str, ...]

MOST_LABELS: Final = 100
"""Values of its labels that a series keeps apart. Beyond that the oldest one goes: a process that takes part in run
after run must not fill its memory, nor Prometheus'."""
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""The upper bounds of the buckets for times: from one request to a round that waits for its last node."""


class Series(abc.ABC, Generic[V]):
    """Values by the values of their labels. Thread-safe; a forked child begins with none.

    Args:
        name: as Prometheus knows it, with its unit and without `_total`.
        about: what it counts, in one line.
        labels: the names of its labels. What they are set to must not grow without bound, as ids of members do.
    """

    kind: str
    """As Prometheus calls it."""

    def __init__(self, name: str, about: str, labels: Labels = ()) -> None:
        self.name, self.about, self.labels = name, about, labels  # never change
        self.forget()
        _all.append(self)

    def read(self) -> Mapping[Labels, V]:
        """What was counted until now."""
        with self._lock:
            return {labels: self._copy(value) for labels, value in self._values.items()}

    def forget(self) -> None:
        """Begin anew, with a lock of its own: in a forked child a thread of the parent's may hold the other forever."""
        # Reentrant: a user's signal handler, which may count too, runs in any line of the main thread.
        self._lock = concurrency.rlock("Series._lock")
        self._values: dict[Labels, V] = {}  # guarded by _lock

    def _put(self, labels: Labels, value: V) -> None:
        """With the lock held."""
        if labels not in self._values and len(self._values) >= MOST_LABELS:
            del self._values[next(iter(self._values))]
        self._values[labels] = value

    def _copy(self, value: V) -> V:
        return value


_all: list[Series[Any]] = []


def _forget_all() -> None:
    for series in _all:
        series.forget()


os.register_at_fork(after_in_child=_forget_all)


class Counter(Series[float]):
    """How often something has happened."""

    kind = "counter"

    def add(self, *labels: str) -> None:
        """It has happened once more."""
        with self._lock:
            self._put(labels, self._values.get(labels, 0.0) + 1)

    def begin(self, *labels: str) -> None:
        """It may happen from now on. Prometheus sees no increase in a first value that is not 0."""
        with self._lock:
            self._put(labels, self._values.get(labels, 0.0))

    def read(self) -> Mapping[Labels, float]:
        return super().read() or ({} if self.labels else {(): 0.0})


class Gauge(Series[float]):
    """What is now."""

    kind = "gauge"

    def __init__(self, name: str, about: str, labels: Labels = ()) -> None:
        super().__init__(name, about, labels)
        self._look: Callable[[], Mapping[Labels, float]] | None = None  # set once, when its module is loaded

    def set(self, value: float, *labels: str) -> None:
        """It is this from now on."""
        with self._lock:
            self._put(labels, value)

    def drop(self, *labels: str) -> None:
        """There is no such thing any longer."""
        with self._lock:
            self._values.pop(labels, None)

    def look_with(self, look: Callable[[], Mapping[Labels, float]]) -> None:
        """Have it looked up whenever somebody reads it: what changes by itself, such as a time that is left."""
        self._look = look

    def read(self) -> Mapping[Labels, float]:
        return super().read() if self._look is None else self._look()


@dataclass(slots=True)
class Distribution:
    """How many values were at most each of `SECONDS`, not those counted below it; the last is of all larger ones."""

    counts: list[int]
    total: float

    def cumulative(self) -> Sequence[int]:
        """As Prometheus wants them: each with those below it."""
        return tuple(accumulate(self.counts))


class Histogram(Series[Distribution]):
    """How long something took, in seconds."""

    kind = "histogram"

    def observe(self, seconds: float, *labels: str) -> None:
        """It took so long this time."""
        with self._lock:
            if (found := self._values.get(labels)) is None:
                found = Distribution([0] * (len(SECONDS) + 1), 0.0)
                self._put(labels, found)
            found.counts[bisect_left(SECONDS, seconds)] += 1
            found.total += seconds

    def _copy(self, value: Distribution) -> Distribution:
        return Distribution(value.counts.copy(), value.total)
