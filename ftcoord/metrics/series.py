"""Counters, gauges and histograms as plain numbers. They do not depend on Prometheus, and are read when it scrapes.

Counting takes a lock that is never held for longer than an addition, so it may be on the path of a step.
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
"""Label values that a series keeps apart. Beyond that the oldest one is dropped: a process that takes part in run after
run must not fill its memory, nor Prometheus'."""
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""The upper bounds of the buckets for times: from one request to a round that waits for its last node."""


class Series(abc.ABC, Generic[V]):
    """Values by the values of their labels. Thread-safe; a forked child starts with none.

    Args:
        name: its name in Prometheus, with its unit and without `_total`.
        about: what it counts, in one line.
        labels: the names of its labels. Their values must not grow without bound, as ids of members do.
    """

    kind: str
    """Its type in Prometheus."""

    def __init__(self, name: str, about: str, labels: Labels = ()) -> None:
        self.name, self.about, self.labels = name, about, labels  # never change
        self.forget()
        _all.append(self)

    def read(self) -> Mapping[Labels, V]:
        """The values until now."""
        with self._lock:
            return {labels: self._copy(value) for labels, value in self._values.items()}

    def forget(self) -> None:
        """Start again, with a new lock: in a forked child the old one may be held forever by a thread of the parent."""
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
        """Count once."""
        with self._lock:
            self._put(labels, self._values.get(labels, 0.0) + 1)

    def begin(self, *labels: str) -> None:
        """Start at 0. Prometheus sees no increase in a first value that is not 0."""
        with self._lock:
            self._put(labels, self._values.get(labels, 0.0))

    def read(self) -> Mapping[Labels, float]:
        return super().read() or ({} if self.labels else {(): 0.0})


class Gauge(Series[float]):
    """A present value."""

    kind = "gauge"

    def __init__(self, name: str, about: str, labels: Labels = ()) -> None:
        super().__init__(name, about, labels)
        self._look: Callable[[], Mapping[Labels, float]] | None = None  # set once, when its module is loaded

    def set(self, value: float, *labels: str) -> None:
        """Set the value."""
        with self._lock:
            self._put(labels, value)

    def drop(self, *labels: str) -> None:
        """Remove the value."""
        with self._lock:
            self._values.pop(labels, None)

    def look_with(self, look: Callable[[], Mapping[Labels, float]]) -> None:
        """Compute the values whenever they are read, for values that change on their own, such as a time that is
        left."""
        self._look = look

    def read(self) -> Mapping[Labels, float]:
        return super().read() if self._look is None else self._look()


@dataclass(slots=True)
class Distribution:
    """How many values are in each bucket of `SECONDS`, without those of lower buckets; the last one is for all larger
    values."""

    counts: list[int]
    total: float

    def cumulative(self) -> Sequence[int]:
        """As Prometheus expects them: each bucket includes the lower ones."""
        return tuple(accumulate(self.counts))


class Histogram(Series[Distribution]):
    """How long something took, in seconds."""

    kind = "histogram"

    def observe(self, seconds: float, *labels: str) -> None:
        """Add one duration."""
        with self._lock:
            if (found := self._values.get(labels)) is None:
                found = Distribution([0] * (len(SECONDS) + 1), 0.0)
                self._put(labels, found)
            found.counts[bisect_left(SECONDS, seconds)] += 1
            found.total += seconds

    def _copy(self, value: Distribution) -> Distribution:
        return Distribution(value.counts.copy(), value.total)
