"""What a sentinel costs the process that it stands beside, and what it takes itself:

python -m benchmarks.sentinel --write docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.agents import Agent
from benchmarks.nodes import OURS, endpoint_for
from benchmarks.processes import BenchmarkError, Processes
from benchmarks.report import measured_with, publish, table, verdict
from ftcoord.primitives.sentinel import SWITCH, Sentinel
from ftcoord.rendezvous.settings import RendezvousSettings

BEGINS: Final = 3.0
"""Seconds after which the sentinel has started."""
TARGET_ROUND: Final = 5.0
"""Milliseconds that a first round may take longer with a sentinel."""
TARGET_MEMORY: Final = 40.0
"""MiB."""
_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Begun:
    """An agent that began: milliseconds until it had its first round, and of CPU in its first `BEGINS` seconds; its
    sentinel's pid, 0 for none."""

    round: float
    cpu: float
    sentinel: int


@dataclass(frozen=True, slots=True)
class Taken:
    """What a sentinel has taken: milliseconds of CPU, MiB of memory in all and to itself, and how often it woke."""

    cpu: float
    memory: float
    own: float
    wakes: int

    @classmethod
    def of(cls, pid: int) -> Taken:
        process = Path(f"/proc/{pid}")
        times = (process / "stat").read_text().rpartition(")")[2].split()
        status = _numbers(process / "status")
        return cls(
            1000 * (int(times[11]) + int(times[12])) / _TICKS,
            status["VmRSS"] / 1024,
            _numbers(process / "smaps_rollup")["Pss"] / 1024,
            status["voluntary_ctxt_switches"],
        )


def _numbers(file: Path) -> dict[str, int]:
    lines = (line.partition(":") for line in file.read_text().splitlines())
    return {name: int(value.split()[0]) for name, _, value in lines if value.strip().removesuffix(" kB").isdecimal()}


def run(trials: int, idle: float) -> str:
    """Measure, and tell it in Markdown. Raises BenchmarkError."""
    begun: dict[bool, list[Begun]] = {True: [], False: []}
    taken: list[Taken] = []
    wakes, ttl = 0, 0
    with endpoint_for(OURS) as endpoint:
        for trial in range(trials):
            for guarded in (True, False):
                settings = _settings(endpoint, f"run-{trial}-{guarded}")
                with Processes(1, _serve, settings, guarded) as process:
                    (one,) = process.ask("begin")
                    begun[guarded].append(one)
                    if guarded:
                        if not one.sentinel:
                            raise BenchmarkError(f"no sentinel was started within {BEGINS:g} s")
                        taken.append(Taken.of(one.sentinel))
                        if trial == trials - 1:
                            threading.Event().wait(idle)
                            wakes = Taken.of(one.sentinel).wakes - taken[-1].wakes
                            ttl = settings.times.lease_ttl
                print(f"{'with' if guarded else 'without'}: {one.round:.1f} ms", file=sys.stderr, flush=True)
    return _section(begun, taken, f"{wakes} times in {idle:g} s", f"{idle * 3 / ttl:.0f}")


def _section(begun: dict[bool, list[Begun]], taken: Sequence[Taken], woke: str, renewals: str) -> str:
    rows = [
        [title, *map(_spread, ([one.round for one in begun[guarded]], [one.cpu for one in begun[guarded]]))]
        for guarded, title in ((True, "with a sentinel"), (False, "FTCOORD_SENTINEL=0"))
    ]
    longer = median(one.round for one in begun[True]) - median(one.round for one in begun[False])
    memory = max(one.memory for one in taken)
    own = [
        ["CPU to start it, ms", _spread([one.cpu for one in taken])],
        ["resident memory, MiB", _spread([one.memory for one in taken])],
        ["proportional set size (PSS), MiB", _spread([one.own for one in taken])],
        [f"wake-ups while its process renews its lease itself (about {renewals} times)", woke],
    ]
    return f"""## The sentinel

`python -m benchmarks.sentinel`, {measured_with()}
An agent alone in its run, after its imports. "First round" is from the creation of its handler until
`next_rendezvous()` returns; CPU is that of the first {BEGINS:g} s, in which the sentinel starts. Median / worst of
{len(taken)}, alternating.

{table(["", "first round, ms", "CPU of the agent, ms"], rows)}
{verdict(f"a first round takes {longer:+.1f} ms with a sentinel", longer <= TARGET_ROUND, f"+{TARGET_ROUND:g} ms")}
The sentinel's own cost:

{table(["", ""], own)}
{verdict(f"it takes at most {memory:.1f} MiB", memory <= TARGET_MEMORY, f"{TARGET_MEMORY:g} MiB")}
"""


def _spread(numbers: Sequence[float]) -> str:
    return f"{median(numbers):.1f} / {max(numbers):.1f}"


def _settings(endpoint: str, run_id: str) -> RendezvousSettings:
    return RendezvousSettings.parse(
        backend=OURS, endpoint=endpoint, run_id=run_id, min_nodes=1, max_nodes=1, local_addr="127.0.0.1", conf={}
    )


def _serve(pipe: Connection, _numbers: Sequence[int], settings: RendezvousSettings, guarded: bool) -> None:
    logging.disable(logging.WARNING)
    if not guarded:
        os.environ[SWITCH] = "0"
    pipe.send("ready")
    while True:
        pipe.recv()
        began, cpu = time.monotonic(), time.process_time()
        agent = Agent(settings)
        agent.join()
        round_ = time.monotonic() - began
        threading.Event().wait(BEGINS - round_)
        sentinel = Sentinel.of_process()
        pid = sentinel.pid if sentinel is not None else None
        pipe.send(Begun(1000 * round_, 1000 * (time.process_time() - cpu), pid or 0))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sentinel", description="Measure what sentinels cost.")
    parser.add_argument("--trials", type=int, default=10, help="agents with one, and as many without")
    parser.add_argument("--idle", type=float, default=60, help="seconds to count wake-ups")
    parser.add_argument("--write", type=Path, metavar="FILE", help="report whose section to replace; default: print it")
    options = parser.parse_args()
    publish(run(options.trials, options.idle), options.write)


if __name__ == "__main__":
    main()
