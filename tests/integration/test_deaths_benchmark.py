"""What the benchmark of deaths says of its trials."""

from __future__ import annotations

import math
from pathlib import Path

from benchmarks.failover import CASES, Recovery
from benchmarks.nodes import BACKENDS
from benchmarks.report import HEAD, Evictions, Recoveries, evictions, failover, publish, publish_rows

OURS, C10D, _ = BACKENDS
KILLED = CASES[0]
NEVER = math.inf


def cells(section: str, backend: str) -> list[str]:
    """The first row of a backend in the section's table."""
    row = next(line for line in section.splitlines() if f"| {backend} |" in line)
    return [cell.strip() for cell in row.split("|")[3:-1]]


def test_median_and_worst_are_held_against_their_targets() -> None:
    quick, slow = Recovery(0.1, 1.5, 3.0, died=False), Recovery(0.9, 1.5, 12.0, died=False)
    good = failover([Recoveries(OURS, KILLED, [quick, quick, slow])])
    *times, targets = cells(good, OURS)
    assert times == ["0.10 / 0.90", "1.5 / 1.5", "3.0 / 12.0", "3.0; 3.0; 12.0"]
    assert targets == "recalled 0.3 s, worst 1 s: met; all running 4 s: met"
    bad = failover([Recoveries(OURS, KILLED, [quick, slow, slow])])
    assert cells(bad, OURS)[-1] == "recalled 0.3 s, worst 1 s: not met; all running 4 s: not met"


def test_what_never_comes_and_what_cannot_be_seen_is_told() -> None:
    late = Recovery(math.nan, 40.0, KILLED.limit + 1, died=False)
    dead = Recovery(math.nan, NEVER, NEVER, died=True)
    section = failover([Recoveries(C10D, KILLED, [late, dead])])
    fates = "not in 150 s; never: all agents ended"
    assert cells(section, C10D) == ["-", "never / never", "never / never", fates, "-"]


def test_trials_before_one_that_fails_are_kept() -> None:
    quick = Recovery(0.1, 1.5, 3.0, died=False)
    section = failover([Recoveries(OURS, KILLED, [quick, quick], "then no first round")])
    assert cells(section, OURS)[3] == "3.0; 3.0; then no first round"
    assert cells(failover([Recoveries(OURS, KILLED, [], "then no first round")]), OURS)[0] == "-"


def test_each_restart_of_ours_without_a_death_is_one_too_many() -> None:
    theirs = Evictions(C10D, "load", [5])
    assert cells(evictions([Evictions(OURS, "load", [0, 0]), theirs]), OURS) == ["2", "0", "0", "0: met"]
    section = evictions([Evictions(OURS, "load", [0, 2, 1]), theirs])
    assert cells(section, OURS) == ["3", "2", "3", "0: not met"]
    assert cells(section, C10D) == ["1", "1", "5", "-"]


def test_one_case_replaces_its_rows_and_leaves_the_others(tmp_path: Path) -> None:
    report = tmp_path / "benchmarks.md"
    quick, slow = Recovery(0.1, 1.5, 3.0, died=False), Recovery(0.9, 1.5, 12.0, died=False)
    publish(HEAD, report)
    publish_rows(failover([Recoveries(OURS, case, [slow]) for case in CASES]), report, 2)
    publish("## Another\n\nstays\n", report)
    publish_rows(failover([Recoveries(OURS, CASES[1], [quick])]), report, 2)
    publish(HEAD, report)
    told = report.read_text()
    assert (
        told
        == HEAD
        + "\n"
        + failover([Recoveries(OURS, case, [quick if case is CASES[1] else slow]) for case in CASES])
        + "\n## Another\n\nstays\n"
    )


def test_a_table_with_other_columns_is_replaced(tmp_path: Path) -> None:
    report = tmp_path / "benchmarks.md"
    section = evictions([Evictions(OURS, "load", [0])])
    report.write_text(f"{section.partition(chr(10))[0]}\n\n| what | backend |\n| --- | --- |\n| a | b |\n")
    publish_rows(section, report, 2)
    assert report.read_text() == section


def test_the_head_of_the_report_is_written_by_commands() -> None:
    root = Path(__file__).parents[2]
    assert (root / "docs/benchmarks.md").read_text().startswith(HEAD + "\n## ")
