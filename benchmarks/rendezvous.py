"""The rendezvous of ftcoord beside torch's `c10d` and `etcd-v2`, in one run:

    python -m benchmarks.rendezvous --write docs/benchmarks.md

Needs `pip install python-etcd urllib3` for `etcd-v2`, and an etcd 3.4 or 3.5 (3.6 has no v2 API). An hour and a
half.
"""

from __future__ import annotations

import argparse
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks import deaths, report
from benchmarks.imports import measure_import
from benchmarks.metrics import Load
from benchmarks.nodes import BACKENDS, Nodes, endpoint_for
from benchmarks.report import Idle, Trial

PARTS: Final = ("rounds", "idle", "import", "failover", "starving")
OURS, *_ = BACKENDS
SETTLE: Final = 1.0
"""Seconds between a round and the next measurement."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, how often. `idle` in seconds."""

    parts: Sequence[str]
    sizes: Sequence[int]
    repeat: int
    idle: float
    trials: deaths.Trials


def measure_rounds(plan: Plan) -> list[Trial]:
    """All backends side by side: every repetition has each of them at each size, in changing order."""
    trials = []
    for repetition in range(plan.repeat):
        for count in plan.sizes:
            for place in range(len(BACKENDS)):
                trial = measure_round(BACKENDS[(repetition + place) % len(BACKENDS)], count)
                deaths.say(f"{trial.backend} N={count}: {trial.first.seconds:.3f} s, {trial.again.seconds:.3f} s")
                trials.append(trial)
    return trials


def measure_round(backend: str, count: int) -> Trial:
    """A first round and a second one of `count` new nodes."""
    with endpoint_for(backend) as endpoint:
        before = _load(backend, endpoint)
        with Nodes(backend, endpoint, count) as nodes:
            first, between = nodes.join(), _load(backend, endpoint)
            threading.Event().wait(SETTLE)
            again, after = nodes.join(), _load(backend, endpoint)
    if before is None or between is None or after is None:
        return Trial(backend, count, first, again, None, None)
    return Trial(backend, count, first, again, between.since(before), after.since(between))


def _load(backend: str, endpoint: str) -> Load | None:
    return None if backend == "c10d" else Load.read(endpoint)


def measure_idle(count: int, seconds: float) -> Idle:
    """What our nodes cost etcd while nothing happens."""
    with endpoint_for(OURS) as endpoint, Nodes(OURS, endpoint, count) as nodes:
        nodes.join()
        threading.Event().wait(SETTLE)
        before = Load.read(endpoint)
        nodes.idle(seconds)
        return Idle(count, seconds, Load.read(endpoint).since(before))


def run(plan: Plan, target: Path | None) -> None:
    """Measure, and publish each section as soon as it is there."""
    report.publish(report.HEAD, target)
    if "rounds" in plan.parts:
        for section in report.rounds(measure_rounds(plan)):
            report.publish(section, target)
    if "idle" in plan.parts:
        report.publish(report.idle(measure_idle(8, plan.idle)), target)
    if "import" in plan.parts:
        report.publish(report.imports([measure_import() for _ in range(plan.repeat)]), target)
    if "failover" in plan.parts:
        deaths.failover(plan.trials, target=target)
    if "starving" in plan.parts:
        deaths.starving(plan.trials, target=target)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rendezvous", description="Measure rendezvous backends.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--sizes", nargs="+", type=int, default=(2, 8, 32, 64), help="numbers of nodes")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions of the rounds and imports")
    parser.add_argument("--idle", type=float, default=70, help="seconds to watch idle nodes")
    parser.add_argument("--failover-repeat", type=int, default=10, help="trials of etcd-v3 with real agents")
    parser.add_argument("--rival-repeat", type=int, default=2, help="trials of c10d: up to 150 s each")
    parser.add_argument("--starving-repeat", type=int, default=10, help="trials of agents that starve")
    parser.add_argument("--write", type=Path, metavar="FILE", help="report whose sections to replace; default: print")
    options = vars(parser.parse_args())
    target: Path | None = options.pop("write")
    logging.disable(logging.WARNING)
    trials = deaths.Trials(*(options.pop(f"{name}_repeat") for name in ("failover", "rival", "starving")))
    run(Plan(**options, trials=trials), target)


if __name__ == "__main__":
    main()
