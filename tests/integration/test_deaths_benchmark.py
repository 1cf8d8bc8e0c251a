"""What the benchmark of deaths says of its trials."""

from __future__ import annotations

import math

from benchmarks.failover import CASES, Recovery
from benchmarks.nodes import BACKENDS
from benchmarks.report import Evictions, Recoveries, evictions, failover

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
    assert cells(good, OURS) == ["0.10 / 0.90", "1.5 / 1.5", "3.0 / 12.0", "3.0; 3.0; 12.0"]
    assert "recalled 0.10 / 0.90 s (target 0.3 s, worst 1 s: met)" in good
    bad = failover([Recoveries(OURS, KILLED, [quick, slow, slow])])
    assert "recalled 0.90 / 0.90 s (target 0.3 s, worst 1 s: not met)" in bad
    assert "all running 12.0 / 12.0 s (target 4 s: not met)" in bad


def test_what_never_comes_and_what_cannot_be_seen_is_told() -> None:
    late = Recovery(math.nan, 40.0, KILLED.limit + 1, died=False)
    dead = Recovery(math.nan, NEVER, NEVER, died=True)
    section = failover([Recoveries(C10D, KILLED, [late, dead])])
    assert cells(section, C10D) == ["-", "never / never", "never / never", "not in 150 s; never: all agents ended"]
    assert "target" not in section


def test_each_restart_of_ours_without_a_death_is_one_too_many() -> None:
    theirs = Evictions(C10D, "load", [5])
    assert "Restarts with etcd-v3: 0 (target 0: met)" in evictions([Evictions(OURS, "load", [0, 0]), theirs])
    section = evictions([Evictions(OURS, "load", [0, 2, 1]), theirs])
    assert cells(section, OURS) == ["3", "2", "3"]
    assert "Restarts with etcd-v3: 3 (target 0: not met)" in section
