"""The judge that knows nothing of etcd (tests/judge) accepts what one order explains, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from judge.__main__ import main
from judge.history import Operation, written
from judge.linearizability import findings, is_linearizable
from judge.specifications import NO_ANSWER, SPECIFICATIONS


def did(op: str, *arguments: str, told: object = None, at: tuple[float, float | None], key: str = "k") -> Operation:
    """One operation: on a store's key, or a join of a round."""
    return Operation("c", "rounds" if op == "join" else "store", key, op, arguments, told, *at)


GOOD = {
    "one after the other": [
        did("set", "x", at=(0, 1)),
        did("get", told="x", at=(2, 3)),
        did("append", "y", at=(4, 5)),
        did("compare_set", "xy", "z", told="z", at=(6, 7)),
        did("compare_set", "q", "never", told="z", at=(8, 9)),
        did("check", told=True, at=(10, 11)),
        did("delete", told=True, at=(12, 13)),
        did("delete", told=False, at=(14, 15)),
        did("compare_set", "q", "never", told="q", at=(16, 17)),
        did("check", told=False, at=(18, 19)),
    ],
    "a read that overlaps a write": [did("set", "x", at=(0, 9)), did("get", told="x", at=(1, 2))],
    "reads that overlap two writes": [
        did("set", "x", at=(0, 9)),
        did("set", "y", at=(0, 9)),
        did("get", told="y", at=(1, 2)),
        did("get", told="x", at=(3, 4)),
    ],
    "a write that nobody saw, and one that somebody did": [
        did("set", "x", at=(0, 1)),
        did("set", "y", at=(2, None)),
        did("set", "z", at=(3, None)),
        did("get", told="x", at=(4, 5)),
        did("get", told="z", at=(6, 7)),
    ],
    "counts": [
        did("add", "2", told="2", at=(0, 3)),
        did("add", "1", told="3", at=(0, 3)),
        did("add", "5", at=(4, None)),
        did("get", told="3", at=(5, 6)),
        did("add", "-1", told="7", at=(7, 8)),
    ],
    "a write that was sent again, and seen before it was answered": [
        did("append", "x", at=(0, 9)),
        did("get", told="x", at=(1, 2)),
        did("append", "y", at=(3, 4)),
        did("get", told="xy", at=(10, 11)),
    ],
    "a key that an unanswered write brought": [did("set", "x", at=(0, None)), did("check", told=True, at=(1, 2))],
    "two keys": [did("set", "x", at=(0, 1)), did("check", told=False, at=(2, 3), key="other")],
    "rounds": [
        did("join", told=(1, "a, b"), at=(0, 3)),
        did("join", told=(1, "a, b"), at=(1, 2)),
        did("join", told=(3, "b"), at=(4, 9)),
        did("join", told=(2, "a"), at=(4, 9)),
        did("join", at=(5, None)),
    ],
}
BAD = {
    "a stale read": [did("set", "x", at=(0, 1)), did("set", "y", at=(2, 3)), did("get", told="x", at=(4, 5))],
    "a read of the future": [did("get", told="x", at=(0, 1)), did("set", "x", at=(2, 3))],
    "a read of what never was": [did("set", "x", at=(0, 1)), did("get", told="y", at=(2, 3))],
    "reads that go back": [
        did("set", "x", at=(0, 1)),
        did("set", "y", at=(2, 9)),
        did("get", told="y", at=(3, 4)),
        did("get", told="x", at=(5, 6)),
    ],
    "a lost update": [
        did("append", "x", at=(0, 1)),
        did("append", "y", at=(2, 3)),
        did("get", told="y", at=(4, 5)),
    ],
    "an unanswered write that is made twice": [
        did("append", "x", at=(0, None)),
        did("get", told="xx", at=(1, 2)),
    ],
    "a write that was sent again, and made twice": [
        did("append", "x", at=(0, 9)),
        did("get", told="x", at=(1, 2)),
        did("append", "y", at=(3, 4)),
        did("get", told="xyx", at=(10, 11)),
    ],
    "an unanswered write that comes again": [
        did("set", "x", at=(0, None)),
        did("get", told="x", at=(1, 2)),
        did("set", "y", at=(3, 4)),
        did("get", told="x", at=(5, 6)),
    ],
    "an add that is counted twice": [did("add", "1", told="1", at=(0, 1)), did("get", told="2", at=(2, 3))],
    "an add that is told to two": [did("add", "1", told="1", at=(0, 9)), did("add", "1", told="1", at=(0, 9))],
    "a compare_set that two win": [
        did("compare_set", "", "x", told="x", at=(0, 9)),
        did("compare_set", "", "y", told="y", at=(0, 9)),
    ],
    "a key that is gone by itself": [did("set", "x", at=(0, 1)), did("check", told=False, at=(2, 3))],
    "a key that two delete": [
        did("set", "x", at=(0, 1)),
        did("delete", told=True, at=(2, 9)),
        did("delete", told=True, at=(2, 9)),
    ],
    "a round with two memberships": [
        did("join", told=(1, "a, b"), at=(0, 9)),
        did("join", told=(1, "a, c"), at=(0, 9)),
    ],
    "a round that was over": [did("join", told=(2, "a"), at=(0, 1)), did("join", told=(1, "b"), at=(2, 3))],
}


