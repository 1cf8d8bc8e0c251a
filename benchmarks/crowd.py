"""Many clients of one store, over a few processes, that do one thing together."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Final, Generic, TypeVar

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.utils.store import barrier

from benchmarks.metrics import AS_ETCD_DOES
from benchmarks.processes import PATIENCE, PROCESSES, Processes, free_port
from ftcoord.embedded.server import EtcdServer
from ftcoord.store import EtcdStore

STORES: Final = ("EtcdStore", "TCPStore", "legacy EtcdStore")
TIMEOUT: Final = timedelta(seconds=120)
T = TypeVar("T")


def add(store: Store, key: str) -> None:
    """Add to the same number as all others."""
    store.add(key, 1)


def wait(store: Store, count: int) -> None:
    """Wait for keys that are there."""
    store.wait([f"there/{number}" for number in range(count)])


def meet(store: Store, key: str, count: int) -> None:
    """A barrier."""
    barrier(store, count, key, TIMEOUT.total_seconds())


def warm(store: Store) -> None:
    """The first operation, which connects."""
    store.set("warm", "x")
    store.get("warm")


def make_store(kind: str, endpoint: str, _number: int = 0) -> Store:
    """A client of the store."""
    if kind == "EtcdStore":
        return EtcdStore(endpoint, "/benchmark/", TIMEOUT)
    host, port = endpoint.rsplit(":", 1)
    if kind == "TCPStore":
        return TCPStore(host, int(port), is_master=False, timeout=TIMEOUT)
    import etcd  # python-etcd, only needed here
    from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore as LegacyEtcdStore

    return LegacyEtcdStore(etcd.Client(host=host, port=int(port), allow_reconnect=True), "/benchmark", TIMEOUT)


@contextlib.contextmanager
def serving(kind: str) -> Iterator[str]:
    """The endpoint of a server for that kind of store."""
    if kind == "TCPStore":
        server = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        yield f"127.0.0.1:{server.port}"
    else:
        with EtcdServer(extra_args=[*AS_ETCD_DOES, "--enable-v2=true"]) as etcd:
            yield etcd.get_endpoint()


class Crowd(Processes, Generic[T]):
    """`count` clients made by `make(number)`, each with a thread of its own; context manager.

    `warm` is done by each once before the constructor's work is over. What is done must be picklable.
    """

    def __init__(
        self,
        make: Callable[[int], T],
        count: int,
        warm: Callable[[T], object],
        processes: int = PROCESSES,
        patience: float = PATIENCE,
    ) -> None:
        super().__init__(count, _serve, make, warm, processes=processes, patience=patience)

    def do(self, work: Callable[[T], object]) -> float:
        """All do it once, together: seconds until the last one has."""
        begin = time.monotonic()
        return float(max(self.ask(work))) - begin


def _serve(pipe: Connection, numbers: Sequence[int], make: Callable[[int], T], warm: Callable[[T], object]) -> None:
    logging.disable(logging.WARNING)
    clients = [make(number) for number in numbers]
    with ThreadPoolExecutor(len(clients)) as pool:
        list(pool.map(warm, clients))
        pipe.send(time.monotonic())
        while True:
            work = pipe.recv()
            list(pool.map(work, clients))
            pipe.send(time.monotonic())


def timed(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Seconds that each call takes."""
    times = []
    for call in calls:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return times
