"""One etcd for all contract tests, and a run of its own for each of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rdzv_nodes import Nodes

from ftcoord.etcd.client import EtcdClient
from ftcoord.etcd.server import EtcdServer


@pytest.fixture(scope="session")
def shared_etcd() -> Iterator[EtcdServer]:
    """Nothing bad happens to this one."""
    with EtcdServer() as server:
        yield server


@pytest.fixture
def own_etcd() -> Iterator[EtcdServer]:
    """To be killed, paused and compacted."""
    with EtcdServer() as server:
        yield server


@pytest.fixture
def client(shared_etcd: EtcdServer) -> Iterator[EtcdClient]:
    with shared_etcd.get_client() as client:
        yield client


@pytest.fixture
def run_id() -> str:
    return f"run-{uuid.uuid4().hex[:12]}"


MakeNodes = Callable[..., Nodes]


@pytest.fixture
def make_nodes(shared_etcd: EtcdServer, run_id: str) -> Iterator[MakeNodes]:
    """`make_nodes(min, max, **rdzv_conf)`: the nodes of a run, on the shared etcd unless `etcd` is given."""
    made: list[Nodes] = []

    def make(least: int, most: int, *, etcd: EtcdServer = shared_etcd, name: str = run_id, **conf: Any) -> Nodes:
        made.append(Nodes(etcd.get_endpoint(), name, (least, most), **conf))
        return made[-1]

    yield make
    for nodes in made:
        nodes.end()
