"""Real torchrun agents that lose one of them, a host or a worker, or get one more: how long until all workers run.

Every backend has its default settings. On one host c10d is only told which agent hosts its store.
"""

from __future__ import annotations

import json
import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.nodes import BACKENDS, OURS, endpoint_for
from benchmarks.processes import BenchmarkError
from ftcoord.core.layout import decided_key
from ftcoord.core.rendezvous_records import parse_decided
from ftcoord.demo.run import Agent
from ftcoord.etcd.api import Batch, Span, WatchItem
from ftcoord.etcd.client import EtcdClient
from ftcoord.rendezvous.settings import RendezvousSettings
from tests.below import descendants, no_orphans

_, C10D, ETCD_V2 = BACKENDS
PATIENCE: Final = 180.0
"""Seconds for the first round."""
SETTINGS: Final = RendezvousSettings.parse(
    backend=OURS, endpoint="", run_id="benchmark", min_nodes=2, max_nodes=3, local_addr=None, conf={}, env={}
)
TTL: Final = SETTINGS.times.lease_ttl
RENEWAL: Final = TTL / 3
"""Seconds between two renewals of a lease: what happens is spread over this."""
BEFORE: Final = 3.0
"""Seconds that all workers run before anything happens: an agent has its sentinel by then."""
TORCHRUN: Final = "torch.distributed.run"
_WORKER: Final = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, slots=True)
class Target:
    """Seconds that the median, and the worst trial, may take until something: `recalled` or `all_running`."""

    until: str
    median: float
    worst: float = math.inf


@dataclass(frozen=True, slots=True)
class Case:
    """What happens to the job.

    Args:
        agents: how many there are before.
        happens: makes it happen, and returns when it did (monotonic).
        limit: seconds after which it is called never.
        workers: of each agent.
        targets: of our own backend.
        rivals: the others that are measured too.
    """

    title: str
    agents: int
    happens: Callable[[Job], float]
    limit: float
    workers: int = 1
    targets: Sequence[Target] = ()
    rivals: Sequence[str] = (C10D,)


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
    """Seconds from the event until the agents were told to stop their workers (of our own backend: when etcd told
    everybody of the recall; else not a number), until the first new worker was started, and until all run; `math.inf`
    is never.

    Args:
        died: all agents had ended before.
        why: what our own agents were told.
    """

    recalled: float
    first_start: float
    all_running: float
    died: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Recall:
    """When etcd told of it (monotonic), and the reason."""

    at: float
    why: str


