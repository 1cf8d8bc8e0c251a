"""Explores every order of events of a small world whose states are values."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

S = TypeVar("S", bound=Hashable)


def explore(start: S, following: Callable[[S], list[S]], check: Callable[[S, list[S]], None]) -> int:
    """Go through all states that can follow `start`; how many there are. `check` gets each, and what can follow it."""
    seen, new = {start}, [start]
    while new:
        now = new.pop()
        steps = following(now)
        check(now, steps)
        fresh = set(steps) - seen
        seen |= fresh
        new += fresh
    return len(seen)
