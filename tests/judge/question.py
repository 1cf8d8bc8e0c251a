"""The question whether operations on one object are linearizable, in SMT-LIB, the language of all SMT solvers."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from judge.history import Operation
from judge.specifications import OTHER, Specification

NEVER = -1
"""The end of an operation that no order needs."""


def question(operations: Sequence[Operation], specification: Specification) -> str:
    """Constraints that can all be met if, and only if, one order of the operations explains all answers.

    Each operation has a moment within its call, and finds the state that the last change before it has left. One of
    unknown outcome happens or does not.
    """
    return "\n".join(_Question(operations, specification).lines())


class _Placed:
    """One operation, and the names of what the solver is to find of it.

    Args:
        begin, end: places in the order of all beginnings and ends; `end` is infinite if nobody knows the outcome.
        outcomes: for the number of each state in which it may take place, that of the state afterwards.
        is_total: whether it may take place in all states.
        is_known: whether it happens.
    """

    def __init__(
        self, number: int, begin: int, end: float, outcomes: Mapping[int, int], is_total: bool, is_known: bool
    ) -> None:
        self.number, self.begin, self.end = number, begin, end
        self.outcomes, self.is_total, self.is_known = outcomes, is_total, is_known
        self.afters = set(outcomes.values())
        self.changes = any(before != after for before, after in outcomes.items())
        self.is_blind = is_total and len(self.afters) == 1
        """Whether it leads from every state to the same one."""
        self.moment, self.before = f"moment{number}", f"before{number}"
        self.happens = "true" if is_known else f"happens{number}"
        self.after = str(*self.afters) if len(self.afters) == 1 else f"after{number}"

    def without(self, state: int | None) -> _Placed:
        """The same, but that it only takes place where it changes something, and does not lead to that state."""
        outcomes = {before: after for before, after in self.outcomes.items() if after not in (before, state)}
        is_total = self.is_total and len(outcomes) == len(self.outcomes)
        return _Placed(self.number, self.begin, self.end, outcomes, is_total, self.is_known)


class _Question:
    def __init__(self, operations: Sequence[Operation], specification: Specification) -> None:
        states = [*specification.states(operations), OTHER]
        self._numbers = {state: number for number, state in enumerate(states)}
        self._initial, self._other = self._numbers[specification.initial], self._numbers[OTHER]
        placed = [*self._placed(operations, specification)]
        self._other_is_worst = self._is_worst(placed)
        """Whether an order in which a state is `OTHER` remains one where it is any other state."""
        self._all = self._needed(placed)
        self._changes = sorted((one for one in self._all if one.changes), key=lambda one: one.begin)
        self._certain = sorted((one.end, one.begin) for one in self._changes if one.is_known)

    def lines(self) -> Iterator[str]:
        for one in self._all:
            yield from self._declared(one)
        for one in self._all:
            yield f"(assert (< {one.begin} {one.moment}))"
            if one.end < math.inf:
                yield f"(assert (< {one.moment} {one.end}))"
            if not one.is_blind:
                yield f"(assert (=> {one.happens} {_all([_any(self._follows(one)), self._leads(one)])}))"
        for first, second in self._alike():
            yield f"(assert (=> {second.happens} {_all([first.happens, f'(< {first.moment} {second.moment})'])}))"

    def _declared(self, one: _Placed) -> Iterator[str]:
        yield f"(declare-const {one.moment} Real)"
        if not one.is_blind:
            yield f"(declare-const {one.before} Int)"
        if len(one.afters) > 1 and one.changes:
            yield f"(declare-const {one.after} Int)"
        if not one.is_known:
            yield f"(declare-const {one.happens} Bool)"

    # -- which operations there are -----------------------------------------------------------------------------------

    def _placed(self, operations: Sequence[Operation], specification: Specification) -> Iterator[_Placed]:
        """Of calls that begin when others end nobody knows which was first: they are taken to overlap."""
        moments = [(one.invoked, 0, at) for at, one in enumerate(operations)]
        moments += [(one.returned, 1, at) for at, one in enumerate(operations) if one.returned is not None]
        places = {(at, is_end): place for place, (_, is_end, at) in enumerate(sorted(moments))}
        for at, one in enumerate(operations):
            outcomes = {}
            for state, number in self._numbers.items():
                told, after = specification.apply(one, state)
                if not one.is_answered or told == one.result:
                    outcomes[number] = self._numbers.get(after, self._other)
            is_total = len(outcomes) == len(self._numbers)
            yield _Placed(at, places[at, 0], places.get((at, 1), math.inf), outcomes, is_total, one.is_answered)

    def _is_worst(self, placed: Sequence[_Placed]) -> bool:
        """What may take place in `OTHER` may in each state, and leads from both to one state, or from `OTHER` to
        `OTHER`. It is so unless somebody was told that something is there, and not what."""
        other = self._other
        return all(
            number in one.outcomes and one.outcomes[other] in (other, one.outcomes[number])
            for one in placed
            if other in one.outcomes
            for number in self._numbers.values()
        )

    def _needed(self, placed: Sequence[_Placed]) -> list[_Placed]:
        """All but those of unknown outcome that no order needs: if there is an order, there is one without them.

        One is needed only by another that follows it at once, and needs what it left. So it takes place before such a
        one has ended, and that is its own end.
        """
        known = [one for one in placed if one.is_known]
        unknown = [one.without(self._other if self._other_is_worst else None) for one in placed if not one.is_known]
        needed_by = {
            one: [other for other in (*known, *unknown) if other is not one and self._needs(other, one)]
            for one in unknown
        }
        for one in unknown:
            one.end = NEVER
        while later := {
            one: end
            for one, others in needed_by.items()
            if (end := max((other.end for other in others), default=NEVER)) > one.end
        }:
            for one, end in later.items():
                one.end = end
        return known + [one for one in unknown if one.begin < one.end]

    def _needs(self, one: _Placed, change: _Placed) -> bool:
        """Whether an order may need the change before this one."""
        if one.is_blind:
            return False
        useless = self._other if self._other_is_worst and one.is_total else None
        return any(state in one.outcomes and one.outcomes[state] != useless for state in change.afters)

    def _alike(self) -> Iterator[tuple[_Placed, _Placed]]:
        """Operations of unknown outcome that lead to the same and could change places in each order, so that the
        second may be taken to happen after the first, and only if that does: else each order would be tried."""
        alike: dict[object, list[_Placed]] = {}
        for one in self._changes:  # as they begin
            if not one.is_known:
                alike.setdefault((one.end, *one.outcomes.items()), []).append(one)
        for those in alike.values():
            yield from pairwise(those)

    # -- what is asked of each ----------------------------------------------------------------------------------------

    def _leads(self, one: _Placed) -> str:
        """It may take place in the state before it, and leads from that to the state after it."""
        may = _any(f"(= {one.before} {number})" for number in one.outcomes)
        if not one.changes or len(one.afters) == 1:
            return may
        after = usual = str(Counter(one.outcomes.values()).most_common(1)[0][0])
        for before, number in one.outcomes.items():
            if str(number) != usual:
                after = f"(ite (= {one.before} {before}) {number} {after})"
        return _all([may, f"(= {one.after} {after})"])

    def _follows(self, one: _Placed) -> Iterator[str]:
        """For each change that it may be the first to follow, and for the beginning: that it does."""
        over = self._certain[: bisect_left(self._certain, (one.begin, 0))]
        last = max((begin for _, begin in over), default=NEVER)  # what has ended before that, something else follows
        near = [other for other in self._changes if other is not one and other.begin < one.end and other.end > last]
        if not over and self._initial in one.outcomes:
            later = [_any([f"(not {other.happens})", f"(< {one.moment} {other.moment})"]) for other in near]
            yield _all([f"(= {one.before} {self._initial})", *later])
        for change in near:
            if not one.outcomes.keys().isdisjoint(change.afters):
                others = [other for other in near if other is not change and other.end > change.begin]
                not_between = [
                    f"(or (not {other.happens}) (< {other.moment} {change.moment}) (< {one.moment} {other.moment}))"
                    for other in others
                ]
                found = [change.happens, f"(< {change.moment} {one.moment})", f"(= {one.before} {change.after})"]
                yield _all([*found, *not_between])


def _any(terms: Iterable[str]) -> str:
    return f"(or false {' '.join(terms)})"


def _all(terms: Iterable[str]) -> str:
    return f"(and true {' '.join(terms)})"
