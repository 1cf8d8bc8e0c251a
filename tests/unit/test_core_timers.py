"""When a timer has expired, what a record may hold, and what a reader can say of one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from ftcoord.core.layout import timer_key
from ftcoord.core.timer_records import Timer, Worker, encode, parse_timer
from ftcoord.core.timers import CLAIM_TIMEOUT, Book, due, inform
from ftcoord.errors import StateError

WORKER = Worker(host="h1", pid=7, start=1000, node="node7", rank=3, ledger=5, ttl=10)
TIMER = Timer(WORKER, "scope", after_ms=60_000, left_ms=50_000, at_ms=100_000, wall_ms=5_000_000, slot=1, token=99)
KEY = timer_key("/run", "h1", 0xAB, "1")


def test_a_record_comes_back() -> None:
    assert KEY == "/run/timers/h1/00000000000000ab/1"
    assert parse_timer(KEY, encode(TIMER)) == TIMER
    assert parse_timer(KEY, b"") is None


@pytest.mark.parametrize(
    "change",
    [
        {"worker": None},
        {"worker": {"pid": 1}},
        {"scope": 5},
        {"left_ms": -1},
        {"left_ms": 1.5},
        {"left_ms": math.nan},
        {"token": -1},
        {"more": 1},
        {"v": 2},
    ],
)
def test_what_is_no_timer(change: dict[str, Any]) -> None:
    raw = json.loads(encode(TIMER))
    with pytest.raises(StateError, match="/run/timers/h1"):
        parse_timer(KEY, json.dumps({**raw, **change}).encode())


@pytest.mark.parametrize("worker", [{"pid": 0}, {"pid": -1}, {"ttl": 0}, {"host": "h2"}])
def test_what_is_no_worker_of_the_host(worker: dict[str, Any]) -> None:
    """A pid of 0 or -1 would mean everybody."""
    with pytest.raises(StateError):
        parse_timer(KEY, encode(replace(TIMER, worker=replace(WORKER, **worker))))


def test_time_runs_from_when_the_timer_is_seen() -> None:
    assert due(TIMER, "me", now=130.0, listed=False) == 180.0


def test_a_server_that_is_new_counts_what_has_passed() -> None:
    assert due(TIMER, "me", now=130.0, listed=True) == 150.0
    assert due(TIMER, "me", now=200.0, listed=True) == 200.0
    assert due(TIMER, "me", now=90.0, listed=True) == 140.0  # never more than what was left


def test_another_servers_timer_is_left_to_it_for_a_while() -> None:
    assert due(replace(TIMER, expired="other"), "me", 130.0, listed=True) == 130.0 + CLAIM_TIMEOUT
    assert due(replace(TIMER, expired="me"), "me", 130.0, listed=True) == 150.0


def test_what_a_reader_says() -> None:
    here = inform(TIMER, "h1", now=110.0, wall=0.0)
    assert (here.host, here.pid, here.rank, here.scope, here.age, here.left) == ("node7", 7, 3, "scope", 20.0, 40.0)
    there = inform(replace(TIMER, worker=replace(WORKER, rank=-1)), "h2", now=0.0, wall=5_060.0)
    assert (there.rank, there.age, there.left) == (None, 70.0, -10.0)
    assert inform(TIMER, "h2", now=0.0, wall=0.0).age == 10.0  # its clock is ahead of ours


def book(**timers: float) -> Book[str]:
    made: Book[str] = Book()
    for name, when in timers.items():
        made.note(name, name, when, now=0.0)
    return made


def names(expired: list[tuple[Any, Any]]) -> list[str]:
    return [entry.item for _, entry in expired]


def test_who_is_due() -> None:
    timers = book(a=3.0, b=1.0, c=2.0)
    assert timers.look_at() == 1.0
    assert names(timers.expired(0.9)) == []
    assert names(timers.expired(2.0)) == ["b", "c"]
    timers.drop("b")
    timers.drop("nobody")
    assert names(timers.expired(9.0)) == ["c", "a"]
    assert Book[str]().look_at() == math.inf


def test_a_new_timer_takes_the_place_of_the_old_one() -> None:
    timers = book(a=1.0)
    timers.note("a", "again", 5.0, now=0.5)
    assert timers.look_at() == 5.0
    assert names(timers.expired(5.0)) == ["again"]


def test_nothing_is_due_while_it_is_held() -> None:
    timers = book(a=1.0)
    timers.hold(3.0)
    timers.hold(2.0)
    assert (timers.look_at(), timers.expired(2.9), names(timers.expired(3.0))) == (3.0, [], ["a"])


def test_one_that_is_postponed_stays_due() -> None:
    timers = book(a=1.0)
    timers.postpone("a", 2.0)
    timers.postpone("nobody", 2.0)
    assert (timers.entries["a"].due, timers.look_at(), timers.expired(1.5)) == (1.0, 2.0, [])
    timers.postpone("a", 3.0, "claimed")
    assert names(timers.expired(3.0)) == ["claimed"]


def test_time_in_which_nothing_ran_does_not_count() -> None:
    timers = book(a=1.0, b=2.0)
    timers.shift(10.0)
    assert names(timers.expired(11.0)) == ["a"]
