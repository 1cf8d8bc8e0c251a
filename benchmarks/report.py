"""The measurements as Markdown."""

from __future__ import annotations

import argparse
import logging
import math
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import torch

from benchmarks.failover import TTL, Case, Recovery
from benchmarks.imports import Import
from benchmarks.metrics import Load
from benchmarks.nodes import BACKENDS, Joined
from benchmarks.processes import PROCESSES
from ftcoord.embedded.server import find_etcd

OURS, *RIVALS = BACKENDS
TARGET_RATIO: Final = 10
TARGET_WRITES: Final = 4
TARGET_IMPORT: Final = 20
"""Milliseconds."""
_LOAD: Final = os.getloadavg()[0]
"""When the command began."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Two rounds of one run, and what they cost etcd where there is one."""

    backend: str
    count: int
    first: Joined
    again: Joined
    first_load: Load | None
    again_load: Load | None


@dataclass(frozen=True, slots=True)
class Idle:
    """What `count` idle nodes cost etcd in `seconds`."""

    count: int
    seconds: float
    load: Load


@dataclass(frozen=True, slots=True)
class Recoveries:
    """All trials of one backend and case, and what ended them early: empty if nothing did."""

    backend: str
    case: Case
    trials: Sequence[Recovery]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Evictions:
    """How often workers were started again in each trial of one backend, though nobody had died; and what ended the
    trials early."""

    backend: str
    title: str
    restarts: Sequence[int]
    problem: str = ""


HEAD: Final = """# Benchmarks

Each section names its command. With `--write docs/benchmarks.md` a command replaces its own sections; `make benchmark`
runs most of them. Compare ratios: the seconds are those of one small machine, with the load average before the start.
Every etcd that is not killed commits in batches, as by default. (Embedded servers of etcd 3.5.0 to 3.5.2 commit each
write separately, which takes 0.4 ms more.)
"""
"""What stands above all sections."""


def measured_with() -> str:
    """A sentence: on what a section was measured."""
    told = subprocess.run([find_etcd(), "--version"], capture_output=True, text=True, check=True).stdout
    etcd = told.splitlines()[0].replace(" Version:", "")
    return (
        f"Python {platform.python_version()}, torch {torch.__version__}, {etcd};"
        f" {os.cpu_count()} cores ({platform.machine()}), load average {_LOAD:.1f}."
    )


def rounds(trials: Sequence[Trial]) -> list[str]:
    """The sections on rounds: how long they take, and what they cost."""
    repeats = sum((trial.backend, trial.count) == (OURS, trials[0].count) for trial in trials)
    return [
        f"""## Time of a round

{_written("rounds")}

`N` nodes (min = max = `N`) in {PROCESSES} processes on one host call `next_rendezvous` together. Seconds until the last
call returns: median of {repeats} (minimum to maximum). "First" is the first round of a run, "again" the second one.
Handlers are connected before the clock starts; each trial has a fresh etcd.

{_speed("First", trials, lambda trial: trial.first)}
{_speed("Again", trials, lambda trial: trial.again)}""",
        _cost(trials),
    ]


def _written(part: str) -> str:
    return f"`python -m benchmarks.rendezvous --parts {part}`, {measured_with()}"


def _speed(title: str, trials: Sequence[Trial], of: Callable[[Trial], Joined]) -> str:
    ratios: dict[int, list[float]] = {}
    rows = []
    for count in sorted({trial.count for trial in trials}):
        seconds = {
            backend: [of(trial).seconds for trial in trials if (trial.backend, trial.count) == (backend, count)]
            for backend in BACKENDS
        }
        ratios[count] = [median(seconds[rival]) / median(seconds[OURS]) for rival in RIVALS]
        cells = [f"{median(of_one):.3f} ({min(of_one):.3f} to {max(of_one):.3f})" for of_one in seconds.values()]
        rows.append([str(count), *cells, *(f"{ratio:.1f}x" for ratio in ratios[count])])
    header = ["N", *(f"{backend}, s" for backend in BACKENDS), *(f"{rival} / {OURS}" for rival in RIVALS)]
    large = [ratio for count, of_count in ratios.items() if count >= 8 for ratio in of_count]
    reached = ""
    if large:
        reached = verdict(f"smallest ratio at N >= 8: {min(large):.1f}", min(large) >= TARGET_RATIO, f"{TARGET_RATIO}")
    return f"### {title}\n\n{table(header, rows)}\n{reached}\n"


