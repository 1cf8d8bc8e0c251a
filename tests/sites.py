"""torchft's native coordination classes and ours, used in the same way."""

from __future__ import annotations

import importlib
import importlib.util
from concurrent.futures import Future
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
from helpers import DEADLINE
from rdzv_nodes import spawn

from ftcoord import coordination

KINDS = ("ftcoord", "torchft")
LONG = timedelta(seconds=DEADLINE)


class Site:
    """Makes the objects of one of the two, and ends them. `names` are those of `torchft.coordination`."""

    def __init__(self, kind: str, stack: ExitStack) -> None:
        if kind == "torchft" and importlib.util.find_spec("torchft") is None:
            pytest.skip("torchft has no wheel for this Python")
        self.names: Any = coordination if kind == "ftcoord" else importlib.import_module("torchft._torchft")
        self._stack = stack

    def job(self, min_replicas: int = 1, **options: int) -> str:
        """The address of a new job. Unless it is told otherwise, it calls nobody dead who is slow."""
        given = {"heartbeat_timeout_ms": 60_000, **options}
        server = self.names.LighthouseServer(bind="[::]:0", min_replicas=min_replicas, **given)
        self._stack.callback(server.shutdown)
        return str(server.address())

    def client(self, job: str) -> Any:
        client = self.names.LighthouseClient(job, LONG)
        if isinstance(client, coordination.LighthouseClient):
            self._stack.callback(client.close)
        return client

    def manager(self, job: str, replica_id: str, world_size: int = 1, **options: Any) -> Any:
        """A manager, and the clients of its ranks."""
        given = {
            "hostname": "localhost",
            "bind": "[::]:0",
            "store_addr": f"store of {replica_id}",
            "heartbeat_interval": timedelta(milliseconds=100),
            "connect_timeout": LONG,
            "quorum_retries": 0,
        }
        server = self.names.ManagerServer(
            replica_id=replica_id, lighthouse_addr=job, world_size=world_size, **{**given, **options}
        )
        self._stack.callback(server.shutdown)
        return server

    def ranks(self, server: Any, count: int = 1) -> list[Any]:
        return [self.names.ManagerClient(server.address(), LONG) for _ in range(count)]


def group_ask(rank: Any, **request: Any) -> Future[Any]:
    given = {
        "group_rank": 0,
        "step": 0,
        "checkpoint_metadata": "",
        "shrink_only": False,
        "init_sync": True,
        "commit_failures": 0,
        "timeout": LONG,
    }
    return spawn(lambda: rank._quorum(**{**given, **request}))
