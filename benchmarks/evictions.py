"""How often a node that lives is taken for dead, for several lease TTLs: measures for the default of `lease_ttl`.

    python -m benchmarks.evictions --minutes 60 --ttls 2 3 4 5 10 --write docs/benchmarks.md

For each TTL there is a run of a few agents, each in a process of its own with a sentinel; of the smallest one there is
another run without sentinels. All runs share one cluster of three members, whose leader is killed again and again, on a
machine that has far too much to do. Nobody dies, so each round that is recalled is a false eviction. A lease that was
lost is none as long as its node comes back to its seat. etcd is the embedded one, or that of FTCOORD_ETCD_BINARY.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean
from typing import Final

from torch.distributed.elastic.rendezvous.api import RendezvousError

from benchmarks.agents import Agent
from benchmarks.nodes import MONITOR_INTERVAL
from benchmarks.processes import BenchmarkError, Processes
from benchmarks.report import publish, table
from ftcoord.errors import ServerError
from ftcoord.etcd.client import EtcdClient
from ftcoord.primitives.sentinel import SWITCH
from ftcoord.primitives.session import Renewer
from ftcoord.rendezvous.settings import RendezvousSettings
from tests.etcd_cluster import EtcdCluster

TTLS: Final = (2, 3, 4, 5, 7, 10)
MEMBERS: Final = 3
DOWN: Final = 5.0
"""Seconds after which a member that was killed is started again."""
LOOK: Final = 5.0
"""Seconds between two looks at the load."""
WARM: Final = 180.0
"""Seconds that the load average, which is that of a minute, takes to rise; it does not count before."""
AGAIN: Final = 1.0
"""Seconds after which an agent whose join failed tries again."""
SAYS_WHY: Final = "ftcoord.rendezvous.handler"
"""The logger of the line that says why the workers are stopped."""


@dataclass(frozen=True, slots=True)
class Run:
    """What the agents of one run have."""

    ttl: int
    has_sentinels: bool = True

    @property
    def title(self) -> str:
        return f"{self.ttl}" if self.has_sentinels else f"{self.ttl}, without sentinels"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. Times in seconds; `load`: how many processes are always busy."""

    runs: Sequence[Run]
    agents: int
    seconds: float
    load: int
    kill_every: float


@dataclass(slots=True)
class Count:
    """What happened to one agent, or to all of one run.

    Args:
        recalled: how often it was called back: its workers would have been restarted.
        lost: how many leases it lost.
        failed: how often it could not join: torchrun would have ended.
        least_left: the smallest remaining time of a lease before the agent's own renewal, in seconds.
        longest_pause: the longest time for which the agent did not run, in seconds.
        reasons: why it was called back, and why it could not join.
    """

    recalled: int = 0
    lost: int = 0
    failed: int = 0
    least_left: float = math.inf
    longest_pause: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, other: Count) -> None:
        self.recalled += other.recalled
        self.lost += other.lost
        self.failed += other.failed
        self.least_left = min(self.least_left, other.least_left)
        self.longest_pause = max(self.longest_pause, other.longest_pause)
        self.reasons += other.reasons


@dataclass(slots=True)
class Measured:
    """What was found so far: the counts by run, and what was done meanwhile.

    Args:
        etcd: its release.
        loads: load averages, from `WARM` on or from the middle of the time.
        kills: how often the leader was killed.
        unhurt: how often it was not, since there was none, or the member that was killed before was not back.
        ended: why it ended early, empty if it did not.
    """

    counts: dict[Run, Count]
    etcd: str = ""
    loads: list[float] = field(default_factory=list)
    kills: int = 0
    unhurt: int = 0
    seconds: float = 0.0
    ended: str = ""

    def told(self, answers: Sequence[tuple[Run, Count]]) -> None:
        """Note what the agents have counted since their start."""
        counts = {run: Count() for run in self.counts}
        for run, one in answers:
            counts[run].add(one)
        self.counts = counts


