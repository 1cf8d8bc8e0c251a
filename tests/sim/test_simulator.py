"""Whole jobs under what a seed does to them; `make sim SEEDS=10000` plays more of them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from simulator.history import play
from simulator.mutants import MUTANTS, Mutant, caught_by, planted
from simulator.plan import PROFILES, Plan, PlannedFault, plan_of
from simulator.shrinking import shrink
from simulator.stubs import CONFIG, SentinelStub
from virtual import MemoryClient, Scheduler

from ftcoord.core import quorum
from ftcoord.primitives import sentinel
from ftcoord.primitives.sentinel import Order

SEEDS = int(os.environ.get("FTCOORD_SIM_SEEDS", "3"))
"""Of each profile."""
HERE = Path(__file__).parent
PRINT_TRACES = """
import sys, hashlib
from simulator.history import play
from simulator.plan import plan_of
for seed in map(int, sys.argv[1:]):
    print(seed, hashlib.sha256(play(plan_of(seed)).trace.text().encode()).hexdigest())
"""


@pytest.mark.parametrize("profile", PROFILES)
def test_whole_jobs_under_faults(profile: str) -> None:
    for seed in range(SEEDS):
        report = play(plan_of(seed, profile))
        assert not report.failed, f"seed {seed} of {profile!r}: {report.problem}\n{report.trace.text(60)}"


def test_a_seed_has_one_trace_in_every_interpreter() -> None:
    """Whatever the hashes of texts are, and whatever was played before."""
    seeds = [1, 2, 3, 15]  # of four profiles, timers and votes among them

    def traces(hash_seed: str, order: list[int]) -> list[str]:
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
        command = [sys.executable, "-c", PRINT_TRACES, *map(str, order)]
        return sorted(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.splitlines())

    here = sorted(f"{seed} {hashlib.sha256(play(plan_of(seed)).trace.text().encode()).hexdigest()}" for seed in seeds)
    assert traces("1", seeds[::-1]) == here


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name)
def test_a_planted_fault_is_detected(mutant: Mutant) -> None:
    assert caught_by(mutant) is not None


def test_an_error_that_no_oracle_raises_is_not_taken_for_a_find() -> None:
    broken = Mutant("raises", "ftcoord.store", "stored(wanted)) if", "nothing(wanted)) if", ("stores",))
    with planted(broken):
        report = play(plan_of(0, "stores"))
    assert report.failed
    assert not broken.is_seen_in(report)
    assert replace(broken, raises=(report.oracle,)).is_seen_in(report)


def test_what_changes_nothing_is_not_planted() -> None:
    first = str(quorum.__doc__).splitlines()[0]
    text = Mutant("a text", quorum.__name__, first, f"{first} Or two.", ("quorums",))
    with pytest.raises(ValueError, match="no function"), planted(text):
        pass


def test_a_simulated_sentinel_is_told_what_a_real_one_is() -> None:
    """Also of a renewal whose answer came late: its lease's time began when that was sent."""

    def tell(sentinel: Any) -> None:
        sentinel.keep(CONFIG, 1, 10.0, "/deaths", ("2", "3"), -4.0)
        sentinel.keep(CONFIG, 4, 5.0, "/deaths")
        sentinel.rest(1)
        sentinel.keep(CONFIG, 1, 10.0, "/deaths", sent_at=-1.0)
        sentinel.rest(5)
        sentinel.drop(4)
        sentinel.drop(4)

    def orders_of(sentinel: Any, told: Callable[[], Iterable[Order]]) -> list[Order]:
        world = Scheduler()
        world.run(lambda: tell(sentinel()))
        return [{**order, "at": round(order.get("at", 0.0), 2)} for order in told() if "config" not in order]

    lines: list[bytes] = []

    def real() -> sentinel.Sentinel:
        one = sentinel.Sentinel()
        one._process = cast(Any, SimpleNamespace(tell=lines.append))
        return one

    stub = SentinelStub("a process", cast(MemoryClient, None), lambda _run: None)
    said_to_real = orders_of(real, lambda: map(json.loads, b"".join(lines).splitlines()))
    said_to_stub = orders_of(lambda: stub, lambda: json.loads(json.dumps([*stub._orders])))
    assert said_to_stub == said_to_real


def test_a_plan_is_kept_as_text() -> None:
    plan = plan_of(7, "whole jobs")
    assert Plan.loaded(json.loads(json.dumps(plan.dumped()))) == plan


def test_a_failure_is_shrunk_to_what_it_needs() -> None:
    with planted(next(one for one in MUTANTS if one.name == "a recall is not noticed")):
        reports = (play(plan_of(seed, "rounds")) for seed in range(300))
        report = next(one for one in reports if one.failed and len(one.plan.faults) > 5)
        least = shrink(report)
    assert least.oracle == report.oracle
    assert len(least.plan.faults) < len(report.plan.faults) / 2
    assert [PlannedFault.parse(str(one)) for one in least.plan.faults] == [*least.plan.faults]
