"""Every order of events in a small world: the search that all models here share."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

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


def explore(
    start: S,
    events: Events[S],
    check: Callable[[S], None],
    depth: int,
    shape: Callable[[S], Hashable] = lambda state: state,
) -> int:
    """Check every state that up to `depth` events lead to: how many there are. Of those of one `shape`, the first.

    Raises InvariantBroken, which says which events led there; there is no shorter way.
    """
    parents: dict[S, tuple[str, S] | None] = {start: None}
    shapes = {shape(start)}
    work = deque([(start, 0)])
    while work:
        state, far = work.popleft()
        try:
            check(state)
            following = list(events(state)) if far < depth else []
        except InvariantBroken as broken:
            raise InvariantBroken(f"{broken}, after: {' | '.join(_path(state, parents))}") from None
        for event, after in following:
            if after in parents:
                continue
            parents[after] = (event, state)
            if (form := shape(after)) not in shapes:
                shapes.add(form)
                work.append((after, far + 1))
    return len(shapes)


def nameless(state: Hashable, initials: str) -> Hashable:
    """What is left of a state of tuples and dataclasses when names do not count: those that begin with one of these
    letters are numbered in the order in which they appear.

    This holds two states for one only if a renaming makes one out of the other.
    """
    form: list[Any] = []
    _number((state,), initials, {}, form)
    return tuple(form)


def _number(values: Iterable[Any], initials: str, names: dict[str, int], form: list[Any]) -> None:
    for value in values:
        if isinstance(value, str):
            form.append(names.setdefault(value, len(names)) if value and value[0] in initials else value)
        elif value is None or isinstance(value, (int, float)):
            form.append(value)
        elif isinstance(value, tuple):
            form.append(len(value))
            _number(value, initials, names, form)
        elif isinstance(value, frozenset):  # of names that have all appeared before, so that its order does not matter
            form.append(frozenset(names[one] for one in value))
        else:
            _number(_parts(type(value))(value), initials, names, form)


@cache
def _parts(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    """What takes a dataclass apart into what makes it equal to another one; of two fields or more."""
    first, second, *more = (field.name for field in dataclasses.fields(kind) if field.hash is not False)
    return attrgetter(first, second, *more)


def _path(state: S, parents: dict[S, tuple[str, S] | None]) -> list[str]:
    events = []
    while (parent := parents[state]) is not None:
        events.append(parent[0])
        state = parent[1]
    return events[::-1]
