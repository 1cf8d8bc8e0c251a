"""Expiration timers in etcd beside torch's local and file timers, and beside one raw etcd transaction, in one run:

    python -m benchmarks.timers --write docs/benchmarks.md

About two minutes.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from statistics import median

from benchmarks.expiring import AFTER, INTERVAL, KINDS, measure_cost, measure_lateness
from benchmarks.report import publish, table
from benchmarks.store import measure_raw


def run(repeat: int, trials: int) -> str:
    """Measure, and tell it in Markdown."""
    raw = median([measure_raw(repeat) for _ in range(3)])
    costs = {kind: measure_cost(kind, repeat) for kind in KINDS}
    late = {kind: measure_lateness(kind, trials) for kind in KINDS}
    rows = [
        [
            kind,
            *(f"{1000 * seconds:.3f}" for seconds in (*costs[kind], sum(costs[kind]))),
            f"{sum(costs[kind]) / raw:.2f}",
            f"{1000 * median(late[kind]):.0f}",
            f"{1000 * max(late[kind]):.0f}",
        ]
        for kind in KINDS
    ]
    header = [
        "client",
        "acquire, ms",
        "release, ms",
        "both, ms",
        "both / raw",
        "median lateness, ms",
        "worst lateness, ms",
    ]
    return f"""## Expiration timers

`python -m benchmarks.timers`: one worker process on the server's host, medians of {repeat} calls. Lateness is from the
expiry of a timer of {AFTER:g} s to the worker's end, for {trials} workers; torch's servers check every {INTERVAL:g} s.
"Raw" is an etcd transaction that puts one key: {1000 * raw:.3f} ms. ftcoord's timer is in etcd when `acquire` returns;
torch's clients use a queue or a pipe.

{table(header, rows)}"""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timers", description="Measure expiration timers.")
    parser.add_argument("--repeat", type=int, default=300, help="repetitions of acquire and release")
    parser.add_argument("--trials", type=int, default=100, help="workers that are reaped, of each kind")
    parser.add_argument("--write", type=Path, metavar="FILE", help="report whose section to replace; default: print it")
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    publish(run(options.repeat, options.trials), options.write)


if __name__ == "__main__":
    main()
