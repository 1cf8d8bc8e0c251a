"""Many rendezvous handlers over a few processes, made through torch's registry and driven in step."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

import ftcoord.rendezvous.handler  # noqa: F401  # warm, as torch's own backends are: the registry imported those
from benchmarks.metrics import AS_ETCD_DOES
from benchmarks.processes import BenchmarkError, Made, Processes, making
from ftcoord.embedded.server import EtcdServer

OURS, *_ = BACKENDS = ("etcd-v3", "c10d", "etcd-v2")
REQUEST_TIMEOUT: Final = 5.0
"""Seconds: the default."""
MONITOR_INTERVAL: Final = 0.1
"""Seconds between two looks of an agent at `num_nodes_waiting()`: torchrun's default."""


@dataclass(frozen=True, slots=True)
class Joined:
    """One round: seconds until the last node had it, and CPU seconds that all nodes together used for it."""

    seconds: float
    cpu: float


class Nodes(Processes):
    """`count` nodes of one run, min = max = `count`, each a handler of its own; context manager.

    All handlers exist, and are connected, when it is entered.
    """

    def __init__(self, backend: str, endpoint: str, count: int) -> None:
        super().__init__(count, _serve, backend, endpoint, count)
        self._count = count

    @property
    def made(self) -> Made:
        """What making the handlers took."""
        return Made.of_all(self.ready)

    def join(self) -> Joined:
        """All call next_rendezvous together."""
        started_at = time.monotonic()
        answers = self.ask(("join", 0.0))
        ranks = sorted(rank for _, _, seats in answers for rank, world in seats if world == self._count)
        if ranks != list(range(self._count)):
            raise BenchmarkError(f"{self._count} nodes left next_rendezvous with the ranks {ranks}")
        return Joined(max(left_at for left_at, _, _ in answers) - started_at, sum(cpu for _, cpu, _ in answers))

    def idle(self, seconds: float) -> None:
        """Do for that long what an agent does while its workers run."""
        self.ask(("idle", seconds))


@contextlib.contextmanager
def endpoint_for(backend: str) -> Iterator[str]:
    """A fresh etcd for the backends that need one, a free port for c10d's store."""
    if backend == "c10d":
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        yield f"127.0.0.1:{port}"
    else:
        with EtcdServer(extra_args=[*AS_ETCD_DOES, "--enable-v2=true"]) as server:
            yield server.get_endpoint()


def _serve(pipe: Connection, nodes: Sequence[int], backend: str, endpoint: str, count: int) -> None:
    logging.disable(logging.WARNING)
    handlers, made = making(lambda: [_create(backend, endpoint, count, node) for node in nodes])
    with ThreadPoolExecutor(len(handlers)) as pool:
        pipe.send(made)
        while True:
            command, seconds = pipe.recv()
            if command == "join":
                cpu = time.process_time()
                seats = list(pool.map(_join, handlers))
                pipe.send((time.monotonic(), time.process_time() - cpu, seats))
            else:
                _idle(handlers, seconds)
                pipe.send("idled")


def _create(backend: str, endpoint: str, count: int, node: int) -> RendezvousHandler:
    # On one host every node would take itself for the host of c10d's store.
    config: dict[str, object] = {"is_host": node == 0} if backend == "c10d" else {}
    if backend == OURS:  # no two alike, or the handlers of a process would share a connection, which hosts cannot
        config["request_timeout"] = REQUEST_TIMEOUT + node / 1e6
    return get_rendezvous_handler(
        RendezvousParameters(backend, endpoint, "benchmark", count, count, "127.0.0.1", **config)
    )


def _join(handler: RendezvousHandler) -> tuple[int, int]:
    info = handler.next_rendezvous()
    return info.rank, info.world_size


def _idle(handlers: Sequence[RendezvousHandler], seconds: float) -> None:
    end = time.monotonic() + seconds
    interval = threading.Event()
    while time.monotonic() < end:
        for handler in handlers:
            handler.num_nodes_waiting()
        interval.wait(MONITOR_INTERVAL)
