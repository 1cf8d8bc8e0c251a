"""How often a node that lives is taken for dead, for several lease TTLs: measures for the default of `lease_ttl`.

    python -m benchmarks.evictions --minutes 60 --ttls 2 3 4 5 10

For each TTL there is a run of a few agents, each in a process of its own with a sentinel. All runs share one cluster of
three members, whose leader is killed again and again, on a machine that has far too much to do. Nobody dies, so each
round that is recalled is a false eviction. A lease that was lost is none as long as its node comes back to its seat.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from statistics import mean
from typing import Final

from benchmarks.agents import Agent
from benchmarks.metrics import AS_ETCD_DOES
from benchmarks.nodes import MONITOR_INTERVAL
from benchmarks.processes import Processes
from ftcoord.embedded.cluster import EtcdCluster
from ftcoord.rendezvous.settings import RendezvousSettings

TTLS: Final = (2, 3, 4, 5, 7, 10)
MEMBERS: Final = 3
DOWN: Final = 5.0
"""Seconds after which a member that was killed is started again."""
LOOK: Final = 5.0
"""Seconds between two looks at the load."""
SAYS_WHY: Final = "ftcoord.rendezvous.handler"
"""The logger of the line that says why the workers are stopped."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. Times in seconds; `load`: how many processes are always busy."""

    ttls: Sequence[int]
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
        reasons: why it was called back.
    """

    recalled: int = 0
    lost: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, other: Count) -> None:
        self.recalled += other.recalled
        self.lost += other.lost
        self.reasons += other.reasons


@dataclass(frozen=True, slots=True)
class Measured:
    """By TTL; the mean of the load average meanwhile, how often the leader was killed, and how long it took."""

    counts: dict[int, Count]
    load: float
    kills: int
    seconds: float


def measure(plan: Plan) -> Measured:
    """All TTLs at once, so that each sees the same faults. Raises BenchmarkError."""
    with ExitStack() as ends:
        cluster = ends.enter_context(EtcdCluster(MEMBERS, extra_args=AS_ETCD_DOES))
        count = plan.agents * len(plan.ttls)
        agents = Processes(count, _serve, cluster.endpoints, tuple(plan.ttls), plan.agents, processes=count)
        ends.enter_context(agents)  # all are in their first rounds
        if plan.load:
            ends.enter_context(Processes(plan.load, _burn, processes=plan.load))
        began = time.monotonic()
        loads, kills = _disturb(cluster, plan)
        told: list[tuple[int, Count]] = agents.ask("count")
        taken = time.monotonic() - began
    counts = {ttl: Count() for ttl in plan.ttls}
    for ttl, one in told:
        counts[ttl].add(one)
    return Measured(counts, mean(loads), kills, taken)


def _disturb(cluster: EtcdCluster, plan: Plan) -> tuple[list[float], int]:
    """Kill the leader again and again; the load averages meanwhile, and how often."""
    pause, end = threading.Event(), time.monotonic() + plan.seconds
    next_kill = time.monotonic() + plan.kill_every / 2
    loads, kills = [], 0
    while (now := time.monotonic()) < end:
        loads.append(os.getloadavg()[0])
        if now >= next_kill:
            leader = cluster.leader()
            cluster.kill(leader)
            pause.wait(DOWN)
            cluster.restart(leader, wait=False)
            kills += 1
            next_kill += plan.kill_every
            _say(f"{end - now:.0f} s left, load average {loads[-1]:.1f}, the leader was killed {kills} times")
        pause.wait(min(LOOK, max(end - now, 0)))
    return loads, kills


def table(plan: Plan, measured: Measured) -> Iterator[str]:
    """In Markdown."""
    yield (
        f"{plan.agents} agents for each TTL, {measured.seconds / 60:.0f} min, {os.cpu_count()} cores, load average"
        f" {measured.load:.1f} (mean), the leader of {MEMBERS} members killed {measured.kills} times"
    )
    yield ""
    yield "| lease_ttl, s | false evictions (agents called back) | leases lost |"
    yield "|---|---|---|"
    for ttl, count in measured.counts.items():
        yield f"| {ttl} | {count.recalled} | {count.lost} |"
    for ttl, count in measured.counts.items():
        for reason, times in count.reasons.most_common(5):
            yield f"\nlease_ttl {ttl}, {times} times: {reason}"


# -- in the processes -------------------------------------------------------------------------------------------------


class _Reasons(logging.Handler):
    """Keeps what is logged when an agent is called back."""

    def __init__(self, count: Count) -> None:
        super().__init__(logging.INFO)
        self._count = count

    def emit(self, record: logging.LogRecord) -> None:
        if "the workers are stopped" in record.getMessage():
            self._count.reasons[vars(record)["reason"]] += 1


def _serve(pipe: Connection, numbers: Sequence[int], endpoints: str, ttls: Sequence[int], agents: int) -> None:
    (number,) = numbers
    ttl, count = ttls[number % len(ttls)], Count()
    _log_only(_Reasons(count))
    names = endpoints.split(",")
    turn = number // len(ttls) % len(names)
    settings = RendezvousSettings.parse(
        backend="etcd-v3",
        endpoint=",".join(names[turn:] + names[:turn]),
        run_id=f"lease-ttl-{ttl}",
        min_nodes=1,
        max_nodes=agents,
        local_addr="127.0.0.1",
        conf={"lease_ttl": ttl},
    )
    agent = Agent(settings)
    agent.join()
    pipe.send("joined")
    while not pipe.poll(MONITOR_INTERVAL):
        if agent.is_called:
            count.recalled += 1
            agent.join()
    pipe.recv()
    count.lost = agent.incarnations - 1
    pipe.send((ttl, count))
    threading.Event().wait()


def _log_only(handler: logging.Handler) -> None:
    """Nothing is printed, but what stops workers goes to the handler."""
    root = logging.getLogger()
    root.handlers = [logging.NullHandler()]
    log = logging.getLogger(SAYS_WHY)
    log.setLevel(logging.INFO)
    log.addHandler(handler)


def _burn(pipe: Connection, _numbers: Sequence[int]) -> None:
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
    asked = parser.parse_args()
    plan = Plan(asked.ttls, asked.agents, 60 * asked.minutes, asked.load, asked.kill_every)
    for line in table(plan, measure(plan)):
        print(line)


if __name__ == "__main__":
    main()