class Job:
    """Agents of one run; context manager that ends all that they started.

    Args:
        workers: of each agent.
        program: the module that is run as torchrun.
    """

    def __init__(self, backend: str, endpoint: str, workers: int = 1, program: str = TORCHRUN) -> None:
        self._stack = ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="ftcoord-bench-")))
        (self._folder / "events.jsonl").touch()
        self._backend, self._endpoint, self._workers, self._program = backend, endpoint, workers, program
        self._tick = threading.Event()
        self.agents: dict[str, Agent] = {}
        self._struck: list[Agent] = []
        self.recalls: list[Recall] = []
        """Of our own backend's rounds. Only the watch's thread adds to it."""

    def __enter__(self) -> Job:
        self._stack.enter_context(no_orphans())
        if self._backend == OURS:
            client = self._stack.enter_context(EtcdClient(self._endpoint))
            client.watch(Span(decided_key(SETTINGS.prefix)), 1, self._on_decided)
        return self

    def __exit__(self, *_: object) -> None:
        agents = [*self.agents.values(), *self._struck]
        for agent in agents:
            agent.process.kill()
        self._stack.close()
        for agent in agents:
            agent.process.wait()

    def start(self, name: str) -> None:
        """Start an agent; the first one hosts c10d's store."""
        torchrun = [
            "--nnodes=2:3",
            f"--nproc-per-node={self._workers}",
            "--max-restarts=100",
            "--local-addr=127.0.0.1",
            f"--rdzv-backend={self._backend}",
            f"--rdzv-endpoint={self._endpoint}",
            f"--rdzv-id={SETTINGS.run_id}",
        ]
        if self._backend == C10D:
            torchrun.append(f"--rdzv-conf=is_host={not self.agents}")
        self.agents[name] = Agent(name, self._folder, torchrun, [str(_WORKER), str(self._folder)], self._program)

    def begin(self, names: Sequence[str]) -> None:
        """Start these, and wait until all their workers run. Raises BenchmarkError."""
        for name in names:
            self.start(name)
        if not self.wait(lambda: math.isfinite(self.running_at()), PATIENCE):
            raise BenchmarkError(f"no first round of {len(names)} agents with {self._backend}:\n{self.logs()}")

    # -- what happens to it -------------------------------------------------------------------------------------

    def strike(self, name: str, how: Callable[[Agent], None]) -> float:
        """Do this to an agent that is not heard of again; when (monotonic)."""
        agent = self.agents.pop(name)
        self._struck.append(agent)
        at = time.monotonic()
        how(agent)
        return at

    def fail_worker(self) -> float:
        """Have the worker with the highest rank exit with 1, so that its peers hang; when it did (monotonic)."""
        after, rank = time.monotonic(), len(self.agents) * self._workers - 1
        (self._folder / "fail").write_text(str(rank))
        if not self.wait(lambda: bool(self.events("failing", after)), PATIENCE):
            raise BenchmarkError(f"no worker failed with {self._backend}:\n{self.logs()}")
        return self.events("failing", after)[0].at

    def leader(self) -> str:
        """The agent with rank 0; with c10d the one that hosts the store."""
        return next(iter(self.agents)) if self._backend == C10D else self._by_rank()[0]

    def follower(self) -> str:
        """The agent with the highest rank; with c10d not the one that hosts the store."""
        return next(name for name in reversed(self._by_rank()) if name != self.leader())

    def _by_rank(self) -> list[str]:
        ranks = {event.agent: event.rank for event in self.events("running")}
        return sorted(self.agents, key=lambda name: ranks[name])

    # -- what is seen of it -------------------------------------------------------------------------------------

    def events(self, kind: str, after: float = -math.inf) -> list[Event]:
        lines = (self._folder / "events.jsonl").read_text().splitlines(keepends=True)
        events = [Event(**json.loads(line)) for line in lines if line.endswith("\n")]
        return [event for event in events if event.event == kind and event.at > after]

    def running_at(self, after: float = -math.inf) -> float:
        """When the last of the present agents' workers began to run in a round of just these; infinite if not yet."""
        firsts: dict[int, float] = {}
        agents = set()
        for event in self.events("running", after):
            if event.world == len(self.agents) * self._workers:
                firsts.setdefault(event.rank, event.at)
                agents.add(event.agent)
        whole = len(firsts) == len(self.agents) * self._workers and agents == self.agents.keys()
        return max(firsts.values()) if whole else math.inf

    def restarts(self, after: float) -> int:
        """How often an agent has started its workers since; the most of any."""
        started = [event.agent for event in self.events("started", after)]
        return max((started.count(name) for name in self.agents), default=0) // self._workers

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

    def logs(self) -> str:
        return "\n".join(f"--- {agent.name}\n{agent.log.read_text(errors='replace')}" for agent in self.agents.values())

    def _on_decided(self, item: WatchItem) -> None:
        now = time.monotonic()
        for event in item.events if isinstance(item, Batch) else ():
            if event.kind == "put" and (why := parse_decided(event.kv.key, event.kv.value).recalled):
                self.recalls.append(Recall(now, why))


def freeze(agent: Agent) -> None:
    """Stop the agent and all below it, its sentinel too: for the others its host is gone."""
    for pid in [*descendants(agent.pid), agent.pid]:
        os.kill(pid, signal.SIGSTOP)


def _add(job: Job) -> float:
    at = time.monotonic()
    job.start("d")
    return at


CASES: Final = (
    Case(
        "one of 3 agents killed, not rank 0",
        3,
        lambda job: job.strike(job.follower(), Agent.kill),
        150,
        targets=(Target("recalled", 0.3, 1.0), Target("all_running", 4.0)),
        rivals=(C10D, ETCD_V2),
    ),
    Case(
        "rank 0's agent of 3 killed, with c10d's store",
        3,
        lambda job: job.strike(job.leader(), Agent.kill),
        150,
        targets=(Target("all_running", 4.0),),
    ),
    Case(
        "one of 3 hosts lost",
        3,
        lambda job: job.strike(job.follower(), freeze),
        60,
        targets=(Target("recalled", TTL + 1.0),),
    ),
    Case(
        "one of 6 workers exits with status 1, its peers hang",
        3,
        lambda job: job.fail_worker(),
        150,
        workers=2,
        targets=(Target("all_running", 4.0),),
    ),
    Case("third agent started", 2, _add, 90, rivals=(C10D, ETCD_V2)),
)


def recover(backend: str, case: Case, phase: float) -> Recovery:
    """One trial; `phase` (0 to 1) is where between two lease renewals it happens. Raises BenchmarkError."""
    with endpoint_for(backend) as endpoint, Job(backend, endpoint, case.workers) as job:
        job.begin("abc"[: case.agents])
        job.pause(BEFORE + phase * RENEWAL)
        at = case.happens(job)
        job.wait(lambda: math.isfinite(job.running_at(at)) or job.dead(), case.limit)
        first = min((event.at for event in job.events("started", at)), default=math.inf)
        unheard = Recall(math.inf if backend == OURS else math.nan, "")
        recall = next((one for one in job.recalls if one.at > at), unheard)
        return Recovery(recall.at - at, first - at, job.running_at(at) - at, job.dead(), recall.why)


def spread(repeats: int) -> Sequence[float]:
    """Phases for so many trials, evenly over the time between two renewals."""
    return [(index + 0.5) / repeats for index in range(repeats)]
