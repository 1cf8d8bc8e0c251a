"""What each object does if one client after the other uses it: the sequential specifications, after torch's `Store`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, Protocol

from judge.history import Operation, is_decimal

State = Any
"""What an object holds; hashable."""
NO_ANSWER: Final = object()
"""The result of a call that does not return: nobody is told that."""
OTHER: Final = "\uffff"
"""A text that no store holds: values are texts of characters up to U+00FF."""


class Specification(Protocol):
    """One kind of object."""

    initial: State

    def apply(self, operation: Operation, state: State) -> tuple[Any, State]:
        """What the operation returns if the object is in this state, and the state afterwards."""

    def states(self, operations: Sequence[Operation]) -> list[State]:
        """All states that answers tell apart; `OTHER` stands for all others."""


class StoreKey:
    """One key of a store: a text, or None while it is not there."""

    initial: State = None

    def apply(self, operation: Operation, state: State) -> tuple[Any, State]:
        return getattr(self, operation.op)(state, *operation.arguments)  # type: ignore[no-any-return]

    def get(self, held: str | None) -> tuple[Any, State]:
        """Waits until the key is there."""
        return (NO_ANSWER if held is None else held), held

    def set(self, _held: str | None, value: str) -> tuple[Any, State]:
        return None, value

    def add(self, held: str | None, amount: str) -> tuple[Any, State]:
        try:
            total = str(int("0" if held is None else held) + int(amount))
        except ValueError:  # refused: no number
            return NO_ANSWER, held
        return total, total

    def append(self, held: str | None, more: str) -> tuple[Any, State]:
        return None, (held or "") + more

    def compare_set(self, held: str | None, expected: str, desired: str) -> tuple[Any, State]:
        """Of a key that is not there, what was expected is returned, unless it was nothing."""
        if (held or "") == expected:
            return desired, desired
        return (expected if held is None else held), held

    def delete(self, held: str | None) -> tuple[Any, State]:
        return held is not None, None

    def check(self, held: str | None) -> tuple[Any, State]:
        return held is not None, held

    def states(self, operations: Sequence[Operation]) -> list[State]:
        """What was told or compared with, and what leads there without an answer that tells of it.

        From any other text nothing leads to one of these but what leads there from everywhere, and no answer tells it
        from another one, but that it is there.
        """
        found: dict[State, None] = dict.fromkeys([None, "", *_named(operations)])
        silent = [one for one in operations if one.op == "append" or (one.op == "add" and not one.is_answered)]
        newest = list(found)
        for _ in silent:  # each takes place once at most
            newest = [state for state in dict.fromkeys(_before(silent, newest)) if state not in found]
            found.update(dict.fromkeys(newest))
        return list(found)


def _named(operations: Sequence[Operation]) -> Iterator[str]:
    """What answers tell of, and what is compared with. Who adds may read any text as a number."""
    adds = any(one.op == "add" for one in operations)
    for one in operations:
        if isinstance(one.result, str):
            yield one.result
        if one.op == "add" and one.is_answered:
            yield str(int(one.result) - int(one.arguments[0]))
        elif one.op == "compare_set":
            yield one.arguments[0]
        if one.op in ("set", "compare_set") and adds:
            yield one.arguments[-1]


def _before(operations: Sequence[Operation], states: Sequence[State]) -> Iterator[State]:
    """From where such operations lead to these states."""
    for state in states:
        for one in operations:
            if one.op == "append" and state is not None and state.endswith(one.arguments[0]):
                yield state.removesuffix(one.arguments[0])
            elif one.op == "add" and state is not None and is_decimal(state):
                yield str(int(state) - int(one.arguments[0]))


class Rounds:
    """The rounds of a run: a number that grows, and what tells the members of that round."""

    initial: State = (0, "")

    def apply(self, operation: Operation, state: State) -> tuple[Any, State]:
        """Who joins is told of the round that there is, or is the first to be told of a later one."""
        if not operation.is_answered or state == OTHER:  # of each round that there was, somebody was told
            return NO_ANSWER, state
        now = max(state, operation.result, key=itemgetter(0))
        return now, now

    def states(self, operations: Sequence[Operation]) -> list[State]:
        return list(dict.fromkeys([self.initial, *(one.result for one in operations if one.is_answered)]))


SPECIFICATIONS: Final[Mapping[str, Specification]] = {"store": StoreKey(), "rounds": Rounds()}