def measure(plan: Plan) -> Measured:
    """All runs at once, so that each sees the same faults. Raises BenchmarkError and ServerError if they do not begin;
    afterwards what was found is kept."""
    found = Measured({run: Count() for run in plan.runs})
    with ExitStack() as ends:
        cluster = ends.enter_context(EtcdCluster(MEMBERS))
        with EtcdClient(cluster.endpoints) as client:
            found.etcd = client.status().version
        count = plan.agents * len(plan.runs)
        agents = Processes(count, _serve, cluster.endpoints, tuple(plan.runs), plan.agents, processes=count)
        ends.enter_context(agents)  # all are in their first rounds
        if plan.load:
            ends.enter_context(Processes(plan.load, _burn, processes=plan.load))
        began = time.monotonic()
        try:
            _disturb(cluster, agents, plan, found)
        except (BenchmarkError, KeyboardInterrupt) as error:  # an hour's findings must not go with it
            found.ended = str(error) or "Ctrl-C"
            _say(f"ends early: {found.ended}")
        found.seconds = time.monotonic() - began
    return found


def _disturb(cluster: EtcdCluster, agents: Processes, plan: Plan, found: Measured) -> None:
    """Kill the leader again and again, and ask the agents each time. Raises BenchmarkError."""
    pause, began = threading.Event(), time.monotonic()
    end, counts_from = began + plan.seconds, began + min(WARM, plan.seconds / 2)
    next_kill = began + plan.kill_every / 2
    while (now := time.monotonic()) < end:
        if now >= counts_from:
            found.loads.append(os.getloadavg()[0])
        if now >= next_kill:
            problem = _kill_leader(cluster, pause)
            found.kills += not problem
            found.unhurt += bool(problem)
            next_kill = time.monotonic() + plan.kill_every
            found.told(agents.ask("count"))
            _tell(found, max(end - time.monotonic(), 0), problem)
        pause.wait(min(LOOK, max(end - time.monotonic(), 0)))
    found.told(agents.ask("count"))


def _kill_leader(cluster: EtcdCluster, pause: threading.Event) -> str:
    """Kill the leader, and start it again a moment later; what came in between, empty if nothing did."""
    try:
        down = [number for number, member in enumerate(cluster.members) if not member.is_running()]
        for number in down:  # without it the next kill would take the majority
            cluster.restart(number, wait=False)
        cluster.wait_healthy()
        leader = cluster.leader()
        cluster.kill(leader)
        pause.wait(DOWN)
        cluster.restart(leader, wait=False)
    except ServerError as error:
        return str(error).partition("\n")[0]
    return ""


def _tell(found: Measured, left: float, problem: str) -> None:
    """What was found so far."""
    load = os.getloadavg()[0]
    _say(f"{left:.0f} s left, load average {load:.1f}, leader killed {found.kills} times{problem and ': ' + problem}")
    for run, one in found.counts.items():
        _say(
            f"  lease_ttl {run.title}: {one.recalled} called back, {one.lost} leases lost, {one.failed} failed to join,"
            f" {one.least_left:.1f} s left at least, not run for {one.longest_pause:.2f} s at most"
        )


def section(plan: Plan, found: Measured) -> str:
    """In Markdown."""
    header = ["lease_ttl, s", "agents called back", "leases lost", "joins failed", "least left, s", "longest pause, s"]
    rows = [
        [run.title, *map(str, (one.recalled, one.lost, one.failed)), _left(one), f"{one.longest_pause:.2f}"]
        for run, one in found.counts.items()
    ]
    reasons = [
        f"- lease_ttl {run.title}, {times} times: {reason}\n"
        for run, one in found.counts.items()
        for reason, times in one.reasons.most_common(5)
    ]
    load = f"at least {min(found.loads):.1f}, mean {mean(found.loads):.1f}" if found.loads else "not read"
    ended = f"It ended early: {found.ended}.\n\n" if found.ended else ""
    return f"""## False evictions

`python -m benchmarks.evictions`: {plan.agents} agents for each TTL, for {found.seconds / 60:.0f} min, beside
{plan.load} busy processes on {os.cpu_count()} cores; load average {load}. etcd {found.etcd},
{MEMBERS} members; the leader was killed {found.kills} times, and {found.unhurt} times it could not be.
No agent dies, so each recalled agent is a false eviction. "Least left" is the smallest remaining time of a lease that
its agent knew; its sentinel may have renewed it since. "Longest pause" is how long an agent did not run.

{ended}{table(header, rows)}
{"".join(reasons)}"""


def _left(one: Count) -> str:
    return f"{one.least_left:.1f}" if math.isfinite(one.least_left) else "-"


