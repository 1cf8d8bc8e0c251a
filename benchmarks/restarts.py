"""How long replicas are without a quorum when the one that decides is killed, dropped or frozen, and another takes its
name at once.

With torchft the lighthouse decides, so there each of these is the death of one replica like any other.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, Final

from benchmarks.lighthouses import OURS, TORCHFT
from benchmarks.metrics import AS_ETCD_DOES
from benchmarks.processes import Processes
from benchmarks.report import table
from ftcoord.embedded.server import EtcdServer

TIMEOUT: Final = timedelta(seconds=60)
JOIN_TIMEOUT_MS: Final = 100
BEAT, ASK, DROP, PID = "beat", "ask", "drop", "pid"


def _client_class(kind: str) -> Any:
    if kind == TORCHFT:
        from torchft._torchft import LighthouseClient as NativeClient

        return NativeClient
    from ftcoord.coordination import LighthouseClient

    return LighthouseClient


def _replica(pipe: Connection, numbers: Sequence[int], kind: str, address: str, name: str) -> None:
    """A replica in this process, which answers each order with the monotonic time, or with its pid."""
    logging.disable(logging.WARNING)
    client_class = _client_class(kind)
    client = client_class(address, TIMEOUT)
    pipe.send(None)
    for step in range(1, 2**31):
        order = pipe.recv()
        if order == DROP:
            del client
            gc.collect()
            client = client_class(address, TIMEOUT)
        elif order == BEAT:
            client.heartbeat(name)
        elif order == ASK:
            client.quorum(replica_id=name, timeout=TIMEOUT, step=step)
        pipe.send(os.getpid() if order == PID else time.monotonic())


@contextlib.contextmanager
def _serving(kind: str, heartbeat_timeout_ms: int, min_replicas: int) -> Iterator[str]:
    if kind == TORCHFT:
        from torchft._torchft import LighthouseServer

        server = LighthouseServer("[::]:0", min_replicas, JOIN_TIMEOUT_MS, 100, heartbeat_timeout_ms)
        yield server.address()
        server.shutdown()
        return
    with EtcdServer(extra_args=AS_ETCD_DOES) as etcd:
        rules = f"min_replicas={min_replicas}&join_timeout_ms={JOIN_TIMEOUT_MS}"
        yield f"etcd://{etcd.get_endpoint()}/restarts?{rules}&heartbeat_timeout_ms={heartbeat_timeout_ms}"


Group = list[Processes]


def _ask(group: Group) -> float:
    """All ask together; when the last one was answered, on the monotonic clock."""
    with ThreadPoolExecutor(len(group)) as pool:
        return max(float(at) for (at,) in pool.map(lambda one: one.ask(ASK), group))


def _killed(group: Group, new: Processes) -> Group:
    """The first one is killed with -9, and `new` takes its name."""
    group[0].__exit__()
    return [new, *group[1:]]


def _dropped(group: Group, new: Processes) -> Group:
    """The first one drops its client, and makes another."""
    group[0].ask(DROP)
    return group


def _frozen(group: Group, new: Processes) -> Group:
    """The first one is stopped; the others ask."""
    (pid,) = group[0].ask(PID)
    os.kill(pid, signal.SIGSTOP)
    return group[1:]


@dataclass(frozen=True, slots=True)
class Case:
    """What happens to the replica that decides, at which heartbeat time-out, in a job of how many."""

    title: str
    happens: Callable[[Group, Processes], Group]
    heartbeat_timeout_ms: int = 5000
    replicas: int = 2


CASES: Final = (
    Case("killed with -9, and started again under its id", _killed),
    Case("the same, heartbeat time-out 1 s", _killed, 1000),
    Case("its client is dropped, and made again", _dropped),
    Case("the same, heartbeat time-out 20 s", _dropped, 20_000),
    Case("frozen; two others ask, join time-out 0.1 s", _frozen, replicas=3),
)


def measure(kind: str, case: Case) -> float:
    """Seconds from when the others ask until all have a quorum."""
    with _serving(kind, case.heartbeat_timeout_ms, 2) as address, contextlib.ExitStack() as stack:
        names = [f"replica_{number}" for number in range(case.replicas)]
        group = [stack.enter_context(Processes(1, _replica, kind, address, name)) for name in names]
        new = stack.enter_context(Processes(1, _replica, kind, address, names[0]))
        for one in group:  # one after the other: the first member decides
            one.ask(BEAT)
        for _ in range(2):
            _ask(group)
        after = case.happens(group, new)
        began = time.monotonic()
        return _ask(after) - began


def run(trials: int) -> str:
    """Measure, and tell it in Markdown."""
    rows = []
    for case in CASES:
        times = {kind: [measure(kind, case) for _ in range(trials)] for kind in (OURS, TORCHFT)}
        rows.append([case.title, *(f"{median(times[kind]):.2f} / {max(times[kind]):.2f}" for kind in times)])
    return f"""### The replica that decides is killed, dropped or frozen

Seconds from when the others ask until all who ask have a quorum: median / worst of {trials} trials. With torchft the
lighthouse decides, and lives.

{table(["what happens to it", OURS, TORCHFT], rows)}"""
