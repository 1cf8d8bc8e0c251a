"""Whether one order of all operations explains a history: Z3 finds it, or proves that there is none."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import z3

from judge.history import Operation
from judge.question import question
from judge.specifications import SPECIFICATIONS

EFFORT: Final = 500_000_000
"""How much Z3 may spend on one question, in its own unit (`rlimit`): it is the same on every machine."""


class UndecidedError(RuntimeError):
    """Z3 gave up."""


@dataclass(frozen=True)
class Finding:
    """A key of which no order explains what was told.

    Args:
        last: the answer that none explains any more: up to then one does.
    """

    last: Operation

    def __str__(self) -> str:
        return f"no order of the operations on {self.last.object} {self.last.key!r} explains {self.last}"


def findings(history: Sequence[Operation]) -> Iterator[Finding]:
    """What is wrong with it, one for each key: none, if it is linearizable. Raises UndecidedError.

    A history is linearizable if that of each key is, so each is judged by itself.
    """
    for kind, key in dict.fromkeys((one.object, one.key) for one in history):
        operations = [one for one in history if (one.object, one.key) == (kind, key)]
        if not is_linearizable(operations):
            yield Finding(_first_unexplained(operations))


def is_linearizable(operations: Sequence[Operation]) -> bool:
    """Whether these operations on one object are. Raises UndecidedError."""
    solver = z3.SimpleSolver()
    solver.set("rlimit", EFFORT)
    solver.from_string(question(operations, SPECIFICATIONS[operations[0].object]))
    answer = solver.check()
    if answer == z3.unknown:
        raise UndecidedError(
            f"Z3 gave up on {len(operations)} operations on {operations[0].object} {operations[0].key!r} "
            f"({solver.reason_unknown()}): judge a shorter history, or raise EFFORT in judge/linearizability.py"
        )
    return bool(answer == z3.sat)


def _first_unexplained(operations: Sequence[Operation]) -> Operation:
    """Whose answer no order explains any more. What has an order has one at all times before."""
    ends = {one.returned: one for one in operations if one.returned is not None}
    at = bisect_left(sorted(ends), True, key=lambda end: not is_linearizable(_as_known(operations, end)))
    return ends[sorted(ends)[at]]


def _as_known(operations: Sequence[Operation], end: float) -> list[Operation]:
    """What was known of them then."""
    begun = [one for one in operations if one.invoked <= end]
    return [
        one if one.returned is not None and one.returned <= end else replace(one, returned=None, result=None)
        for one in begun
    ]