def _cost(trials: Sequence[Trial]) -> str:
    rows, most = [], 0.0
    for count in sorted({trial.count for trial in trials}):
        for backend in BACKENDS:
            chosen = [trial for trial in trials if (trial.backend, trial.count) == (backend, count)]
            costs = [
                _Cost.of([(trial.first, trial.first_load) for trial in chosen], count),
                _Cost.of([(trial.again, trial.again_load) for trial in chosen], count),
            ]
            rows.append([str(count), backend, *(cell for cost in costs for cell in cost.cells())])
            if backend == OURS:
                most = max(most, *(cost.writes for cost in costs))
    header = ["N", "backend"]
    for which in ("first", "again"):
        header += [f"{which}: CPU, ms", f"{which}: etcd writes", f"{which}: requests"]
    reached = verdict(f"most writes of {OURS}: {most:.2f} per node", most <= TARGET_WRITES, f"at most {TARGET_WRITES}")
    return f"""## Cost of a round per node

{_written("rounds")}

Writes are raft proposals of etcd; requests are gRPC messages, by method (etcd-v2 uses HTTP). Those of the first round
include the creation of handlers. CPU is that of the nodes' processes.

{table(header, rows)}
{reached}
"""


@dataclass(frozen=True, slots=True)
class _Cost:
    """What one node costs: CPU in ms, writes (NaN without an etcd), messages by method."""

    cpu: float
    writes: float
    requests: Mapping[str, float]

    @classmethod
    def of(cls, rounds: Sequence[tuple[Joined, Load | None]], count: int) -> _Cost:
        loads = [load for _, load in rounds if load is not None]
        writes = median(load.writes for load in loads) / count if loads else math.nan
        requests = {method: number / count for method, number in loads[-1].requests.items()} if loads else {}
        return cls(1000 * median(joined.cpu for joined, _ in rounds) / count, writes, requests)

    def cells(self) -> list[str]:
        requests = ", ".join(f"{method} {number:.2f}" for method, number in self.requests.items() if number)
        return [f"{self.cpu:.1f}", "-" if math.isnan(self.writes) else f"{self.writes:.2f}", requests or "-"]


def idle(measured: Idle) -> str:
    """The section on the steady state."""
    numbers = {**dict(sorted(measured.load.requests.items())), "(writes)": measured.load.writes}
    total = measured.count * measured.seconds
    rows = [[method, f"{number:g}", f"{number / total:.3f}"] for method, number in numbers.items()]
    return f"""## Steady state

{_written("idle")}

Requests to etcd in {measured.seconds:g} s from {measured.count} nodes in a running round, with ten calls of
`num_nodes_waiting()` a second, as by torchrun's agent. Lease TTL {TTL} s.

{table(["request", "number", "per node and second"], [row for row in rows if row[1] != "0" or row[0] == "(writes)"])}"""


def imports(measured: Sequence[Import]) -> str:
    """The section on what being installed costs."""
    ours, total = median(one.ours for one in measured), median(one.total for one in measured)
    reached = verdict(f"{ours:.1f} ms", ours <= TARGET_IMPORT, f"{TARGET_IMPORT} ms")
    return f"""## Import

{_written("import")}

Loading ftcoord's entry points ({measured[0].entries}) adds {ours:.1f} ms to the {total:.0f} ms of importing
`torch.distributed.elastic.rendezvous` (medians). {reached}
"""


def failover(measured: Sequence[Recoveries]) -> str:
    """The section on agents, hosts and workers that are lost, and on agents that are added."""
    rows: list[list[str]] = []
    for one in measured:
        recalled = [trial.recalled for trial in one.trials]
        starts = [trial.first_start for trial in one.trials]
        ends = [trial.all_running for trial in one.trials]
        targets = "; ".join(_targets(one)) if one.backend == OURS and one.trials else ""
        times = map(_spread, (recalled, starts, ends))
        rows.append([one.case.title, one.backend, *times, _fates(one), targets or "-"])
    header = [
        "case",
        "backend",
        "recalled, s",
        "first new worker, s",
        "all running, s",
        "all running, each trial",
        "targets",
    ]
    return f"""## Agents lost and added

`python -m benchmarks.deaths`: torchrun agents with `--nnodes=2:3`, gloo workers, `lease_ttl` {TTL} s. Seconds until the
survivors received the recall, until the first worker of the new round was started, and until all its workers had done
an all_reduce: median / worst. Agents are killed with -9; the processes of a lost host, also its sentinel, are stopped.
Workers exit within 50 ms of their agent's death, because only ftcoord would end them. A child of the worker that exits
keeps gloo's connections open, so its peers hang, as with NCCL. Most of the time is the import of torch by all workers
at once: with 6 workers on 2 cores that alone exceeds the target of 4 s.
{measured_with()}

{table(header, rows)}"""


