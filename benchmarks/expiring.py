"""What timers cost, and how late those are that expire: ours and torch's, each in processes of their own."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any, Final

from torch.distributed.elastic import timer
from torch.distributed.elastic.timer import FileTimerClient, FileTimerServer, LocalTimerClient, LocalTimerServer

from benchmarks.metrics import AS_ETCD_DOES
from benchmarks.processes import PATIENCE, BenchmarkError
from ftcoord.embedded.server import EtcdServer
from ftcoord.timer.etcd_timer import EtcdTimerClient, EtcdTimerServer

OURS, LOCAL, FILE = KINDS = ("EtcdTimerClient", "LocalTimerClient", "FileTimerClient")
INTERVAL: Final = 0.1
"""Seconds between two looks of torch's servers: what its agent sets (the default of LocalTimerServer is 60)."""
AFTER: Final = 0.2
"""Seconds after which the timers expire whose lateness is measured."""
LONG: Final = 600.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])

Make = Callable[[], timer.TimerClient]


@contextlib.contextmanager
def serving(kind: str, reaping: bool) -> Iterator[Make]:
    """What makes clients of a running server. That of files kills its own process with the worker: it gets one."""
    with contextlib.ExitStack() as stack:
        if kind == OURS:
            etcd = stack.enter_context(EtcdServer(extra_args=AS_ETCD_DOES))
            ours = EtcdTimerServer("benchmark", etcd.get_endpoint())
            ours.start()
            stack.callback(ours.stop)
            if reaping:
                threading.Event().wait(3)  # it kills nobody in its first seconds
            yield partial(EtcdTimerClient, "benchmark", etcd.get_endpoint(), timeout=PATIENCE)
        elif kind == LOCAL:
            queue: Any = _context.Queue()
            local = LocalTimerServer(queue, max_interval=INTERVAL)
            local.start()
            stack.callback(local.stop)
            yield partial(LocalTimerClient, queue)
        else:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "timers"
            with _process(_serve_file, path) as (pipe, _):
                _answer(pipe)
                yield partial(FileTimerClient, str(path))


def measure_cost(kind: str, repeat: int) -> tuple[float, float]:
    """Median seconds of an acquire and of a release, by turns, in a process of its own."""
    with serving(kind, reaping=False) as make, _process(_take_turns, make, repeat) as (pipe, _):
        acquires, releases = _answer(pipe)
        return median(acquires), median(releases)


def measure_lateness(kind: str, trials: int) -> list[float]:
    """Seconds by which workers are killed too late, one by one."""
    found: list[float] = []
    with contextlib.ExitStack() as stack:
        make = None
        while len(found) < trials:
            if kind == FILE:
                stack.close()
            if make is None or kind == FILE:
                make = stack.enter_context(serving(kind, reaping=True))
            found.append(_lateness(make))
    return found


def _lateness(make: Make) -> float:
    with _process(_hang, make) as (pipe, process):
        begun = float(_answer(pipe))
        if not wait([process.sentinel], PATIENCE):
            raise BenchmarkError(f"a worker was not killed within {PATIENCE:g} s")
        return time.monotonic() - begun - AFTER


@contextlib.contextmanager
def _process(target: Callable[..., None], *arguments: Any) -> Iterator[tuple[Connection, Any]]:
    mine, theirs = _context.Pipe()
    process = _context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield mine, process
    finally:
        process.kill()
        process.join()
        mine.close()


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(PATIENCE):
        raise BenchmarkError(f"a process did not answer within {PATIENCE:g} s")
    return pipe.recv()


def _serve_file(pipe: Connection, path: Path) -> None:
    server = FileTimerServer(str(path), "benchmark", max_interval=INTERVAL)
    server.start()
    pipe.send(None)
    threading.Event().wait()


def _take_turns(pipe: Connection, make: Make, repeat: int) -> None:
    client, acquires, releases = make(), [], []
    for number in range(repeat + 20):
        begun = time.perf_counter()
        client.acquire("scope", time.time() + LONG)
        between = time.perf_counter()
        client.release("scope")
        if number >= 20:
            acquires.append(between - begun)
            releases.append(time.perf_counter() - between)
    pipe.send((acquires, releases))
    threading.Event().wait()


def _hang(pipe: Connection, make: Make) -> None:
    client = make()
    client.acquire("warm", time.time() + LONG)
    client.release("warm")
    pipe.send(time.monotonic())
    with timer.expires(AFTER, client=client):
        threading.Event().wait()
