"""Explores every order of events of a small world whose states are values."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from ftcoord.core.situation import Situation
from ftcoord.core.verdict import Publish, Verdict

S = TypeVar("S", bound=Hashable)
R = TypeVar("R")
A = TypeVar("A")


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


def checked(
    decide: Callable[[Situation[R, A]], Verdict[R]], check: Callable[[Situation[R, A], R], None]
) -> Callable[[Situation[R, A]], Verdict[R]]:
    """`decide`, with `check` of each record before it is published, as a decider does it."""

    def decided(situation: Situation[R, A]) -> Verdict[R]:
        found = decide(situation)
        if isinstance(found, Publish):
            check(situation, found.record)
        return found

    return decided
