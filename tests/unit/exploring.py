"""Every order of events in a small world: the search that all models here share."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, Final, TypeVar

from invariants import InvariantBroken

S = TypeVar("S")
D = TypeVar("D")
R = TypeVar("R")
A = TypeVar("A")
Events = Callable[[S], Iterable[tuple[str, S]]]
"""What may happen next, and the state that each event leads to."""


PLAIN: Final = frozenset({int, float, bool, type(None)})


def replace(old: D, **changes: Any) -> D:
    """As dataclasses.replace, at a third of its price, of which that is a good part of a search: for dataclasses all of
    whose fields are positional arguments."""
    kind = type(old)
    values_of, places = _fields(kind)
    values = list(values_of(old))
    for name, value in changes.items():
        values[places[name]] = value
    return kind(*values)


@cache
def _fields(kind: type) -> tuple[Callable[[Any], tuple[Any, ...]], dict[str, int]]:
    names = [field.name for field in dataclasses.fields(kind)]
    return attrgetter(*names), {name: place for place, name in enumerate(names)}


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
    return explore_from([(start, depth)], events, check, shape)


def explore_from(
    starts: Sequence[tuple[S, int]],
    events: Events[S],
    check: Callable[[S], None],
    shape: Callable[[S], Hashable] = lambda state: state,
) -> int:
    """As `explore`, from several starts, each with its depth. What several lead to is checked and followed once: first
    those states from which most events are still to be tried, so that no later one would lead any further."""
    with no_collector():
        return _explore_from(starts, events, check, shape)


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """What is found is kept until the end, and has no cycles: the collector would look through all of it in vain, again
    and again, for an eighth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _explore_from(
    starts: Sequence[tuple[S, int]], events: Events[S], check: Callable[[S], None], shape: Callable[[S], Hashable]
) -> int:
    parents: dict[S, tuple[str, S] | None] = {}
    shapes, layer = set[Hashable](), list[S]()
    for left in range(max(depth for _, depth in starts), -1, -1):
        for start in (start for start, depth in starts if depth == left and start not in parents):
            parents[start] = None
            if (form := shape(start)) not in shapes:
                shapes.add(form)
                layer.append(start)
        following: list[S] = []
        for state in layer:
            for event, after in _checked(state, events if left else None, check, parents):
                step = (event, state)
                if parents.setdefault(after, step) is not step:  # hashed once: that costs as much as what follows
                    continue
                if (form := shape(after)) not in shapes:
                    shapes.add(form)
                    following.append(after)
        layer = following
    return len(shapes)


def _checked(
    state: S, events: Events[S] | None, check: Callable[[S], None], parents: dict[S, tuple[str, S] | None]
) -> list[tuple[str, S]]:
    """What may happen next."""
    try:
        check(state)
        return list(events(state)) if events else []
    except InvariantBroken as broken:
        raise InvariantBroken(f"{broken}, after: {' | '.join(_path(state, parents))}") from None


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
        kind = type(value)
        if kind is str:
            form.append(names.setdefault(value, len(names)) if value and value[0] in initials else value)
        elif kind in PLAIN or isinstance(value, (int, float)):
            form.append(value)
        elif isinstance(value, tuple):
            form.append(len(value))
            _number(value, initials, names, form)
        elif isinstance(value, frozenset):  # of names that have all appeared before, so that its order does not matter
            form.append(frozenset(names[one] for one in value))
        else:
            _number(_parts(kind)(value), initials, names, form)


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
