"""Histories as a judge reads them who knows nothing of etcd: what clients asked and were told, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from heard import heard
from judge.history import Operation, written

from simulator.history import Report

LOSE_WRITES: Final = frozenset({"restore", "wipe"})
"""Faults by which etcd itself loses what it has acknowledged: no order explains what clients are told then."""


def export(report: Report, directory: Path) -> Path | None:
    """Write what was heard in one history; where to. None if there is nothing to judge."""
    operations = history_of(report)
    if not operations:
        return None
    path = directory / f"{report.plan.profile.replace(' ', '-')}-{report.plan.seed}.jsonl"
    path.write_text(written(operations), encoding="utf-8")
    return path


def history_of(report: Report) -> list[Operation]:
    """What was heard in one history: nothing, where etcd lost writes."""
    if not LOSE_WRITES.isdisjoint(one.kind for one in report.plan.faults):
        return []
    return [*heard("store", report.operations), *heard("rounds", report.joins)]
