"""Calls through a mailbox, and keys of its owner, when etcd keeps one of several callers waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest
from helpers import DEADLINE, eventually
from members import Door
from rdzv_nodes import spawn

from ftcoord import concurrency
from ftcoord.coordination.advertised import AdvertisedKeys
from ftcoord.coordination.mailbox import MailboxClient
from ftcoord.coordination.replica import Replica
from ftcoord.errors import EtcdError
from ftcoord.etcd.api import Lease, TxnResult
from ftcoord.etcd.client import EtcdClient


class Stuck(Door):
    """Grants and transactions wait until `go_on` is set. `waiting` counts them."""

    def __init__(self, real: EtcdClient) -> None:
        super().__init__(real)
        self.go_on = threading.Event()
        self.waiting = 0

    def grant(self, ttl: int) -> Lease:
        return cast(Lease, self._wait(lambda: self.real.grant(ttl)))

    def txn(self, *args: Any, **kwargs: Any) -> TxnResult:
        return cast(TxnResult, self._wait(lambda: self.real.txn(*args, **kwargs)))

    def _wait(self, request: Callable[[], object]) -> object:
        self.waiting += 1
        assert self.go_on.wait(DEADLINE)
        return request()


@pytest.fixture
def stuck(client: EtcdClient) -> Iterator[Stuck]:
    door = Stuck(client)
    yield door
    door.go_on.set()


def soon() -> float:
    return time.monotonic() + 0.2


def late() -> float:
    return time.monotonic() + DEADLINE


def test_a_caller_does_not_wait_for_the_lease_of_another_longer_than_it_wants(stuck: Stuck, prefix: str) -> None:
    calls = MailboxClient(stuck, prefix)
    first = spawn(partial(calls.call, "quorum-0", {}, late(), again=True))
    eventually(lambda: stuck.waiting == 1, "the first call waits for its lease")
    with pytest.raises(TimeoutError, match="no lease"):
        spawn(partial(calls.call, "commit-0", {}, soon(), again=True)).result(DEADLINE)
    assert not first.done()
    spawn(calls.close).result(DEADLINE)
    stuck.go_on.set()
    with pytest.raises(EtcdError, match="closed"):
        first.result(DEADLINE)


class Living:
    """What AdvertisedKeys needs of a replica: a lease, which is none here."""

    lease = 0


def test_a_write_does_not_wait_for_that_of_another_longer_than_it_wants(
    stuck: Stuck, client: EtcdClient, prefix: str
) -> None:
    keys = AdvertisedKeys(stuck, cast(Replica, Living()), concurrency.event())
    first = spawn(partial(keys.put, {f"{prefix}/a": "1"}, late()))
    eventually(lambda: stuck.waiting == 1, "the first write is under way")
    with pytest.raises(TimeoutError, match="another write"):
        spawn(partial(keys.put, {f"{prefix}/b": "1"}, soon())).result(DEADLINE)
    stuck.go_on.set()
    first.result(DEADLINE)
    assert client.get(f"{prefix}/a").one is not None
