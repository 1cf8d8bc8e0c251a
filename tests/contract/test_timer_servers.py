"""What torch's timer tests state, on torch's local timers and on ours."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from helpers import eventually
from timed import CONTEXT, EtcdTimers, Worker, workers
from torch.distributed.elastic.timer import LocalTimerClient, LocalTimerServer, TimerClient, TimerRequest, TimerServer
from torch.distributed.elastic.timer.api import RequestQueue

from ftcoord.embedded.server import EtcdServer
from ftcoord.timer.etcd_timer import EtcdTimerServer

LONG = 300.0
"""Seconds that nothing here takes."""


@dataclass(frozen=True)
class LocalTimers:
    """Makes one of torch's clients."""

    queue: Any

    def __call__(self) -> TimerClient:
        return LocalTimerClient(self.queue)


@dataclass
class Kind:
    """A server that is not started yet, and what makes its clients."""

    server: TimerServer
    client: Callable[[], TimerClient]

    @property
    def queue(self) -> RequestQueue:
        return self.server._request_queue


@pytest.fixture(params=["torch", "etcd"])
def kind(request: pytest.FixtureRequest, etcd: EtcdServer, prefix: str) -> Iterator[Kind]:
    if request.param == "torch":
        queue = CONTEXT.Queue()
        yield Kind(LocalTimerServer(queue, max_interval=0.05), LocalTimers(queue))
        return
    server = EtcdTimerServer(prefix, etcd.get_endpoint(), max_interval=0.05)
    yield Kind(server, EtcdTimers(prefix, etcd.get_endpoint(), ttl=30))
    server.stop()


@pytest.fixture
def serving(kind: Kind) -> Iterator[Kind]:
    """The same with the server started."""
    kind.server.start()
    yield kind
    kind.server.stop()


def test_workers(serving: Kind) -> None:
    """Those that leave their scopes in time live, however they leave them; those that hang are killed."""
    with workers(serving.client, 3) as (good, bad, slow):
        bad.tell("hang", 0.5)
        slow.tell("recurse", 4, 0.5, 100.0)  # the innermost takes too long
        assert good.do("fail", LONG) == "a bug"
        assert good.do("without_a_client") == "RuntimeError"
        good.do("recurse", 4, LONG, 0.01)
        good.do("acquire", LONG, "outer", "inner")
        good.do("release", "inner", "never acquired")
        bad.killed()
        slow.killed()
        good.do("release", "outer")
        assert good.runs()


def test_a_second_acquire_replaces_the_first_and_one_release_ends_both(serving: Kind) -> None:
    def expire_within(seconds: float) -> list[str]:
        found = serving.server.get_expired_timers(time.time() + seconds)
        return sorted(request.scope_id for requests in found.values() for request in requests)

    with Worker(serving.client) as worker:
        for after in (LONG, 4 * LONG):
            worker.do("acquire", after, "twice", "ended")
        worker.do("release", "ended")
        replaced = lambda: expire_within(9 * LONG) == ["twice"] and expire_within(2 * LONG) == []  # noqa: E731
        eventually(replaced, "the server knows it all")


def test_the_queue(kind: Kind) -> None:
    with Worker(kind.client) as worker:
        assert kind.queue.size() == 0
        assert kind.queue.get(1, timeout=0.01) == []
        worker.do("acquire", LONG, "a", "b", "c")
        eventually(lambda: kind.queue.size() == 3, "three requests")
        first = kind.queue.get(2, timeout=60)
        (last,) = kind.queue.get(1, timeout=60)
        assert [request.scope_id for request in [*first, last]] == ["a", "b", "c"]
        assert last.expiration_time == pytest.approx(time.time() + LONG, abs=100)
        assert len({request.worker_id for request in first}) == 1
        worker.do("release", "b")
        (ended,) = kind.queue.get(1, timeout=60)
        assert (ended.scope_id, ended.expiration_time < 0) == ("b", True)
        assert ended.worker_id == last.worker_id


def requests(*timers: tuple[str, str, float]) -> list[TimerRequest]:
    return [TimerRequest(worker, scope, at) for worker, scope, at in timers]


def test_the_books(kind: Kind) -> None:
    server, now = kind.server, time.time()
    past, future = now - 60, now + 60
    server.register_timers(requests(("w", "a", past), ("w", "b", future), ("x", "a", past), ("x", "b", past)))
    assert server.get_expired_timers(now) == {
        "w": requests(("w", "a", past)),
        "x": requests(("x", "a", past), ("x", "b", past)),
    }
    server.register_timers(requests(("x", "a", -1), ("w", "a", future), ("w", "none", -1)))
    assert server.get_expired_timers(now) == {"x": requests(("x", "b", past))}
    server.clear_timers({"x", "nobody"})
    assert server.get_expired_timers(now) == {}
    (left,) = server.get_expired_timers(future + 60).values()
    assert sorted(request.scope_id for request in left) == ["a", "b"]


@pytest.mark.parametrize(("outcome", "left"), [(True, 0), (False, 1), (ValueError("a bug"), 0)])
def test_the_watchdog_reaps(kind: Kind, outcome: Any, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And tries again when that failed, but not where it raised something."""
    reaped: list[str] = []

    def reap(worker_id: str) -> bool:
        reaped.append(worker_id)
        if isinstance(outcome, Exception):
            raise outcome
        return bool(outcome)

    monkeypatch.setattr(kind.server, "_reap_worker", reap)
    past = time.time() - 60
    kind.server.register_timers(requests(("w", "a", past), ("x", "a", time.time() + 60)))
    kind.server._run_watchdog()
    eventually(lambda: reaped or kind.server._run_watchdog(), "a look")
    assert reaped[:1] == ["w"]
    assert len(kind.server.get_expired_timers(time.time())) == left
    assert len(kind.server.get_expired_timers(time.time() + 120)) == left + 1


def test_the_watchdog_looks_again_and_again(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it fails, until it is stopped."""
    looks = threading.Semaphore(0)

    def fail(batch: list[TimerRequest]) -> None:
        looks.release()
        raise ValueError("a bug")

    monkeypatch.setattr(kind.server, "register_timers", fail)
    kind.server.start()
    for _ in range(3):
        assert looks.acquire(timeout=60)
    kind.server.stop()
