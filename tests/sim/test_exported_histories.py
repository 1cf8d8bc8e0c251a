"""What clients are told in whole jobs, before a judge that knows nothing of etcd (tests/judge)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from judge.__main__ import main as judge
from judge.history import read
from judge.linearizability import findings
from simulator.__main__ import main as simulate
from simulator.exporting import history_of
from simulator.history import Report, play
from simulator.mutants import MUTANTS, planted
from simulator.plan import Network, Plan, PlannedFault, plan_of
from virtual.keyspace import Transaction

SEEDS = {"stores": 25, "rounds": 22, "whole jobs": 3}
"""How many of each profile."""


@pytest.mark.parametrize("profile", SEEDS)
def test_one_order_explains_what_clients_are_told(profile: str) -> None:
    answered = 0
    for seed in range(SEEDS[profile]):
        history = history_of(play(plan_of(seed, profile)))
        answered += sum(one.is_answered for one in history)
        found = [*findings(history)]
        assert not found, f"seed {seed} of {profile!r}: {found[0]}"
    assert answered > SEEDS[profile]


def test_a_planted_fault_is_detected() -> None:
    with planted(next(one for one in MUTANTS if one.name == "a store's change does not count")):
        assert any([*findings(history_of(play(plan_of(seed, "stores"))))] for seed in range(3, 20))


LOSING: Final = Network(lost_answers=0.25)
"""Of four requests that etcd has carried out one is not answered."""


def losing(seed: int) -> Plan:
    """A history in which nothing else happens than that answers are lost."""
    return Plan(seed, "stores", {"store": 3}, (), LOSING, 4.0, options={"join_timeout": 1.0, "min_replicas": 1.0})


def sent_again(report: Report) -> int:
    """How many changes were sent once more after an answer was lost."""
    last: dict[str, tuple[str, object]] = {}
    count = 0
    for _, who, mark, what in report.trace.noted:
        before = last.get(who)
        count += isinstance(what, Transaction) and bool(what.puts) and before == ("!", what)
        last[who] = mark, what
    return count


@pytest.mark.parametrize("seed", range(3))
def test_one_order_explains_changes_that_were_sent_again(seed: int) -> None:
    report = play(losing(seed))
    assert not report.failed, report.problem
    assert sent_again(report) >= 3
    assert not [*findings(history_of(report))]


def test_the_judge_sees_changes_that_are_made_again() -> None:
    """Whose answers were lost: it knows only what clients asked and were told."""
    with planted(next(one for one in MUTANTS if one.name == "a change whose answer was lost is made again")):
        assert any([*findings(history_of(play(losing(seed))))] for seed in range(3))


def test_the_simulators_command_exports_what_the_judges_command_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "histories"
    seeds = ["--first", "2", "--seeds", "2", "--profile", "stores"]
    assert simulate(["run", *seeds, "--processes", "1", "--export", str(directory)]) == 0
    files = sorted(directory.iterdir())
    assert [path.name for path in files] == ["stores-2.jsonl", "stores-3.jsonl"]
    assert judge([*map(str, files)]) == 0
    assert capsys.readouterr().out.count("operations, linearizable") == 2
    assert {one.object for one in read(files[0].read_text().splitlines())} >= {"store"}


def test_of_an_etcd_that_lost_writes_no_history_is_exported() -> None:
    report = play(plan_of(0, "stores"))
    assert history_of(report)
    faults = (*report.plan.faults, PlannedFault(1.0, "restore", 0))
    assert not history_of(replace(report, plan=replace(report.plan, faults=faults)))