def _spread(seconds: Sequence[float]) -> str:
    """Median and worst; a dash where nothing could be measured."""
    if not seconds or math.isnan(max(seconds)):
        return "-"
    return f"{_seconds(median(seconds))} / {_seconds(max(seconds))}"


def _targets(one: Recoveries) -> Iterator[str]:
    for target in one.case.targets:
        seconds = [getattr(trial, target.until) for trial in one.trials]
        reached = median(seconds) <= target.median and max(seconds) <= target.worst
        wanted = f"{target.median:g} s" + (f", worst {target.worst:g} s" if math.isfinite(target.worst) else "")
        yield f"{target.until.replace('_', ' ')} {wanted}: {_met(reached)}"


def _fates(one: Recoveries) -> str:
    return "; ".join([*(_fate(trial, one.case) for trial in one.trials), *filter(None, [one.problem])])


def _fate(trial: Recovery, case: Case) -> str:
    if trial.all_running < case.limit:
        return _seconds(trial.all_running)
    return "never: all agents ended" if trial.died else f"not in {case.limit:g} s"


def evictions(measured: Sequence[Evictions]) -> str:
    """The section on agents that starve."""
    rows = []
    for one in measured:
        evicted, restarts = sum(map(bool, one.restarts)), sum(one.restarts)
        trials = "; ".join([str(len(one.restarts)), *filter(None, [one.problem])])
        target = f"0: {_met(restarts == 0)}" if one.backend == OURS and one.restarts else "-"
        rows.append([one.title, one.backend, trials, str(evicted), str(restarts), target])
    header = ["what happens", "backend", "trials", "with an eviction", "restarts of the workers", "target"]
    return f"""## Agents that starve

`python -m benchmarks.deaths`: three torchrun agents, default settings, one gloo
worker each. No agent dies, so each restart of the workers is a false eviction: a live agent was taken for dead.
{measured_with()}

{table(header, rows)}"""


def _seconds(seconds: float) -> str:
    return "never" if seconds == math.inf else f"{seconds:.2f}" if seconds < 1 else f"{seconds:.1f}"


def verdict(found: str, reached: bool, target: str) -> str:
    """A sentence: what was found, and whether that reaches the target."""
    return f"{found[0].upper()}{found[1:]} (target {target}: {_met(reached)})."


def _met(reached: bool) -> str:
    return "met" if reached else "not met"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def run_alone(module: str, run: Callable[[int], str], repeat: int) -> None:
    """The command line of a module that measures one section: `run` measures as often as it is told, and tells it."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="Measure one section of the report.")
    parser.add_argument("--repeat", type=int, default=repeat, help="how often to measure each")
    parser.add_argument("--write", type=Path, metavar="FILE", help="report whose section to replace; default: print it")
    options = parser.parse_args()
    if options.repeat < 1:
        parser.error("--repeat must be at least 1")
    logging.disable(logging.WARNING)
    publish(run(options.repeat), options.write)


def publish(section: str, target: Path | None) -> None:
    """Put a section, from its heading on, in place of the one in `target`, or at the end; or print it."""
    if target is None:
        print(section)
        return
    before, _, after = _around(section, target)
    target.write_text("\n".join(filter(None, [before, section])) + after)


def publish_rows(section: str, target: Path | None, keys: int) -> None:
    """The same of a section with one table, but rows of the one in `target` stay that begin with other `keys` cells."""
    if target is not None:
        _, found, _ = _around(section, target)
        section = _merge(section, found, keys)
    publish(section, target)


def _around(section: str, target: Path) -> tuple[str, str, str]:
    """What stands in a file before the section of that title, the section, and what comes after it."""
    text = target.read_text() if target.exists() else ""
    title = section.partition("\n")[0]
    before, found, rest = f"\n{text}".partition(f"\n{title}\n")
    body, *after = rest.partition("\n## ") if found else ("",)
    return before[1:], body, "".join(after)


def _merge(section: str, old: str, keys: int) -> str:
    """The section with the rows that only the old one has, each where it was."""
    start = section.index("\n| ") + 1
    end = section.rindex("|\n") + 2
    header, line, *new = section[start:end].splitlines()
    known = old.splitlines()
    if header in known:
        rows = {_key(row, keys): row for row in known[known.index(header) + 2 :] if row.startswith("| ")}
        rows |= {_key(row, keys): row for row in new}
        new = list(rows.values())
    return f"{section[:start]}{chr(10).join([header, line, *new])}\n{section[end:]}"


def _key(row: str, keys: int) -> tuple[str, ...]:
    return tuple(row.split(" | ")[:keys])
