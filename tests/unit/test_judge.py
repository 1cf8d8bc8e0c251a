"""The judge of histories finds what is wrong with them, and nothing where nothing is."""

from __future__ import annotations

from dataclasses import replace

from store_history import Operation, check, check_reads

STATES = {
    "sum": [(2, b"1"), (4, b"2"), (7, b"3")],
    "log": [(3, b"a"), (6, b"ab")],
    "register": [(5, b"x"), (8, b"y"), (9, b"z")],
}
HISTORY = [
    Operation("add", "sum", (b"1",), 0, b"1", 2),
    Operation("append", "log", (b"a",), 1, None, 3),
    Operation("add", "sum", (b"1",), 2.5, b"2", 4),
    Operation("compare_set", "register", (b"", b"x"), 3.5, b"x", 5),
    Operation("append", "log", (b"b",), 3.5),
    Operation("get", "register", (), 5.5, b"x", 9),
    Operation("add", "sum", (b"1",), 6, None),
    Operation("compare_set", "register", (b"x", b"y"), 6, b"y", 9),
    Operation("compare_set", "register", (b"x", b"lost"), 6, b"y", 9),
    Operation("set", "register", (b"z",), 10, None, 11),
    Operation("get", "sum", (), 10, b"3", 11),
    Operation("compare_set", "register", (b"q", b"never"), 12),
]
LAST = max(one.ended for one in HISTORY if one.answered)


def but(number: int, **changes: object) -> list[Operation]:
    """The history with one operation changed."""
    return [replace(one, **changes) if at == number else one for at, one in enumerate(HISTORY)]  # type: ignore[arg-type]


def test_a_history_that_is_linearizable() -> None:
    assert not check(HISTORY, STATES)


def test_an_answered_write_that_etcd_does_not_know() -> None:
    extra = Operation("set", "register", (b"gone",), 10, None, 11)
    assert check([*HISTORY, extra], STATES).lost == [extra]


def test_an_unanswered_write_may_be_made_once_or_never_but_not_twice() -> None:
    never = {**STATES, "sum": STATES["sum"][:-1]}
    assert not check(but(10, told=b"2"), never)
    assert check(HISTORY, {**STATES, "log": [*STATES["log"], (11, b"abb")]}).doubled == [("log", 11)]


def test_a_stale_read() -> None:
    stale = but(5, began=LAST + 1, ended=LAST + 2)
    assert check(stale, STATES).out_of_order == [stale[5]]


ROUNDS = [(3, b"round 1"), (7, b"round 2"), (9, b"round 3")]
MEETINGS = [
    Operation("get", "decided", (), 0, b"round 1", 2),
    Operation("get", "decided", (), 1, b"round 1", 4),  # it began before and ends after
    Operation("get", "decided", (), 3, b"round 2", 5),
    Operation("get", "decided", (), 4.5),
    Operation("get", "decided", (), 4.5, b"round 3", 6),
]


def met(number: int, **changes: object) -> list[Operation]:
    return [replace(one, **changes) if at == number else one for at, one in enumerate(MEETINGS)]  # type: ignore[arg-type]


def test_a_round_that_was_over_before_the_node_asked() -> None:
    stale = met(4, began=5.5, told=b"round 1")
    assert check_reads(stale, ROUNDS).out_of_order == [stale[4]]
