"""How long replicas are without a quorum when the one that decides is killed, dropped, frozen or shut down, or when the
gateway that they ask at is killed.

With torchft the lighthouse decides, so there each of the former is the death of one replica like any other.
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

from benchmarks.lighthouses import OURS, TORCHFT, classes
from benchmarks.metrics import AS_ETCD_DOES
from benchmarks.processes import Processes, free_port
from benchmarks.reforming import Coordinator, Replicas, outage, torchfts
from benchmarks.report import run_alone, table
from ftcoord.coordination import Gateway
from ftcoord.embedded.server import EtcdServer

TIMEOUT: Final = timedelta(seconds=60)
JOIN_TIMEOUT_MS: Final = 100
BEAT, ASK, DROP, PID, LOSE, LEAVE = "beat", "ask", "drop", "pid", "lose", "leave"
BACK_AFTER: Final = 1.0
"""Seconds until a gateway that was killed is back."""


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


def _manager(pipe: Connection, numbers: Sequence[int], kind: str, address: str, name: str) -> None:
    """A replica group of one rank, with its manager, which answers as `_replica` does."""
    logging.disable(logging.WARNING)
    server_class, rank_class = classes(kind)

    def make() -> tuple[Any, Any]:
        beat = timedelta(milliseconds=100)
        server = server_class(name, address, "localhost", "[::]:0", "store:1", 1, beat, TIMEOUT, 0)
        return server, rank_class(server.address(), TIMEOUT)

    server, rank = make()
    pipe.send(None)
    for step in range(1, 2**31):
        order = pipe.recv()
        if order in (DROP, LOSE):
            del server, rank
            gc.collect()
        if order == DROP:
            server, rank = make()
        elif order == LEAVE:
            server.shutdown()
        elif order == ASK:
            rank._quorum(0, step, "metadata", False, True, 0, TIMEOUT)
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


def _two_lost(group: Group, new: Processes) -> Group:
    """The first two drop their managers."""
    for one in group[:2]:
        one.ask(LOSE)
    return group[2:]


def _left(group: Group, new: Processes) -> Group:
    """The first one is shut down; the others ask."""
    group[0].ask(LEAVE)
    return group[1:]


@dataclass(frozen=True, slots=True)
class Case:
    """What happens to the replica that decides, at which heartbeat timeout, in a job of how many, and of which kind
    the replicas are."""

    title: str
    happens: Callable[[Group, Processes], Group]
    heartbeat_timeout_ms: int = 5000
    replicas: int = 2
    serve: Callable[..., None] = _replica


CASES: Final = (
    Case("killed with -9, and restarted under its id", _killed),
    Case("the same, heartbeat timeout 1 s", _killed, 1000),
    Case("its client is dropped, and made again", _dropped),
    Case("the same, heartbeat timeout 20 s", _dropped, 20_000),
    Case("frozen; two others ask, join timeout 0.1 s", _frozen, replicas=3),
    Case("its ManagerServer is dropped, and made again", _dropped, serve=_manager),
    Case("two of four drop their ManagerServer", _two_lost, replicas=4, serve=_manager),
    Case("its ManagerServer is shut down; two others ask", _left, replicas=3, serve=_manager),
)


def measure(kind: str, case: Case) -> float:
    """Seconds from when it happens until all that ask have a quorum."""
    with _serving(kind, case.heartbeat_timeout_ms, 2) as address, contextlib.ExitStack() as stack:
        names = [f"replica_{number}" for number in range(case.replicas)]
        group = [stack.enter_context(Processes(1, case.serve, kind, address, name)) for name in names]
        new = stack.enter_context(Processes(1, _replica, kind, address, names[0]))
        for one in group:  # one after the other: the first member decides
            one.ask(BEAT)
        for _ in range(2):
            _ask(group)
        began = time.monotonic()
        after = case.happens(group, new)
        return _ask(after) - began


@contextlib.contextmanager
def _gateways() -> Iterator[Coordinator]:
    """Two gateways of one job, each a process; what happens, happens to the first."""
    with EtcdServer(extra_args=AS_ETCD_DOES) as etcd, contextlib.ExitStack() as stack:
        rules = f"min_replicas=2&join_timeout_ms={JOIN_TIMEOUT_MS}"
        job, ports = f"etcd://{etcd.get_endpoint()}/restarts?{rules}", (free_port(), free_port())
        first, _ = [stack.enter_context(Processes(1, _gateway, job, port)) for port in ports]
        addresses = [f"http://127.0.0.1:{port}" for port in ports]
        yield addresses, first.__exit__, lambda: stack.enter_context(Processes(1, _gateway, job, ports[0]))


@contextlib.contextmanager
def _gateway_of_both() -> Iterator[Coordinator]:
    """Both replicas are at the one that is killed."""
    with _gateways() as ((address, _), kill, start):
        yield [address] * 2, kill, start


def _at_another() -> float:
    """Seconds from the death of one of two gateways until two replicas that are at the other have a quorum, without
    the one that was at it."""
    with _gateways() as ((dead, other), kill, _), Replicas(TORCHFT, [dead, other, other]) as replicas:
        for _ in range(2):
            replicas.ask()
        began = time.monotonic()
        kill()
        return max(reply.at for reply in replicas.ask_rest()) - began


def _gateway(pipe: Connection, numbers: Sequence[int], job: str, port: int) -> None:
    logging.disable(logging.WARNING)
    with Gateway(job, f"127.0.0.1:{port}"):
        pipe.send(None)
        pipe.recv()


def _outages(trials: int) -> list[list[str]]:
    """Native replicas, whose gateway or lighthouse is killed. torchft has one lighthouse at most."""
    back = [
        [outage(TORCHFT, case, True, BACK_AFTER).seconds for _ in range(trials)]
        for case in (_gateway_of_both, torchfts)
    ]
    away = [_at_another() for _ in range(trials)]
    return [
        [f"it is killed, and back after {BACK_AFTER:g} s", *map(_spread, back)],
        ["one of two is killed; two replicas at the other one ask", _spread(away), "-"],
    ]


def _spread(times: Sequence[float]) -> str:
    return f"{median(times):.2f} / {max(times):.2f}"


def run(trials: int) -> str:
    """Measure, and tell it in Markdown."""
    rows = []
    for case in CASES:
        times = {kind: [measure(kind, case) for _ in range(trials)] for kind in (OURS, TORCHFT)}
        rows.append([case.title, *(_spread(times[kind]) for kind in times)])
    return f"""## The replica that decides is killed, dropped, frozen or shut down

`python -m benchmarks.restarts`: seconds from the event until all asking replicas have a quorum, median / worst of
{trials} trials. torchft's decider is its lighthouse, which stays alive.

{table(["what happens to it", OURS, TORCHFT], rows)}
Two native torchft replicas, behind ftcoord's gateway or at torchft's lighthouse; failed calls are retried:

{table(["what happens", "gateway", "lighthouse"], _outages(trials))}"""


if __name__ == "__main__":
    run_alone("benchmarks.restarts", run, 10)
