"""Real torchrun agents that lose one of them, or get one more: how long until all workers run again.

Every backend has its default settings. On one host c10d is only told which agent hosts its store.
"""

from __future__ import annotations

import json
import math
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.nodes import endpoint_for
from benchmarks.processes import BenchmarkError
from ftcoord.demo.agents import Agent

PATIENCE: Final = 180.0
"""Seconds for the first round."""
RENEWAL: Final = 10 / 3
"""Seconds between two renewals of a lease with the default TTL: kills are spread over this."""
_WORKER: Final = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, slots=True)
class Case:
    """What happens to the job.

    Args:
        agents: how many there are before.
        victim: the rank whose agent and worker are killed; None to start one more agent instead.
        limit: seconds after which it is called never.
    """

    title: str
    agents: int
    victim: int | None
    limit: float


NODE_LOST: Final = Case("3 agents, one killed (not rank 0)", 3, 2, 150)
RANK_0_LOST: Final = Case("3 agents, rank 0's killed", 3, 0, 150)
NODE_ADDED: Final = Case("2 agents, a third one started", 2, None, 90)


@dataclass(frozen=True, slots=True)
class Event:
    """What a worker reported; see worker.py."""

    event: str
    at: float
    agent: str
    rank: int
    world: int


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds from the event until the first new worker was started, and until all run; `math.inf` is never.

    Args:
        died: all agents had ended before.
    """

    first_start: float
    all_running: float
    died: bool


class Job:
    """Agents of one run with one worker each; context manager that ends all of them."""

    def __init__(self, backend: str, endpoint: str) -> None:
        self._stack = ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="ftcoord-bench-")))
        (self._folder / "events.jsonl").touch()
        self._backend, self._endpoint = backend, endpoint
        self._tick = threading.Event()
        self.agents: dict[str, Agent] = {}

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents.values():
            if agent.process.poll() is None:
                agent.lose()
        self._stack.close()

    def start(self, name: str) -> None:
        """Start an agent; the first one hosts c10d's store."""
        torchrun = [
            "--nnodes=2:3",
            "--nproc-per-node=1",
            "--max-restarts=100",
            "--local-addr=127.0.0.1",
            f"--rdzv-backend={self._backend}",
            f"--rdzv-endpoint={self._endpoint}",
            "--rdzv-id=benchmark",
        ]
        if self._backend == "c10d":
            torchrun.append(f"--rdzv-conf=is_host={not self.agents}")
        self.agents[name] = Agent(name, self._folder, torchrun, [str(_WORKER), str(self._folder)])

    def lose(self, name: str) -> None:
        """Kill -9 an agent and its worker."""
        self.agents.pop(name).lose()

    def events(self, kind: str, after: float = -math.inf) -> list[Event]:
        lines = (self._folder / "events.jsonl").read_text().splitlines(keepends=True)
        events = [Event(**json.loads(line)) for line in lines if line.endswith("\n")]
        return [event for event in events if event.event == kind and event.at > after]

    def running_at(self, after: float = -math.inf) -> float:
        """When the last of the present agents' workers began to run in a round of just these; infinite if not yet."""
        firsts: dict[str, float] = {}
        for event in self.events("running", after):
            if event.world == len(self.agents):
                firsts.setdefault(event.agent, event.at)
        return max(firsts.values()) if firsts.keys() == self.agents.keys() else math.inf

    def dead(self) -> bool:
        """Whether all agents have ended."""
        return all(agent.process.poll() is not None for agent in self.agents.values())

    def wait(self, ready: Callable[[], bool], limit: float) -> bool:
        """Wait until something is so; False after `limit` seconds."""
        deadline = time.monotonic() + limit
        while not ready():
            if time.monotonic() > deadline:
                return False
            self._tick.wait(0.05)
        return True

    def pause(self, seconds: float) -> None:
        self._tick.wait(seconds)

    def victim(self, rank: int) -> str:
        """The agent to kill for a rank; with c10d never the one that hosts the store, which nobody survives."""
        ranks = {event.agent: event.rank for event in self.events("running")}
        if self._backend == "c10d":
            ranks.pop(next(iter(self.agents)))
        return min(ranks, key=lambda name: (abs(ranks[name] - rank), name))

    def logs(self) -> str:
        return "\n".join(f"--- {agent.name}\n{agent.log.read_text(errors='replace')}" for agent in self.agents.values())


def recover(backend: str, case: Case, phase: float) -> Recovery:
    """One trial; `phase` (0 to 1) is where between two lease renewals it happens. Raises BenchmarkError."""
    with endpoint_for(backend) as endpoint, Job(backend, endpoint) as job:
        for name in "abc"[: case.agents]:
            job.start(name)
        if not job.wait(lambda: math.isfinite(job.running_at()), PATIENCE):
            raise BenchmarkError(f"no first round of {case.agents} agents with {backend}:\n{job.logs()}")
        job.pause(2 + phase * RENEWAL)
        victim = None if case.victim is None else job.victim(case.victim)
        happened_at = time.monotonic()
        if victim is None:
            job.start("d")
        else:
            job.lose(victim)
        job.wait(lambda: math.isfinite(job.running_at(happened_at)) or job.dead(), case.limit)
        first = min((event.at for event in job.events("started", happened_at)), default=math.inf)
        return Recovery(first - happened_at, job.running_at(happened_at) - happened_at, job.dead())


def spread(repeats: int) -> Sequence[float]:
    """Phases for so many trials, evenly over the time between two renewals."""
    return [(index + 0.5) / repeats for index in range(repeats)]
