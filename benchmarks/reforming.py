"""How long replicas are without a quorum when one of them dies, or what coordinates them does."""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Final, TypeAlias

from benchmarks.lighthouses import KINDS, OURS, TIMEOUT, TORCHFT, classes, job_at, lighthouse, serving
from benchmarks.processes import BenchmarkError, Processes, free_port
from benchmarks.report import measured_with, publish, table
from ftcoord.embedded.server import EtcdServer
from tests.below import descendants
from tests.etcd_cluster import EtcdCluster

RENEWAL: Final = 5 / 3
"""Seconds between two renewals of a lease for the default heartbeat timeout of 5 s: deaths are spread over this."""
BEFORE: Final = 2.0
"""Seconds that a replica lives before it dies: it has its sentinel by then."""
ATTEMPT: Final = timedelta(seconds=5)
"""What a replica waits for one quorum when the coordinator is killed; it then asks again."""
TARGET: Final = 0.5
"""Seconds without a quorum, in the median, when a replica's process dies."""
LIMIT: Final = 30.0
"""Seconds after which no quorum is called never."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a replica was told at last.

    Args:
        at: when, on the monotonic clock.
        quorum_id: 0 when there was none within the limit.
        failures: how many calls had failed before, and the text of the last of these.
    """

    at: float
    quorum_id: int
    failures: int = 0
    problem: str = ""


def _replica(pipe: Connection, numbers: Sequence[int], kind: str, address: str, name: str) -> None:
    """A replica group of one rank, in this process; `ask` it with the seconds after which to give up, and
    how many commits have failed."""
    logging.disable(logging.WARNING)
    server_class, client_class = classes(kind)
    beat = timedelta(milliseconds=100)
    server = server_class(name, address, "localhost", "[::]:0", "store:1", 1, beat, TIMEOUT, 0)
    client = client_class(server.address(), TIMEOUT)
    pipe.send(None)
    for step in range(1, 2**31):
        limit, commit_failures = pipe.recv()
        pipe.send(_ask(client._quorum, step, commit_failures, time.monotonic() + limit))


def _ask(quorum: Callable[..., object], step: int, commit_failures: int, deadline: float) -> Reply:
    failures, problem = 0, ""
    while time.monotonic() < deadline:
        try:
            found = quorum(0, step, "metadata", False, True, commit_failures, ATTEMPT)
            return Reply(time.monotonic(), int(getattr(found, "quorum_id")), failures, problem)  # noqa: B009
        except (TimeoutError, RuntimeError) as error:
            failures, problem = failures + 1, type(error).__name__
    return Reply(math.inf, 0, failures, problem)


class Replicas:
    """Replicas, one at each address, each a process; context manager."""

    def __init__(self, kind: str, addresses: Sequence[str]) -> None:
        self._stack = contextlib.ExitStack()
        self._all = [
            Processes(1, _replica, kind, address, f"replica_{number}") for number, address in enumerate(addresses)
        ]

    def __enter__(self) -> Replicas:
        for one in self._all:
            self._stack.enter_context(one)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ask(self, commit_failures: int = 0) -> list[Reply]:
        """All ask together."""
        with ThreadPoolExecutor(len(self._all)) as pool:
            return [reply for (reply,) in pool.map(lambda one: one.ask((LIMIT, commit_failures)), self._all)]

    def ask_rest(self) -> list[Reply]:
        """All but the first one ask, now and from now on."""
        self._all.pop(0)
        return self.ask()

    def kill(self) -> None:
        """Kill -9 the first one."""
        self._all.pop(0).__exit__()

    def lose_host(self) -> None:
        """Stop the first one, and what is beside it."""
        for pid in self._all.pop(0).pids:
            for below in descendants(pid):
                os.kill(below, signal.SIGSTOP)
                self._stack.callback(os.kill, below, signal.SIGKILL)  # it would stay stopped
            os.kill(pid, signal.SIGSTOP)


DEATHS: Final[Sequence[tuple[str, Callable[[Replicas], None]]]] = (
    ("killed with -9", Replicas.kill),
    ("stopped, with its sentinel", Replicas.lose_host),
)


def death(kind: str, happens: Callable[[Replicas], None], phase: float) -> float:
    """Seconds from the death of one of three until the others have a quorum."""
    with serving(kind, 2) as (address, _), Replicas(kind, [address] * 3) as replicas:
        replicas.ask()
        time.sleep(BEFORE + phase * RENEWAL)
        began = time.monotonic()
        happens(replicas)
        return max(reply.at for reply in replicas.ask()) - began


@dataclass(frozen=True, slots=True)
class Outage:
    """Seconds from the kill to the next quorum; its id, and that of the last one before; calls that failed of each."""

    seconds: float
    before: int
    after: int
    failures: int
    problem: str


