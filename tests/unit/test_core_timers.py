"""What a record of timers may hold, and what a reader can say of one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from held import TIMER, WORKER, expired_kv, timers_kv

from ftcoord.core.layout import is_expired_key
from ftcoord.core.timers import LONGEST_SCOPE, MOST_TIMERS, HeldTimers, encode, inform, parse_timers
from ftcoord.errors import StateError

KEY, VALUE = timers_kv("/run").key, timers_kv("/run").value
MOST_BYTES = 1024 * 1024
"""Of a value that etcd takes on default settings (1.5 MiB), with the rest of the request."""


def test_a_record_comes_back() -> None:
    assert KEY == "/run/timers/h1/0000000000000001"
    assert parse_timers(KEY, VALUE) == HeldTimers(WORKER, (TIMER,))
    assert parse_timers(KEY, encode(HeldTimers(WORKER, ()))).timers == ()
    assert [is_expired_key(key) for key in (KEY, expired_kv("/run").key)] == [False, True]


def test_the_longest_record_is_not_too_long_for_etcd() -> None:
    longest = replace(TIMER, scope="\U0001f600" * LONGEST_SCOPE)
    assert len(encode(HeldTimers(WORKER, (longest,) * MOST_TIMERS))) < MOST_BYTES


@pytest.mark.parametrize(
    "change",
    [
        {"worker": None},
        {"worker": {"pid": 1}},
        {"timers": None},
        {"timers": [5]},
        {"timers": [{"scope": "a"}]},
        {"more": 1},
        {"v": 1},
    ],
)
def test_what_is_no_record(change: dict[str, Any]) -> None:
    raw = json.loads(VALUE)
    with pytest.raises(StateError, match="/run/timers/h1"):
        parse_timers(KEY, json.dumps({**raw, **change}).encode())


@pytest.mark.parametrize("change", [{"scope": 5}, {"until_ms": -1}, {"until_ms": 1.5}, {"until_ms": math.nan}])
def test_what_is_no_timer(change: dict[str, Any]) -> None:
    raw = json.loads(VALUE)
    raw["timers"][0].update(change)
    with pytest.raises(StateError, match="/run/timers/h1"):
        parse_timers(KEY, json.dumps(raw).encode())


def test_on_its_own_host_a_timer_is_told_by_the_monotonic_clock() -> None:
    info = inform(WORKER, replace(TIMER, until_ms=5_009_000), "h1", now=5006.0, wall=0.0)
    assert (info.host, info.pid, info.rank, info.scope) == ("node7", 7, 3, "step")
    assert (info.age, info.left) == (2.0, 3.0)


def test_elsewhere_it_is_told_by_the_wall_clocks() -> None:
    info = inform(replace(WORKER, rank=-1), TIMER, "h2", now=0.0, wall=1001.0)
    assert (info.age, info.left, info.rank) == (2.0, 3.0, None)
