"""Members of an elastic run are killed, again and again: how long until the others have committed their next step.

    python -m benchmarks.unstopped --write docs/benchmarks.md

Beside it, what torchrun and torchft take for one of theirs. Rows of another torch stay in the report.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from benchmarks import stuck, training
from benchmarks.failover import CASES, recover
from benchmarks.lighthouses import TORCHFT
from benchmarks.nodes import BACKENDS
from benchmarks.processes import BenchmarkError
from benchmarks.report import measured_with, publish_rows, table
from tests.below import no_orphans
from tests.etcd_cluster import EtcdCluster

SIZE: Final = 4
PATIENCE: Final = 300.0
"""Seconds for whatever is waited for."""
MOMENT: Final = 1.0
"""Seconds over which a kill is spread, from the first steps of all four on."""
DECISION: Final = 0.05
"""Seconds after a member's end over which the end of etcd's leader is spread: the others' decision falls into them."""
EXACT: Final = 1e-9
"""Relative: how far a loss may be from that of the undisturbed order."""
MEDIAN, WORST = 0.3, 1.0
"""Seconds: the targets for half of the kills, and for 99 of 100."""
WORKER, RANK_0, STOPPED, LEADER, AGENT = KINDS = (
    "worker killed",
    "rank 0 killed",
    "worker stopped (SIGSTOP), from the notice",
    "worker and etcd's leader killed",
    "agent killed (`ftcoord run`)",
)
OFTEN: Final = (30, 25, 15, 15, 15)
"""How often each is drawn."""


class Member:
    """One process of the run, and what it has said: with an agent of its own, or forked from one that has torch."""

    def __init__(self, endpoints: str, job: str, log: Path, *, has_agent: bool) -> None:
        self.has_agent, self.log = has_agent, log
        self._said: list[dict[str, Any]] = []
        self._read = 0
        log.touch()
        if has_agent:
            own = {"FTCOORD_ENDPOINTS": endpoints, "PYTHONPATH": str(Path(__file__).parent.parent)}
            command = [sys.executable, "-m", "ftcoord", "run", "-n", "1", "--restarts", "0", "--job", job]
            with log.open("ab") as output:
                self._process: subprocess.Popen[bytes] | BaseProcess = subprocess.Popen(
                    [*command, training.__file__],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **own},
                    start_new_session=True,
                )
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([training.__name__])
        self._process = context.Process(target=training.main, args=(endpoints, job, str(log)), daemon=True)
        self._process.start()

    @property
    def said(self) -> list[dict[str, Any]]:
        """All lines that are whole by now."""
        with self.log.open() as log:
            log.seek(self._read)
            text = log.read()
        text = text[: text.rfind("\n") + 1]
        self._read += len(text.encode())
        lines = (line.removeprefix("[0] ") for line in text.splitlines())
        self._said += [json.loads(line) for line in lines if line.startswith("{")]
        return self._said

    def told(self, key: str) -> list[dict[str, Any]]:
        return [one for one in self.said if key in one]

    @property
    def pids(self) -> list[int]:
        """Of all processes that its agent has started."""
        return [one["starts"] for one in self.told("starts")]

    @property
    def rank(self) -> int:
        return int(self.told("begins")[-1]["rank"])

    def first(self, key: str, number: int) -> float:
        """When it first did this in a group after that number; infinite if not yet."""
        return next((float(one["at"]) for one in self.told(key) if one["number"] > number), math.inf)

    def kill(self) -> None:
        """Its process, or its agent and with that its process. Idempotent."""
        self._process.kill()

    def wait(self) -> None:
        """Until that has ended."""
        self._process.wait() if isinstance(self._process, subprocess.Popen) else self._process.join()


@dataclass(frozen=True, slots=True)
class Kill:
    """What happens, which rank to, where in the moment; then the seconds, and what was wrong."""

    kind: str
    rank: int
    phase: float
    seconds: float = math.inf
    join: float = math.inf
    problem: str = ""


