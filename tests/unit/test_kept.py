"""A test that leaves a lease behind is blamed, and no other."""

from __future__ import annotations

from collections.abc import Iterator

import kept
import pytest
from virtual import MemoryClient, MemoryEtcd

from ftcoord.primitives.session import Session

SOON = 0.1


@pytest.fixture
def client() -> Iterator[MemoryClient]:
    with MemoryEtcd() as etcd:
        yield etcd.client()


def test_one_that_leaves_a_lease_is_blamed_once(client: MemoryClient) -> None:
    left = [Session(client, 60), Session(client, 60)]
    with pytest.raises(pytest.fail.Exception, match="the keep-alive thread of 2 leases"):
        kept.check(SOON)
    kept.check(0)
    left.append(Session(client, 60))
    with pytest.raises(pytest.fail.Exception, match="of 1 leases"):
        kept.check(SOON)
    kept.check(0)
