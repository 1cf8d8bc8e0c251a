"""How long a participant's call waits, and what it does meanwhile."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from ftcoord import concurrency
from ftcoord.core.verdict import Standing

R = TypeVar("R")
A = TypeVar("A")

SIGNAL_LATENCY: Final = 1.0
"""The most seconds until a call that waits on the main thread handles a signal."""


def signals_at() -> float:
    """The monotonic time at which a waiting call must wake up for signals; infinity if it need not.

    A signal may come in the moment before a wait, and Python handles it when the wait ends. It runs handlers on the
    main thread only, so calls on other threads need not wake up.
    """
    return concurrency.now() + SIGNAL_LATENCY if concurrency.is_main_thread() else math.inf


@dataclass(frozen=True, slots=True)
class Look(Generic[R, A]):
    """Where a member stands: its standing, the record, and its ask."""

    standing: Standing
    record: R | None
    ask: A


class Pace(Protocol[R, A]):
    """How long one call waits, and what it does meanwhile."""

    @property
    def deadline(self) -> float:
        """The monotonic time at which writes are given up."""

    @property
    def gone(self) -> concurrency.Event:
        """Set when the caller has gone away: writes are then given up at once."""

    def see(self, look: Look[R, A]) -> Standing:
        """Note where the member stands, before anything is done about it. Called with a lock held: must not block.
        Returns PENDING for a standing that this call chooses to wait through, else the standing."""

    def wake_at(self, standing: Standing) -> float:
        """The monotonic time at which to call `tick`. Called with a lock held, before each wait."""

    def tick(self, look: Look[R, A]) -> None:
        """Do what is due from time to time. Raises the error that ends the call, such as TimeoutError."""