class Run:
    """The members of one run."""

    def __init__(self, cluster: EtcdCluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self._tick = threading.Event()
        self.live: list[Member] = []
        self.all: list[Member] = []

    def start(self, *, has_agent: bool) -> None:
        """One more member."""
        log = self._folder / f"{len(self.all)}.log"
        self.all.append(Member(self._cluster.endpoints, self._folder.name, log, has_agent=has_agent))
        self.live.append(self.all[-1])

    def close(self) -> None:
        for one in self.all:
            one.kill()
            one.wait()

    def until(self, ready: Callable[[], bool], what: str) -> None:
        """Wait for it. Raises BenchmarkError."""
        deadline = time.monotonic() + PATIENCE
        while not ready():
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{what}: not in {PATIENCE:g} s; logs in {self._folder}")
            self._tick.wait(0.01)

    def number(self) -> int:
        """That of the latest group of any live member."""
        return max(int(one.told("begins")[-1]["number"]) for one in self.live)

    def await_all(self, after: float) -> float:
        """When the last of the four had first committed a step in a group of four since then."""

        def firsts() -> list[float]:
            steps = [(step for step in one.told("committed") if step["at"] > after) for one in self.live]
            return [next((step["at"] for step in of_one if step["world"] == SIZE), math.inf) for of_one in steps]

        self.until(lambda: math.isfinite(max(firsts())), "a group of four")
        return max(firsts())

    def suffer(self, kill: Kill) -> Kill:
        """Do it, and have another join. Raises BenchmarkError."""
        self._tick.wait(kill.phase * MOMENT)
        by_rank = {one.rank: one for one in self.live}
        victim = by_rank[kill.rank] if kill.kind != AGENT else next(one for one in self.live if one.has_agent)
        others = [one for one in self.live if one is not victim]
        pids, number, leader = [one.pids for one in others], self.number(), self._cluster.leader()
        (pid,) = victim.pids
        at = time.monotonic()
        if kill.kind == AGENT:
            victim.kill()
        else:
            os.kill(pid, signal.SIGSTOP if kill.kind == STOPPED else signal.SIGKILL)
        if kill.kind == LEADER:
            time.sleep(kill.phase * DECISION)
            self._cluster.kill(leader)
        try:
            self.until(lambda: all(math.isfinite(one.first("committed", number)) for one in others), "a next step")
            if kill.kind == STOPPED:
                at = min(one.first("leaves", number - 1) for one in others)
            seconds = max(one.first("committed", number) for one in others) - at
        finally:
            if kill.kind == STOPPED:
                os.kill(pid, signal.SIGCONT)
            if kill.kind == LEADER:
                self._cluster.restart(leader)
        began = time.monotonic()
        if kill.kind != STOPPED:
            self.live.remove(victim)
            victim.wait()
            self.start(has_agent=victim.has_agent)
        join = self.await_all(began) - began
        changed = [one.pids for one in others] != pids
        return replace(kill, seconds=seconds, join=join, problem="a survivor's pid has changed" if changed else "")

    def problems(self) -> list[str]:
        """What was wrong in all that its members have said."""
        last = max((step["committed"] for one in self.all for step in one.told("committed")), default=0)
        losses = [*itertools.islice(training.undisturbed(), last)]
        found, groups = [], dict[int, dict[int, Member]]()
        for member in self.all:
            begins, steps = member.told("begins"), member.told("committed")
            numbers = [one["number"] for one in begins]
            if numbers != sorted({*numbers}):
                found.append(f"{member.log}: in two groups of one number: {numbers}")
            for one in begins:
                groups.setdefault(one["number"], {})[one["rank"]] = member
                if groups[one["number"]][one["rank"]] is not member:
                    found.append(f"{member.log}: another has its rank in group {one['number']}")
            committed = [one["committed"] for one in steps]
            if committed != sorted({*committed}):
                found.append(f"{member.log}: a step is committed twice")
            for one in steps:
                if not math.isclose(one["loss"], losses[one["committed"] - 1], rel_tol=EXACT):
                    found.append(f"{member.log}: step {one['committed']}: loss {one['loss']}, and later ones perhaps")
                    break
        return found


def plan(kills: int, seed: int) -> list[Kill]:
    """What happens, one after the other."""
    chance = random.Random(seed)
    kinds = chance.choices(KINDS, OFTEN, k=kills)
    return [
        Kill(kind, 0 if kind == RANK_0 else chance.randrange(1 if kind == WORKER else 0, SIZE), chance.random())
        for kind in kinds
    ]


def disturb(kills: Sequence[Kill], folder: Path) -> tuple[list[Kill], list[str]]:
    """All of them, and what was wrong besides. After one that fails, another run begins."""
    left, done, problems = [*kills], list[Kill](), list[str]()
    with no_orphans(), EtcdCluster(3) as cluster:
        while left:
            own = Path(tempfile.mkdtemp(prefix="run", dir=folder))
            with ExitStack() as ends:
                run = Run(cluster, own)
                ends.callback(run.close)
                for number in range(SIZE):
                    run.start(has_agent=number == 0)
                run.await_all(-math.inf)
                while left:
                    kill = left.pop(0)
                    try:
                        kill = run.suffer(kill)
                    except BenchmarkError as error:
                        kill = replace(kill, problem=str(error))
                    except KeyboardInterrupt:  # what is done counts
                        left.clear()
                        break
                    done.append(kill)
                    say(f"{len(done)} {kill.kind}: {kill.seconds:.3f} s, join {kill.join:.2f} s {kill.problem}")
                    if kill.problem:
                        break
            problems += run.problems()
            with suppress(BenchmarkError):
                cluster.wait_healthy()
    return done, problems


def rivals(count: int) -> list[list[str]]:
    """Rows of torchrun with each backend, and of torchft; c10d once."""
    rows = []
    for backend, times in ((BACKENDS[0], count), (BACKENDS[1], min(count, 1))):
        found = [recover(backend, CASES[0], (number + 0.5) / times).all_running for number in range(times)]
        rows.append(row(f"one of 3 torchrun agents killed, {backend}: all are restarted", found, ""))
    found = [stuck.measure(TORCHFT, 60, proactive=False) for _ in range(min(count, 2))]
    rows.append(row("one of 4 replicas of torchft 0.2.0 killed in an allreduce, timeout 60 s", found, ""))
    return rows


def ninety_nine(seconds: Sequence[float]) -> float:
    """The 99th percentile."""
    return sorted(seconds)[math.ceil(0.99 * len(seconds)) - 1]


def row(title: str, seconds: Sequence[float], reached: str) -> list[str]:
    """A row of the table."""
    cells = map(shown, (median(seconds), ninety_nine(seconds), max(seconds)))
    return [torch.__version__, title, str(len(seconds)), *cells, reached or "-"]


def shown(seconds: float) -> str:
    return f"{seconds:.2f}" if math.isfinite(seconds) else "never"


def run(kills: int, seed: int, others: int, folder: Path) -> str:
    """Measure, and tell it in Markdown."""
    done, problems = disturb(plan(kills, seed), folder)
    for one in problems:
        say(one)
    return section([*own_rows(done, problems), *(rivals(others) if others and len(done) == kills else [])])


def own_rows(done: Sequence[Kill], problems: Sequence[str]) -> list[list[str]]:
    """Those of the elastic run."""
    cases = [(kind, [one.seconds for one in done if one.kind == kind]) for kind in KINDS]
    rows = [row(kind, seconds, "") for kind, seconds in cases if seconds]
    right = f"{sum(not one.problem for one in done)} of {len(done)} right, {len(problems)} findings"
    rows.append(row("all of these", [one.seconds for one in done], right))
    if lost := [one.seconds for one in done if one.kind != LEADER]:
        near = median(lost) <= MEDIAN and ninety_nine(lost) <= WORST
        reached = f"p50 {MEDIAN:g} s, p99 {WORST:g} s: {'met' if near else 'not met'}"
        rows.append(row("those with etcd's leader alive", lost, reached))
    rows.append(row("the fourth joins, from its start or SIGCONT to a step of four", [one.join for one in done], ""))
    return rows


def section(rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    return f"""## Members of an elastic run are killed

`python -m benchmarks.unstopped`, {measured_with()}
Four processes train with `ftcoord.elastic` on Gloo, one of them under an `ftcoord run` of its own, with three etcd
members. By a seeded plan one of them ends, and is started again once the others have gone on. Seconds until all
survivors have committed their next step. After each kill the survivors' pids must be the same; in the end no process
may have committed a step twice or been in two groups of one number, and each loss is that of the undisturbed order.

{table(["torch", "what happens", "times", "p50, s", "p99, s", "worst, s", "targets"], rows)}
- A stopped process is noticed when its lease ends, after 5 to 7.5 s.
- etcd takes one to two seconds to elect another leader, and nothing is decided meanwhile.
- An agent of `ftcoord run` that is killed ends its process with it.
"""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unstopped", description="Measure elastic runs.")
    parser.add_argument("--kills", type=int, default=100, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="of the plan")
    parser.add_argument("--rivals", type=int, default=3, help="kills of torchrun's and torchft's; 0 leaves them out")
    parser.add_argument("--folder", type=Path, help="where logs are kept; default: nowhere")
    parser.add_argument("--write", type=Path, metavar="FILE", help="report whose rows to replace; default: print it")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no member outlives this
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="ftcoord-bench-") as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        publish_rows(run(options.kills, options.seed, options.rivals, folder), options.write, 2)


if __name__ == "__main__":
    main()
