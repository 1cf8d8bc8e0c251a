"""Every order of events in a small world: the search that all models here share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from ftcoord.core.invariants import InvariantBroken

S = TypeVar("S")
Events = Callable[[S], Iterable[tuple[str, S]]]
"""What may happen next, and the state that each event leads to."""


def walk(start: S, events: Events[S], names: Iterable[str]) -> S:
    """Where these events lead, one after the other."""
    state = start
    for name in names:
        state = dict(events(state))[name]
    return state


def explore(start: S, events: Events[S], check: Callable[[S], None], depth: int) -> int:
    """Check every state that up to `depth` events lead to: how many there are.

    Raises InvariantBroken, which says which events led there; there is no shorter way.
    """
    parents: dict[S, tuple[str, S] | None] = {start: None}
    work = deque([(start, 0)])
    while work:
        state, far = work.popleft()
        try:
            check(state)
            following = list(events(state)) if far < depth else []
        except InvariantBroken as broken:
            raise InvariantBroken(f"{broken}, after: {' | '.join(_path(state, parents))}") from None
        for event, after in following:
            if after not in parents:
                parents[after] = (event, state)
                work.append((after, far + 1))
    return len(parents)


def _path(state: S, parents: dict[S, tuple[str, S] | None]) -> list[str]:
    events = []
    while (parent := parents[state]) is not None:
        events.append(parent[0])
        state = parent[1]
    return events[::-1]
