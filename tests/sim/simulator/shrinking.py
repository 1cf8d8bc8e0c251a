"""Fewer faults with which a history fails in the same way: for whoever has to read it."""

from __future__ import annotations

from simulator.history import Report, play


def shrink(report: Report) -> Report:
    """The smallest failure that is found by leaving faults out: halves first, then each alone, until none can go.

    Another order of threads may come with each, so what is left may fail at another place, by the same oracle.
    """
    size = max(len(report.plan.faults) // 2, 1)
    while size:
        at, was_smaller = 0, False
        while at < len(report.plan.faults):
            fewer = play(report.plan.without(*report.plan.faults[at : at + size]))
            if fewer.oracle == report.oracle:
                report, was_smaller = fewer, True
            else:
                at += size
        size = size if was_smaller and size == 1 else size // 2
    return report
