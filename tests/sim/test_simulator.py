"""Whole jobs under what a seed does to them; `make sim SEEDS=10000` plays more of them."""

from __future__ import annotations

import hashlib
import json
import math
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
from simulator.quorum_rules import KeptOut, Last, Member
from simulator.shrinking import shrink
from simulator.stubs import CONFIG, SentinelStub
from simulator.timer_rules import LATE_RELEASE, TimersHeld
from simulator.vote_rules import RankCalls
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


@pytest.mark.parametrize(
    ("votes", "problem"),
    [
        ([(0, True, 1, 9, True), (1, True, 2, 8, True)], ""),
        ([(0, True, 1, 9, False), (1, False, 2, 8, False)], ""),
        ([(0, True, 1, 9, True), (1, True, 2, math.inf, None)], ""),  # that one is about to hear
        ([(0, True, 1, 9, True)], "ranks [1] have not said yes"),
        ([(0, True, 1, 9, True), (0, True, 2, 8, True)], "ranks [1] have not said yes"),
        ([(0, True, 4, 9, True), (1, True, 2, 3, True)], "ranks [1] have not said yes"),
        ([(0, True, 1, 9, True), (1, True, 2, 8, None)], "ranks [1] have not said yes"),  # its time was over
        ([(0, True, 1, 9, True), (1, False, 2, 8, True)], "with one that said no"),
        ([(0, True, 1, 9, False), (1, True, 2, 8, False)], "all say yes"),
        ([(0, True, 1, 9, False), (1, False, 2, 8, None)], "all say yes"),  # its time was over
    ],
)
def test_a_vote_is_judged_by_the_calls_that_wait_together(
    votes: list[tuple[int, bool, int, float, bool | None]], problem: str
) -> None:
    calls = RankCalls(2)
    for rank, yes, began, ended, told in votes:
        vote = calls.begin(rank, yes, began)
        vote.ended, vote.told = ended, told
    found = calls.problem_of_vote(calls.votes[0])
    assert problem in found
    assert bool(problem) == bool(found)


def test_a_worker_is_killed_only_for_what_was_late() -> None:
    held = TimersHeld()
    assert not held.may_be_killed("w", 1.0)
    held.acquires("w", "step", 5.0, 10.0)
    assert not held.may_be_killed("w", 14.9)
    assert held.may_be_killed("w", 15.0)
    held.acquires("w", "step", 5.0, 12.0)  # in the place of that one
    assert not held.may_be_killed("w", 16.9)
    held.releases("w", "step", 16.9)
    assert not held.may_be_killed("w", 17.0)
    held.acquires("w", "step", 1.0, 20.0)
    held.releases("w", "step", 21.0)  # late
    assert held.may_be_killed("w", 22.0)
    assert not held.may_be_killed("w", 22.0 + LATE_RELEASE)


def test_the_time_for_which_shrink_only_keeps_replicas_out_is_counted() -> None:
    def member(name: str, asked: int, *, shrinks: bool = False) -> Member:
        return Member(name, name, asked, shrinks, 0.0, 1, 2, 2)

    def quorum(**answered: int) -> Last:
        return Last(frozenset(answered), answered, 0.0)

    a, b, c = member("a", 2), member("b", 1), member("c", 1, shrinks=True)
    kept = KeptOut()
    kept.see([a, c], Last(frozenset(), {}, 0.0), 1.0)  # no quorum yet: all may be in
    kept.see([a, b], quorum(a=1), 2.0)
    assert kept.seconds(3.0) == 0.0
    kept.see([a, b, c], quorum(a=1), 3.0)  # one that is itself kept out
    assert kept.seconds(4.5) == 1.5
    kept.see([member("a", 2, shrinks=True), c], quorum(a=2), 5.0)  # what was answered keeps nobody out, but c does
    kept.see([a, member("c", 1)], quorum(a=1), 7.0)
    assert kept.seconds(9.0) == 4.0
    kept.see([member("a", 2, shrinks=True), b], quorum(a=1), 10.0)
    kept.see([member("a", 2, shrinks=True), b], quorum(a=2), 10.5)
    assert kept.seconds(20.0) == 4.5


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
