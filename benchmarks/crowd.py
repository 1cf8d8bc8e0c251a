"""Many clients of one store, over a few processes, that do one thing together."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Final

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.utils.store import barrier

from benchmarks.metrics import AS_ETCD_DOES
from benchmarks.processes import Processes
from ftcoord.etcd.server import EtcdServer
from ftcoord.store import EtcdStore

STORES: Final = ("EtcdStore", "TCPStore", "legacy EtcdStore")
TIMEOUT: Final = timedelta(seconds=120)
WORK: Final[dict[str, Callable[[Store, str, int], Any]]] = {
    "add": lambda store, key, count: store.add(key, 1),
    "wait": lambda store, key, count: store.wait([f"{key}/{number}" for number in range(count)]),
    "barrier": lambda store, key, count: barrier(store, count, key, TIMEOUT.total_seconds()),
}


def make_store(kind: str, endpoint: str) -> Store:
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
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        yield f"127.0.0.1:{server.port}"
    else:
        with EtcdServer(extra_args=[*AS_ETCD_DOES, "--enable-v2=true"]) as etcd:
            yield etcd.get_endpoint()


class Crowd(Processes):
    """`count` clients, each with a store and a thread of its own; context manager."""

    def __init__(self, kind: str, endpoint: str, count: int) -> None:
        super().__init__(count, _serve, kind, endpoint, count)

    def do(self, what: str, key: str) -> float:
        """All do it once, together: seconds until the last one has."""
        begin = time.monotonic()
        return float(max(self.ask((what, key)))) - begin


def _serve(pipe: Connection, numbers: Sequence[int], kind: str, endpoint: str, count: int) -> None:
    logging.disable(logging.WARNING)
    stores = [make_store(kind, endpoint) for _ in numbers]
    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(_warm, stores))
        pipe.send(time.monotonic())
        while True:
            what, key = pipe.recv()
            list(pool.map(_Work(what, key, count), stores))
            pipe.send(time.monotonic())


def _warm(store: Store) -> None:
    store.set("warm", "x")
    store.get("warm")


class _Work:
    def __init__(self, what: str, key: str, count: int) -> None:
        self._what, self._key, self._count = what, key, count

    def __call__(self, store: Store) -> None:
        WORK[self._what](store, self._key, self._count)


def timed(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Seconds that each call takes."""
    times = []
    for call in calls:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return times
