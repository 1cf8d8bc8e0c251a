"""A thread of ftcoord's that ends by an error tells its owner: nobody waits for what it would have done."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import pytest
from helpers import DEADLINE, Seen, eventually, rdzv_settings
from torch.distributed.elastic.rendezvous import RendezvousError

from ftcoord.core.lease import SessionState
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import ClientClosed, EtcdError
from ftcoord.etcd.api import Began, Lease, Span
from ftcoord.etcd.client import EtcdClient
from ftcoord.etcd.watch import WatchHub
from ftcoord.primitives.leased_key import LeasedKey
from ftcoord.primitives.session import KeptLease, Renewer
from ftcoord.rendezvous import policy
from ftcoord.rendezvous.node import Node
from ftcoord.store import EtcdStore
from ftcoord.timer.etcd_timer import EtcdTimerClient, EtcdTimerServer

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def fail(*_: object, **__: object) -> NoReturn:
    raise MemoryError("made by the test")


class Failing:
    """An etcd whose renewals fail as no code foresaw."""

    def renew(self, lease_id: int, *, timeout: float | None = None) -> int:
        fail()


class Answering:
    """An etcd that renews."""

    def __init__(self) -> None:
        self.renewed: queue.SimpleQueue[int] = queue.SimpleQueue()

    def renew(self, lease_id: int, *, timeout: float | None = None) -> int:
        self.renewed.put(lease_id)
        return 3


def test_a_lease_whose_renewal_fails_is_lost_and_others_are_kept() -> None:
    told: queue.SimpleQueue[SessionState] = queue.SimpleQueue()
    renewer, etcd = Renewer(), Answering()
    lost = KeptLease(Failing(), Lease(1, 3), time.monotonic(), told.put, renewer)
    kept = KeptLease(etcd, Lease(2, 3), time.monotonic(), renewer=renewer)
    assert told.get(timeout=DEADLINE) is SessionState.LOST
    assert lost.state is SessionState.LOST
    assert [etcd.renewed.get(timeout=DEADLINE) for _ in range(2)] == [2, 2]
    kept.stop()


@pytest.fixture
def failing_hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to have the next answer of a watch stream fail as no code foresaw; only once."""

    def arm() -> None:
        real = WatchHub._handle

        def handle(hub: WatchHub, stream: Any, response: Any) -> None:
            monkeypatch.setattr(WatchHub, "_handle", real)
            fail()

        monkeypatch.setattr(WatchHub, "_handle", handle)

    return arm


def test_watches_whose_thread_fails_end_with_an_error(
    client: EtcdClient, prefix: str, failing_hub: Callable[[], None]
) -> None:
    first, second = Seen(), Seen()
    client.watch(Span(prefix), 0, first)
    eventually(lambda: isinstance(first.next(), Began), "the watch stands")
    failing_hub()
    client.put(prefix, b"")
    error = first.error()
    assert isinstance(error, EtcdError)
    assert "watch again" in str(error)
    client.watch(Span(prefix), 0, second)
    eventually(lambda: isinstance(second.next(), Began), "another thread")


def test_who_waits_in_a_store_survives_it(client: EtcdClient, prefix: str, failing_hub: Callable[[], None]) -> None:
    store = EtcdStore(client, f"{prefix}/")
    waiting = threading.Thread(target=store.get, args=("late",), daemon=True)
    failing_hub()
    waiting.start()
    eventually(lambda: any(t.name == "ftcoord-watch" for t in threading.enumerate()), "the watch")
    store.set("late", b"here")
    waiting.join(DEADLINE)
    assert not waiting.is_alive()
    store.close()


def test_timers_of_a_worker_raise_nothing_and_say_so(
    client: EtcdClient, prefix: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timers = EtcdTimerClient(prefix.strip("/"), client, timeout=DEADLINE)
    monkeypatch.setattr(LeasedKey, "_write", fail)
    for _ in range(3):
        timers.acquire("scope", time.time() + 600)
        timers.release("scope")
    said = [one for one in caplog.records if "these timers are not kept in etcd any longer" in one.message]
    assert [one.levelno for one in said].count(logging.ERROR) == 1
    timers.close()
    with pytest.raises(ClientClosed):
        timers.acquire("scope", time.time() + 600)


def test_a_timer_server_ends_with_its_client_and_says_so(
    etcd: EtcdServer, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    with etcd.get_client() as own:
        server = EtcdTimerServer(prefix.strip("/"), own, max_interval=0.05)
        server.start()
        thread = server._watchdog_thread
        assert thread is not None
        eventually(lambda: server._queue._feed._mirror.synced, "the watch")
    eventually(lambda: not thread.is_alive(), "the end of the watchdog")
    assert "no worker is reaped any longer" in caplog.text
    server.stop()


# -- the thread of a group: of a node here, of a replica in test_job_members.py, of any participant in tests/sim ------


@pytest.fixture
def failing_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], None]:
    """`failing_once(module)` makes its next `decide` end the thread that calls it."""

    def begin(module: ModuleType) -> None:
        failures, decide = [fail], module.decide
        monkeypatch.setattr(
            module, "decide", lambda *args, **how: failures.pop()() if failures else decide(*args, **how)
        )

    return begin


def test_a_node_whose_thread_fails_raises(
    client: EtcdClient, prefix: str, failing_once: Callable[[ModuleType], None]
) -> None:
    failing_once(policy)
    settings = rdzv_settings((1, 1), key_prefix=prefix, last_call_timeout=0.1)
    node = Node(client, settings, "127.0.0.1", "host")
    node.begin()
    with pytest.raises(RendezvousError, match="made by the test"):
        node.ask(1234)
    node.begin()
    found = node.ask(1235)
    assert found is not None
    assert found.ready
    node.leave("the test is over")