@pytest.mark.parametrize("history", GOOD.values(), ids=GOOD)
def test_what_one_order_explains_is_accepted(history: list[Operation]) -> None:
    assert not [*findings(history)]


@pytest.mark.parametrize("history", BAD.values(), ids=BAD)
def test_what_no_order_explains_is_rejected(history: list[Operation]) -> None:
    assert len([*findings(history)]) == 1


def drawn(seed: int) -> list[Operation]:
    """What clients were told who used a key at once; some were not answered, and in some histories an answer is
    another's."""
    draw, specification, state = random.Random(seed), SPECIFICATIONS["store"], None
    counts = draw.random() < 0.4
    kinds = ["get", "add", "set", "delete"] if counts else ["get", "set", "append", "compare_set", "delete", "check"]
    history: list[Operation] = []
    free = [0.0] * draw.randint(2, 4)
    wrong, unanswered = draw.choice((0.0, 0.5)), draw.choice((0.0, 0.3))
    seen = [""]
    for moment in range(1, draw.randint(4, 14)):
        clients = [client for client, since in enumerate(free) if since < moment]
        if not clients:
            continue
        client, op = draw.choice(clients), draw.choice(kinds)
        text = draw.choice("12") if counts else draw.choice(("a", "b", f"{moment};"))
        arguments = {"set": (text,), "append": (text,), "add": (text,), "compare_set": (draw.choice(seen), text)}
        began = draw.uniform(max(free[client], moment - 2), moment)
        one = Operation(str(client), "store", "k", op, arguments.get(op, ()), None, began, moment + 2 * draw.random())
        told, after = specification.apply(one, state)
        if told is NO_ANSWER or draw.random() < unanswered:
            history.append(replace(one, returned=None))
        else:
            told = draw.choice(seen) if op == "get" and draw.random() < wrong else told
            history.append(replace(one, result=told))
        if isinstance(state, str):
            seen.append(state)
        free[client], state = moment + 2.0, after if draw.random() > wrong / 4 else state
    return history


def some_order_explains(operations: Sequence[Operation]) -> bool:
    """By trying all orders, without Z3."""
    specification = SPECIFICATIONS["store"]
    tried = set()

    def goes_on(done: frozenset[int], state: object) -> bool:
        left = [at for at in range(len(operations)) if at not in done]
        ends = [operations[at].returned for at in left if operations[at].returned is not None]
        if not ends:
            return True
        if (done, state) in tried:
            return False
        tried.add((done, state))
        for at in left:
            one = operations[at]
            told, after = specification.apply(one, state)
            may = one.invoked <= min(ends) and (one.returned is None or told == one.result)
            if may and goes_on(done | {at}, after):
                return True
        return False

    return goes_on(frozenset(), specification.initial)


def test_the_judge_says_what_trying_all_orders_says() -> None:
    verdicts = []
    for seed in range(150):
        history = drawn(seed)
        if history:
            verdicts.append(some_order_explains(history))
            assert is_linearizable(history) == verdicts[-1], (seed, history)
    assert min(verdicts.count(True), verdicts.count(False)) > 10, "both must be there"


def test_the_command_names_the_line_and_tells_by_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad, broken = (tmp_path / name for name in ("good", "bad", "broken"))
    good.write_text(written(GOOD["counts"]))
    bad.write_text(written(BAD["a stale read"]))
    broken.write_text("{")
    assert main([str(good)]) == 0
    assert main([str(good), str(bad)]) == 1
    assert "line 3: c: get(k) -> 'x'" in capsys.readouterr().out
    assert main([str(broken), str(tmp_path / "absent")]) == 2
    assert "line 1 is not JSON" in capsys.readouterr().err
