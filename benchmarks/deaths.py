"""What a death costs a job of torchrun's, and whether somebody who lives is taken for dead; etcd-v3 beside the others:

    python -m benchmarks.deaths --write docs/benchmarks.md

Real agents, each a process of its own. With the default numbers of trials about an hour. Each trial is in the report
as soon as it is over. etcd-v2 is measured where `pip install python-etcd urllib3` was run.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.failover import C10D, CASES, ETCD_V2, Case, Recovery, recover, spread
from benchmarks.nodes import OURS
from benchmarks.processes import BenchmarkError
from benchmarks.report import Evictions, Recoveries
from benchmarks.starving import STARVING, Starving, starve


@dataclass(frozen=True, slots=True)
class Trials:
    """How many of our own backend and of each of the others, and of our own for each way to starve."""

    ours: int
    rivals: int
    starving: int


def failover(trials: Trials, cases: Sequence[Case] = CASES, target: Path | None = None) -> None:
    """Agents, hosts and workers that are lost, and an agent that is added: publish the section."""
    measured: dict[tuple[str, str], Recoveries] = {}
    for case in cases if trials.ours else ():
        for backend in (OURS, *(_at_hand(case.rivals) if trials.rivals else ())):
            for one in _recoveries(trials, case, backend):
                measured[case.title, backend] = one
                _keep(report.failover(list(measured.values())), target)
    if measured and target is None:
        print(report.failover(list(measured.values())))


def starving(trials: Trials, cases: Sequence[Starving] = STARVING, target: Path | None = None) -> None:
    """Agents that starve: publish the section."""
    measured: dict[tuple[str, str], Evictions] = {}
    for case in cases if trials.starving else ():
        for backend in (OURS, C10D) if trials.rivals else (OURS,):
            for one in _evictions(trials, case, backend):
                measured[case.title, backend] = one
                _keep(report.evictions(list(measured.values())), target)
    if measured and target is None:
        print(report.evictions(list(measured.values())))


def _at_hand(rivals: Sequence[str]) -> Sequence[str]:
    """Those that can be measured here."""
    if ETCD_V2 not in rivals or importlib.util.find_spec("etcd") is not None:
        return rivals
    say(f"{ETCD_V2} is left out: it needs `pip install python-etcd urllib3`")
    return [one for one in rivals if one != ETCD_V2]


def _keep(section: str, target: Path | None) -> None:
    """After each trial, so that it is there whatever becomes of the next one. Rows of what is not measured now stay."""
    if target is not None:
        report.publish_rows(section, target, 2)


def _recoveries(trials: Trials, case: Case, backend: str) -> Iterator[Recoveries]:
    """All of them, after each trial."""
    found: list[Recovery] = []
    for phase in spread(trials.ours if backend == OURS else trials.rivals):
        try:
            one = recover(backend, case, phase)
        except BenchmarkError as error:
            yield Recoveries(backend, case, found, _problem(backend, case.title, error))
            return
        seconds = f"{one.recalled:.2f} s, {one.first_start:.1f} s, {one.all_running:.1f} s"
        say(f"{backend}, {case.title}: {seconds} {one.why}")
        found.append(one)
        yield Recoveries(backend, case, found)


def _evictions(trials: Trials, case: Starving, backend: str) -> Iterator[Evictions]:
    """All of them, after each trial."""
    found: list[int] = []
    for phase in spread(trials.starving if backend == OURS else trials.rivals):
        try:
            one = starve(backend, case, phase)
        except BenchmarkError as error:
            yield Evictions(backend, case.title, found, _problem(backend, case.title, error))
            return
        say(f"{backend}, {case.title}: {one.restarts} restarts {'; '.join(one.why)}")
        found.append(one.restarts)
        yield Evictions(backend, case.title, found)


def _problem(backend: str, title: str, error: BenchmarkError) -> str:
    """What the table says of trials that ended early; all of it is printed."""
    say(f"{backend}, {title}: no more trials: {error}")
    return "then " + str(error).partition("\n")[0].replace("|", "/")


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
    failover(trials, cases, options.write)
    starving(trials, target=options.write)


if __name__ == "__main__":
    main()
