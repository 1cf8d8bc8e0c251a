"""The simulator's command: `python -m simulator run|show|shrink`, with tests/sim and tests on the path."""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator

from simulator.history import Report, play
from simulator.plan import PROFILES, Plan, PlannedFault, plan_of
from simulator.reached import unreached
from simulator.shrinking import shrink

OBJECTS = 200_000
"""That are left between two runs of the garbage collector: some 40 MB."""
SHOWN = 60
"""Lines of a failed history that are shown."""
FEW = 8
"""Seeds that are tried of each planted fault before any other is."""


def main(arguments: list[str] | None = None) -> int:
    """What the command ends with: 0, or 1 where a history fails."""
    options = _parser().parse_args(arguments)
    # What is imported by now lives for ever, and torch alone is half a million objects to look at.
    gc.collect()
    gc.freeze()
    # A history leaves some 10,000 objects, of which its trace refers to most: to look at those costs as much as to free
    # the others. So nobody looks until there are those of many histories.
    gc.set_threshold(OBJECTS)
    work: int = options.work(options)
    return work


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="simulator", description=__doc__)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="play many seeds, and tell which fail")
    run.add_argument("--seeds", type=int, default=1000, help="how many")
    run.add_argument("--first", type=int, default=0, help="the first one")
    run.add_argument("--processes", type=int, default=2)
    run.add_argument("--profile", choices=PROFILES)
    run.set_defaults(work=_run)
    for name, work, text in (
        ("show", _show, "play one seed, and show all that happens in it"),
        ("plan", _show_plan, "tell what a seed brings, as tests/sim/a test may keep it"),
        ("shrink", _shrink, "find fewer faults with which a seed fails in the same way"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("seed", type=int)
        command.add_argument("--profile", choices=PROFILES)
        command.add_argument("--faults", help="those that `shrink` has left")
        command.set_defaults(work=work)
    return parser


def _plan(options: argparse.Namespace) -> Plan:
    plan = plan_of(options.seed, options.profile)
    if options.faults is None:
        return plan
    left = {PlannedFault.parse(text) for text in options.faults.split(",") if text}
    return plan.without(*[one for one in plan.faults if one not in left])


def _play(task: tuple[int, str | None]) -> Report:
    seed, profile = task
    report = play(plan_of(seed, profile))
    if not report.failed:
        report.forget()
    return report


def _reports(options: argparse.Namespace) -> Iterator[Report]:
    tasks = [(seed, options.profile) for seed in range(options.first, options.first + options.seeds)]
    if options.processes == 1:
        yield from map(_play, tasks)
        return
    with multiprocessing.get_context("fork").Pool(options.processes) as pool:
        yield from pool.imap_unordered(_play, tasks, chunksize=16)


def _run(options: argparse.Namespace) -> int:
    began, failed = time.monotonic(), []
    steps, hours, faults, counts = 0, 0.0, Counter[str](), Counter[str]()
    for report in _reports(options):
        steps, hours = steps + report.steps, hours + report.seconds / 3600
        faults.update(report.faults)
        counts.update(report.counts)
        if report.failed:
            failed.append(report)
            print(f"{line_of(report)}\n    {report.problem.splitlines()[0][:300]}", flush=True)
    if failed:
        first = min(failed, key=lambda one: one.plan.seed)
        print(f"\n{first.trace.text(SHOWN)}{first.problem}\n{line_of(first)}")
    took = time.monotonic() - began
    print(
        f"{options.seeds} seeds, {len(failed)} failed; {steps:,} steps, {hours:.1f} virtual hours, "
        f"{counts['changes']:,} changes of etcd, {counts['decisions']:,} decisions in {took:.0f} s "
        f"({1000 * took / options.seeds:.0f} ms a seed, {counts['answers'] / took:,.0f} rounds, quorums and votes "
        "that a member was told of a second)"
    )
    print(f"{faults.total():,} faults: {', '.join(f'{count:,} {kind}' for kind, count in faults.most_common())}")
    if few := unreached(counts, options.seeds):
        print(f"hardly reached: {', '.join(few)}")
    return bool(failed)


def line_of(report: Report) -> str:
    """What a shell plays the same history by, where the repository lies."""
    python = os.path.relpath(sys.executable)
    return f"PYTHONPATH=tests/sim:tests {python} -m simulator show {report.plan.seed} --profile '{report.plan.profile}'"


def _show(options: argparse.Namespace) -> int:
    report = play(_plan(options))
    print(report.trace.text(), report.place or report.problem or "nothing is wrong with it", sep="")
    return report.failed


def _show_plan(options: argparse.Namespace) -> int:
    print(json.dumps(_plan(options).dumped()))
    return 0


def _shrink(options: argparse.Namespace) -> int:
    plan = _plan(options)
    report = play(plan)
    if not report.failed:
        print(f"seed {plan.seed} does not fail")
        return 0
    least = shrink(report)
    faults = ",".join(map(str, least.plan.faults))
    print(f"{least.trace.text(SHOWN)}{least.problem}")
    print(f"{len(least.plan.faults)} faults of {len(plan.faults)} are left")
    print(f"{line_of(least)} --faults '{faults}'")
    return 1


if __name__ == "__main__":
    sys.exit(main())
