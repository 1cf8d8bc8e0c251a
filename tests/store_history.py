"""S4: an acknowledged store operation happened exactly once, an unacknowledged one at most once. Pure.

It checks whether the results that a store's clients got could have come from one store that does one thing at a time.
etcd is the witness: each change of a key has a revision, and revisions are one order for all. A client's result implies
the revision at which its operation took place; for a read, the revisions between which it can have taken place. The
history is linearizable if these fit the order in which operations began and ended, and if every change was asked for
once. Every written value is unique, so no search is needed, as it would be in general.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

History = Sequence["tuple[int, bytes | None]"]
"""What a key held, from which revision on; None for nothing."""
States = Mapping[str, History]
"""The histories of all keys."""


@dataclass(slots=True)
class Operation:
    """One call of a client.

    Args:
        kind: get, set, add, append or compare_set.
        given: its argument besides the key (for get, nothing).
        told: its result; None if it was not answered, or has no result.
        began, ended: when, on one clock for all; `ended` is infinite if it was not answered.
        client: the caller, for people.
    """

    kind: str
    key: str
    given: tuple[bytes, ...]
    began: float
    told: bytes | None = None
    ended: float = math.inf
    client: str = ""

    @property
    def answered(self) -> bool:
        return self.ended < math.inf


@dataclass
class Findings:
    """What is wrong with a history: nothing, if it is linearizable."""

    lost: list[Operation] = field(default_factory=list)
    """Answered, but unknown to etcd."""
    doubled: list[tuple[str, int]] = field(default_factory=list)
    """Changes (key and revision) that nobody asked for, or that were made twice."""
    out_of_order: list[Operation] = field(default_factory=list)
    """Operations that do not fit the order in which operations began and ended."""

    def __bool__(self) -> bool:
        return bool(self.lost or self.doubled or self.out_of_order)


def check(operations: Sequence[Operation], states: States) -> Findings:
    """Compare the clients' results with what etcd did, which must be all changes of these keys."""
    findings = Findings()
    spans = dict[int, tuple[float, float]]()
    in_order = sorted(operations, key=lambda one: one.began)
    for key, history in states.items():
        _place(key, [one for one in in_order if one.key == key], history, spans, findings)
    findings.lost += [one for one in operations if one.answered and id(one) not in spans]
    _order(operations, spans, findings)
    return findings


def check_reads(operations: Sequence[Operation], history: History) -> Findings:
    """The same for reads of one key that others change, to values that are all different."""
    holds = _holds(history)
    spans = {id(one): holds[one.told] for one in operations if one.answered and one.told in holds}
    findings = Findings(lost=[one for one in operations if one.answered and id(one) not in spans])
    _order(operations, spans, findings)
    return findings


def _holds(history: History) -> dict[bytes | None, tuple[float, float]]:
    """For each value, the revisions (the first, and the first after) between which the key last held it."""
    ends = [revision for revision, _ in history[1:]] + [math.inf]
    return {value: (revision, end) for (revision, value), end in zip(history, ends, strict=True)}


def _place(
    key: str,
    operations: Sequence[Operation],
    history: History,
    spans: dict[int, tuple[float, float]],
    findings: Findings,
) -> None:
    """Find the revisions of one key's operations."""
    asked: dict[tuple[str, bytes], list[Operation]] = {}
    for one in operations:
        for mark in _marks(one):
            asked.setdefault(mark, []).append(one)
    holds = _holds(history)
    before: bytes | None = None
    for revision, after in history:
        causes = [one for mark in _changes(before, after) for one in asked.get(mark, ()) if _did(one, before, after)]
        cause = next((one for one in causes if id(one) not in spans), None)
        if cause is None:
            findings.doubled.append((key, revision))
        else:
            spans[id(cause)] = (revision, revision + 1)
        before = after
    for one in operations:
        if one.answered and id(one) not in spans and _reads(one) and one.told in holds:
            spans[id(one)] = holds[one.told]


def _marks(one: Operation) -> Iterable[tuple[str, bytes]]:
    """How a change by this operation would be recognized."""
    if one.kind == "add":
        yield ("add", one.told if one.told is not None else b"?")
    elif one.kind != "get":
        yield (one.kind, one.given[-1])


def _changes(before: bytes | None, after: bytes | None) -> Iterable[tuple[str, bytes]]:
    """The marks of the operations that could have made this change."""
    if after is not None:
        yield from (("set", after), ("compare_set", after), ("add", after), ("add", b"?"))
        yield ("append", after[len(before or b"") :])


def _did(one: Operation, before: bytes | None, after: bytes | None) -> bool:
    """Whether the operation turns `before` into `after`."""
    held, given = before or b"", one.given
    if one.kind == "add":
        return after == b"%d" % (int(held or b"0") + int(given[0]))
    if one.kind == "append":
        return after == held + given[0]
    if one.kind == "compare_set":
        return held == given[0] and after == given[1] and one.told in (None, given[1])
    return after == given[0]


def _reads(one: Operation) -> bool:
    """Whether it changed nothing, by its result."""
    return one.kind == "get" or (one.kind == "compare_set" and one.told != one.given[1])


def _order(operations: Sequence[Operation], spans: Mapping[int, tuple[float, float]], findings: Findings) -> None:
    """Let each operation take place as early as possible, in the order of revisions; all must be within their spans."""
    placed = [one for one in operations if id(one) in spans]
    moments = [(one.began, True, one) for one in placed] + [(one.ended, False, one) for one in placed if one.answered]
    at = dict[int, float]()
    floor = 0.0
    for _, begins, one in sorted(moments, key=lambda moment: (moment[0], not moment[1])):
        if not begins:
            floor = max(floor, at[id(one)])
            continue
        first, end = spans[id(one)]
        at[id(one)] = max(first, floor)
        if at[id(one)] >= end or (not _reads(one) and floor >= first):
            findings.out_of_order.append(one)
