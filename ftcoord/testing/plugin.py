"""The pytest plug-in that comes with ftcoord: fixtures for tests of what uses it. See docs/testing.md.

pytest loads this for everybody who has ftcoord, so it loads nothing itself before a fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ftcoord.embedded.cluster import EtcdCluster
    from ftcoord.embedded.server import EtcdServer
    from ftcoord.testing.etcd import MemoryEtcd


@pytest.fixture(scope="session")
def etcd_server() -> Iterator[EtcdServer]:
    """A real etcd for all tests of the session. Give each test keys, or a run id, of its own."""
    from ftcoord.embedded.server import EtcdServer

    with EtcdServer() as server:
        yield server


@pytest.fixture
def etcd_cluster() -> Iterator[EtcdCluster]:
    """A real etcd of three members for one test, which may kill and pause them."""
    from ftcoord.embedded.cluster import EtcdCluster

    with EtcdCluster(3) as cluster:
        yield cluster


@pytest.fixture
def ftcoord_etcd() -> Iterator[MemoryEtcd]:
    """An etcd in memory for one test: pass `ftcoord_etcd.client()` wherever an etcd client is taken."""
    from ftcoord.testing.etcd import MemoryEtcd

    with MemoryEtcd() as etcd:
        yield etcd


@pytest.fixture
def expire_lease() -> Callable[..., None]:
    """`expire_lease(etcd, lease)` ends a lease at once, see `ftcoord.testing.expire_lease`."""
    from ftcoord.testing.expiry import expire_lease

    return expire_lease