Coordinator: TypeAlias = tuple[Sequence[str], Callable[[], object], Callable[[], object]]
"""The address of each of two replicas, how to kill what is at the first, and how to start that again there."""


@contextlib.contextmanager
def torchfts() -> Iterator[Coordinator]:
    """A lighthouse in a process of its own."""
    port = free_port()
    context = multiprocessing.get_context("forkserver")
    processes = []

    def start() -> None:
        ready, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=_light, args=(port, theirs), daemon=True))
        processes[-1].start()
        if not ready.poll(TIMEOUT.total_seconds()):
            raise BenchmarkError("the lighthouse did not start")

    start()
    try:
        yield [f"http://127.0.0.1:{port}"] * 2, lambda: processes[-1].kill(), start
    finally:
        processes[-1].kill()


def _light(port: int, ready: Connection) -> None:
    server = lighthouse(2, f"127.0.0.1:{port}")
    ready.send(server.address())
    multiprocessing.Event().wait()


@contextlib.contextmanager
def single() -> Iterator[Coordinator]:
    """One etcd."""
    with EtcdServer() as etcd:  # it is killed: a release that would lose a write then must commit each by itself
        yield [job_at(etcd.get_endpoint(), 2)] * 2, etcd.kill, etcd.restart


@contextlib.contextmanager
def three() -> Iterator[Coordinator]:
    """Three etcd members, of which the leader is killed."""
    with EtcdCluster(3) as cluster:
        yield [job_at(cluster.endpoints, 2)] * 2, lambda: cluster.kill(cluster.leader()), lambda: None


OUTAGES: Final[Sequence[tuple[str, str, Callable[[], AbstractContextManager[Coordinator]], bool]]] = (
    ("torchft's lighthouse, restarted at once", TORCHFT, torchfts, True),
    ("torchft's lighthouse, its host lost", TORCHFT, torchfts, False),
    ("ftcoord's only etcd server, restarted at once", OURS, single, True),
    ("the leader of ftcoord's three etcd members, its host lost", OURS, three, False),
)


def outage(
    kind: str, case: Callable[[], AbstractContextManager[Coordinator]], restart: bool, pause: float = 0.0
) -> Outage:
    """Two replicas in mid-training when their coordinator is killed, and perhaps started again, `pause` s later."""
    with case() as (addresses, kill, start), Replicas(kind, addresses) as replicas:
        for _ in range(3):
            replicas.ask(commit_failures=1)  # each gives a new quorum id
        before = max(reply.quorum_id for reply in replicas.ask())
        began = time.monotonic()
        kill()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(replicas.ask)
            if restart:
                time.sleep(pause)
                start()
            replies = asked.result()
        last = max(replies, key=lambda reply: reply.at)
        return Outage(last.at - began, before, last.quorum_id, last.failures, last.problem)


def run(trials: int) -> str:
    """Measure, and tell it in Markdown."""
    phases = [(number + 0.5) / trials for number in range(trials)]
    rows = []
    for title, happens in DEATHS:
        for kind in KINDS:
            times = []
            for phase in phases:
                times.append(death(kind, happens, phase))
                _say(f"{kind}, {title}: {times[-1]:.2f} s")
            reached = "met" if median(times) <= TARGET else "not met"
            target = f"{TARGET:g} s: {reached}" if happens is Replicas.kill and kind != TORCHFT else "-"
            rows.append([title, kind, _seconds(median(times)), _seconds(max(times)), target])
    cases = []
    for title, kind, case, restart in OUTAGES:
        cases.append((title, outage(kind, case, restart)))
        _say(f"{title}: {cases[-1][1].seconds:.2f} s")
    header = ["killed", "next quorum after, s", "calls that failed", "quorum id before", "after"]
    return f"""## A replica or its coordinator dies

`python -m benchmarks.reforming`, {measured_with()}

### A replica dies

One of three replicas dies, and the other two ask at once; heartbeat timeout 5 s. Seconds until both have a quorum, of
{trials} trials.

{table(["one is", "", "median", "worst", "target"], rows)}
### The coordinator is killed

With -9, while two replicas train, and retry `_quorum` with a timeout of {ATTEMPT.total_seconds():g} s.

{table(header, [_row(*case) for case in cases])}"""


def _row(title: str, one: Outage) -> list[str]:
    failed = f"{one.failures} ({one.problem})" if one.failures else "none"
    return [title, _seconds(one.seconds), failed, str(one.before), str(one.after) if one.after else "none"]


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if math.isfinite(seconds) else f"not in {LIMIT:g} s"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reforming", description="Measure deaths of replicas.")
    parser.add_argument("--trials", type=int, default=10, help="deaths of each kind")
    parser.add_argument("--write", type=Path, metavar="FILE", help="report whose section to replace; default: print it")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    publish(run(options.trials), options.write)


if __name__ == "__main__":
    main()
