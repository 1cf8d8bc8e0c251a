"""A test that leaves a lease behind is blamed, and no other."""

from __future__ import annotations

import threading
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


def test_one_that_leaves_nothing_is_not_blamed(client: MemoryClient) -> None:
    Session(client, 60).close()
    kept.check()


def test_one_that_leaves_a_lease_is_blamed_once(client: MemoryClient) -> None:
    left = [Session(client, 60), Session(client, 60)]
    with pytest.raises(pytest.fail.Exception, match="the keep-alive thread of 2 leases"):
        kept.check(SOON)
    kept.check(0)
    left.append(Session(client, 60))
    with pytest.raises(pytest.fail.Exception, match="of 1 leases"):
        kept.check(SOON)
    kept.check(0)


def test_one_that_leaves_a_thread_that_cannot_be_ended_is_blamed_once(
    client: MemoryClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "GIVE_UP", SOON)
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="ftcoord-leases")
    thread.start()
    try:
        with pytest.raises(pytest.fail.Exception, match="of 0 leases"):
            kept.check(SOON)
        kept.check(0)
        left = Session(client, 60)
        with pytest.raises(pytest.fail.Exception, match="of 1 leases"):
            kept.check(SOON)
        left.close()
        kept.check()
    finally:
        end.set()
        thread.join()
