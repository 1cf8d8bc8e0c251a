"""What replicas meet at: ftcoord's address in an etcd, or torchft's lighthouse."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

from benchmarks.metrics import AS_ETCD_DOES
from ftcoord.coordination import Gateway, ManagerClient, ManagerServer
from ftcoord.embedded.server import EtcdServer

OURS, GATEWAY, TORCHFT = KINDS = ("ftcoord", "ftcoord, gateway", "torchft")
TIMEOUT: Final = timedelta(seconds=60)


def classes(kind: str) -> tuple[Any, Any]:
    """ManagerServer and ManagerClient of that kind."""
    if kind == OURS:
        return ManagerServer, ManagerClient
    from torchft._torchft import ManagerClient as NativeClient, ManagerServer as NativeServer

    return NativeServer, NativeClient


def job_at(endpoints: str, min_replicas: int) -> str:
    """ftcoord's address; the rules are those that `lighthouse()` gets."""
    return f"etcd://{endpoints}/benchmark?min_replicas={min_replicas}&join_timeout_ms=60000"


def lighthouse(min_replicas: int, bind: str = "[::]:0") -> Any:
    """A LighthouseServer of torchft's, with its default heartbeat timeout of 5 s."""
    from torchft._torchft import LighthouseServer

    return LighthouseServer(bind=bind, min_replicas=min_replicas, join_timeout_ms=60_000)


@contextlib.contextmanager
def serving(kind: str, min_replicas: int) -> Iterator[tuple[str, str | None]]:
    """The address that replicas ask at, and the etcd behind it."""
    if kind == TORCHFT:
        server = lighthouse(min_replicas)
        yield server.address(), None
        server.shutdown()
        return
    with EtcdServer(extra_args=AS_ETCD_DOES) as etcd:
        job = job_at(etcd.get_endpoint(), min_replicas)
        if kind == OURS:
            yield job, etcd.get_endpoint()
            return
        with Gateway(job) as gateway:
            yield gateway.address(), etcd.get_endpoint()
