"""What a death costs a job of torchrun's, and whether somebody who lives is taken for dead; etcd-v3 beside the others:

    python -m benchmarks.deaths --write docs/benchmarks.md

Real agents, each a process of its own. With the default numbers of trials about an hour.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.failover import C10D, CASES, Case, recover, spread
from benchmarks.nodes import OURS
from benchmarks.report import Evictions, Recoveries
from benchmarks.starving import STARVING, Starving, starve


@dataclass(frozen=True, slots=True)
class Trials:
    """How many of our own backend and of each of the others, and of our own for each way to starve."""

    ours: int
    rivals: int
    starving: int


def failover(trials: Trials, cases: Sequence[Case] = CASES) -> Iterator[str]:
    """Agents, hosts and workers that are lost, and an agent that is added: the section."""
    if trials.ours:
        rivals = {case: case.rivals if trials.rivals else () for case in cases}
        yield report.failover([_recoveries(trials, case, one) for case in cases for one in (OURS, *rivals[case])])


def starving(trials: Trials, cases: Sequence[Starving] = STARVING) -> Iterator[str]:
    """Agents that starve: the section."""
    if trials.starving:
        backends = (OURS, C10D) if trials.rivals else (OURS,)
        yield report.evictions([_evictions(trials, case, one) for case in cases for one in backends])


def _recoveries(trials: Trials, case: Case, backend: str) -> Recoveries:
    found = []
    for phase in spread(trials.ours if backend == OURS else trials.rivals):
        one = recover(backend, case, phase)
        seconds = f"{one.recalled:.2f} s, {one.first_start:.1f} s, {one.all_running:.1f} s"
        say(f"{backend}, {case.title}: {seconds} {one.why}")
        found.append(one)
    return Recoveries(backend, case, found)


def _evictions(trials: Trials, case: Starving, backend: str) -> Evictions:
    found = []
    for phase in spread(trials.starving if backend == OURS else trials.rivals):
        one = starve(backend, case, phase)
        say(f"{backend}, {case.title}: {one.restarts} restarts {'; '.join(one.why)}")
        found.append(one.restarts)
    return Evictions(backend, case.title, found)


def say(text: str) -> None:
    """What a trial found, while the next ones run."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deaths", description="Measure deaths, and their cost.")
    parser.add_argument("--trials", type=int, default=10, help="trials of etcd-v3; 0 leaves this section out")
    parser.add_argument("--rival-trials", type=int, default=2, help="trials of c10d: up to 150 s each")
    parser.add_argument("--starving", type=int, default=10, help="trials of agents that starve; 0 leaves them out")
    parser.add_argument("--cases", nargs="+", type=int, metavar="N", help="only these ways to die, counted from 1")
    parser.add_argument("--write", type=Path, metavar="FILE", help="report whose sections to replace; default: print")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no agent outlives this
    logging.disable(logging.WARNING)
    trials = Trials(options.trials, options.rival_trials, options.starving)
    cases = [CASES[number - 1] for number in options.cases] if options.cases else CASES
    for section in failover(trials, cases):
        report.publish(section, options.write)
    for section in starving(trials):
        report.publish(section, options.write)


if __name__ == "__main__":
    main()
