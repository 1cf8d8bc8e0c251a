"""Agents that live, but get no processor, or are stuck, or are stopped for a while: how many are taken for dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from benchmarks.failover import BEFORE, RENEWAL, TORCHRUN, TTL, Job
from benchmarks.nodes import endpoint_for
from benchmarks.stuck_agent import HANG

LOAD: Final = 20
"""Processes that want a whole processor each."""
LOADED: Final = 60.0
"""Seconds that they run in each trial."""
STOPPED: Final = 0.9 * TTL
AFTERMATH: Final = 10.0
"""Seconds within which workers would be started again, had their agent been taken for dead."""


@dataclass(frozen=True, slots=True)
class Starving:
    """How three agents, or one of them, are kept from working for a while; `program` is what is run as torchrun."""

    title: str
    starve: Callable[[Job], None]
    program: str = TORCHRUN


def _load(job: Job) -> None:
    with ExitStack() as ends:
        for _ in range(LOAD):
            # In sessions of their own, as the agents are: the kernel shares out the processors by session
            # (sched_autogroup_enabled), so all of one session would get no more than one agent does.
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
            ends.callback(busy.wait)
            ends.callback(busy.kill)
        job.pause(LOADED)


def _stick(job: Job) -> None:
    os.kill(job.agents[job.follower()].pid, signal.SIGUSR1)
    job.pause(HANG)


def _stop(job: Job) -> None:
    pid = job.agents[job.follower()].pid
    os.kill(pid, signal.SIGSTOP)
    job.pause(STOPPED)
    os.kill(pid, signal.SIGCONT)


STARVING: Final = (
    Starving(f"{LOAD} busy processes beside all three, for {LOADED:g} s", _load),
    Starving(f"one is stuck in C, with the interpreter's lock held, for {HANG} s", _stick, "benchmarks.stuck_agent"),
    Starving(f"one is stopped for 0.9 of the lease's TTL of {TTL} s", _stop),
)


@dataclass(frozen=True, slots=True)
class Starved:
    """How often workers were started again in one trial, and what our own agents were told."""

    restarts: int
    why: tuple[str, ...]


def starve(backend: str, case: Starving, phase: float) -> Starved:
    """One trial; `phase` (0 to 1) is where between two lease renewals it begins. Raises BenchmarkError."""
    with endpoint_for(backend) as endpoint, Job(backend, endpoint, program=case.program) as job:
        job.begin("abc")
        job.pause(BEFORE + phase * RENEWAL)
        running_at = job.running_at()
        case.starve(job)
        job.pause(AFTERMATH)
        return Starved(job.restarts(running_at), tuple(one.why for one in job.recalls if one.at > running_at))