# -- in the processes -------------------------------------------------------------------------------------------------


class _Reasons(logging.Handler):
    """Keeps what is logged when an agent is called back."""

    def __init__(self, count: Count) -> None:
        super().__init__(logging.INFO)
        self._count = count

    def emit(self, record: logging.LogRecord) -> None:
        if "the workers are stopped" in record.getMessage():
            self._count.reasons[vars(record)["reason"]] += 1


class _Counting:
    """Drives one agent as torchrun does, and counts. Joins on a thread of its own, so that it answers meanwhile."""

    def __init__(self, settings: RendezvousSettings) -> None:
        self.count = Count()
        _log_only(_Reasons(self.count))
        self._agent = Agent(settings)
        self._agent.join()
        self._pool = ThreadPoolExecutor(1)
        self._joining: Future[object] | None = None
        self._looked = time.monotonic()

    def look(self) -> None:
        """Once in each `MONITOR_INTERVAL`."""
        now = time.monotonic()
        self.count.longest_pause = max(self.count.longest_pause, now - self._looked - MONITOR_INTERVAL)
        self.count.least_left = min([self.count.least_left, *(one.time_left for one in Renewer.of_process().leases())])
        self.count.lost = self._agent.incarnations - 1
        self._looked = now
        if self._joining is not None:
            self._see_join(self._joining)
        elif self._agent.is_called:
            self.count.recalled += 1
            self._joining = self._pool.submit(self._agent.join)

    def _see_join(self, joining: Future[object]) -> None:
        if not joining.done():
            return
        self._joining = None
        error = joining.exception()
        if isinstance(error, RendezvousError):
            self.count.failed += 1
            self.count.reasons[f"could not join: {error}"] += 1
            self._joining = self._pool.submit(self._join_again)
        elif error is not None:
            raise error

    def _join_again(self) -> object:
        threading.Event().wait(AGAIN)
        return self._agent.join()


def _serve(pipe: Connection, numbers: Sequence[int], endpoints: str, runs: Sequence[Run], agents: int) -> None:
    os.setsid()  # as torchrun's agents, each of which is a host: the kernel shares out the processors by session
    (number,) = numbers
    run = runs[number % len(runs)]
    if not run.has_sentinels:
        os.environ[SWITCH] = "0"
    names = endpoints.split(",")
    turn = number // len(runs) % len(names)
    settings = RendezvousSettings.parse(
        backend="etcd-v3",
        endpoint=",".join(names[turn:] + names[:turn]),
        run_id=f"lease-ttl-{run.ttl}-{'with' if run.has_sentinels else 'without'}",
        min_nodes=1,
        max_nodes=agents,
        local_addr="127.0.0.1",
        conf={"lease_ttl": run.ttl},
    )
    counting = _Counting(settings)
    pipe.send("joined")
    while True:
        if pipe.poll(MONITOR_INTERVAL):
            pipe.recv()
            pipe.send((run, counting.count))
        counting.look()


def _log_only(handler: logging.Handler) -> None:
    """Nothing is printed, but what stops workers goes to the handler."""
    root = logging.getLogger()
    root.handlers = [logging.NullHandler()]
    log = logging.getLogger(SAYS_WHY)
    log.setLevel(logging.INFO)
    log.addHandler(handler)


def _burn(pipe: Connection, _numbers: Sequence[int]) -> None:
    os.setsid()  # else all of them together get what one other session gets (sched_autogroup_enabled)
    pipe.send("busy")
    while True:
        pass


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evictions", description="Count false evictions.")
    parser.add_argument("--ttls", nargs="+", type=int, default=TTLS, help="values of lease_ttl, in seconds")
    parser.add_argument("--agents", type=int, default=3, help="agents for each of them")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--load", type=int, default=20, help="processes that are always busy")
    parser.add_argument("--kill-every", type=float, default=60, help="seconds between two kills of etcd's leader")
    parser.add_argument("--write", type=Path, metavar="FILE", help="report whose section to replace; default: print it")
    asked = parser.parse_args()
    runs = [*map(Run, asked.ttls), Run(min(asked.ttls), has_sentinels=False)]
    plan = Plan(runs, asked.agents, 60 * asked.minutes, asked.load, asked.kill_every)
    publish(section(plan, measure(plan)), asked.write)


if __name__ == "__main__":
    main()
