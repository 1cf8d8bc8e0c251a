"""Histories as a judge reads them who knows nothing of etcd: what clients asked and were told, and when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from judge.history import Operation, written

from ftcoord.core import store_history
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
    return [*_said("store", report.operations), *_said("rounds", report.joins)]


def _said(kind: str, operations: Sequence[store_history.Operation]) -> list[Operation]:
    return [
        Operation(
            one.client,
            kind,
            one.key,
            one.kind,
            tuple(given.decode("latin-1") for given in one.given),
            _told(one),
            one.began,
            one.ended if one.ended < math.inf else None,
        )
        for one in operations
    ]


def _told(one: store_history.Operation) -> Any:
    if one.told is None:
        return None
    told = one.told.decode("latin-1")
    if one.kind != "join":
        return told
    number, _, members = told.partition(" ")
    return int(number), members
