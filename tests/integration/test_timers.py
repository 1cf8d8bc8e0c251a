"""Expiration timers on a real etcd, with workers and servers that are processes of their own."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import warm
from helpers import eventually, python
from rdzv_nodes import MakeNodes
from timed import EtcdTimers, ServerProcess, Worker, workers
from torch.distributed.elastic.timer import TimerRequest

import ftcoord
from ftcoord.core.layout import KEY_PREFIX, run_prefix, timers_key, timers_span
from ftcoord.core.timers import HeldTimers, encode, parse_timers
from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.api import Get, KeyValue
from ftcoord.etcd.client import EtcdClient
from ftcoord.primitives.orphans import MARK
from ftcoord.proc import started
from ftcoord.timer import EtcdTimerClient, etcd_timer as server_module
from ftcoord.timer.etcd_timer import Reap

LONG = 300.0
"""Seconds that nothing here takes."""
WAIT = threading.Event().wait
"""For the passing of time itself, never for a condition."""
ROOT = Path(str(ftcoord.__file__)).parent.parent


class HandClock:
    """A clock that is moved by hand: that of the host, and some time."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now

    def goes_on(self, seconds: float) -> None:
        self.now += seconds


class WatchedServer(ftcoord.timer.EtcdTimerServer):
    """One whose turns can be awaited."""

    turns = 0

    def _run_watchdog(self) -> None:
        super()._run_watchdog()
        self.turns += 1

    def turn(self) -> None:
        """Wait until it has looked at everything."""
        seen = self.turns
        eventually(lambda: self.turns >= seen + 2, "the server looks at its timers")

    def knows(self, count: int) -> None:
        eventually(lambda: len(self._book) == count, lambda: f"{count} timers, not {len(self._book)}")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    """One for a server, on which long timers expire at once. It may be moved by any amount."""
    monkeypatch.setattr(server_module, "LATE_AFTER", math.inf)
    return HandClock()


@contextlib.contextmanager
def serving(
    run: str, endpoint: str, reap: Reap | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[WatchedServer]:
    server = WatchedServer(run, endpoint, reap=reap, max_interval=0.02, clock=clock)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def records(client: EtcdClient, run: str) -> list[KeyValue]:
    """All there is of a run's timers in etcd."""
    return list(client.range(Get(timers_span(run_prefix(KEY_PREFIX, run)))).kvs)


def plant(client: EtcdClient, run: str, lease: int, timers: HeldTimers) -> None:
    """Write timers as anybody could."""
    key = timers_key(run_prefix(KEY_PREFIX, run), timers.worker.host, lease)
    client.put(key, encode(timers), lease)


def due(server: WatchedServer) -> set[int]:
    """The workers whose time is over, by what the server knows."""
    return {worker.pid for worker in server.get_expired_timers(time.time())}


# -- who is reaped ----------------------------------------------------------------------------------------------------


def test_a_worker_that_releases_in_the_last_50_ms_is_never_killed(
    etcd: EtcdServer, prefix: str, clock: HandClock
) -> None:
    """A thousand times the server looks when the time is over, while the release is on its way to etcd."""
    scopes = [f"scope {number}" for number in range(20)]
    with (
        serving(prefix, etcd.get_endpoint(), clock=clock) as server,
        Worker(EtcdTimers(prefix, etcd.get_endpoint(), timeout=0)) as worker,
    ):
        for _ in range(1000 // len(scopes)):
            clock.now = time.monotonic()
            worker.do("acquire", LONG, *scopes)
            server.knows(len(scopes))
            clock.now = min(one.due for one in server._book.values()) - 0.04
            worker.do("release", *scopes)
            clock.now += LONG  # over for all of them
            server._queue.wake()
            server.knows(0)
        assert worker.runs()
        clock.now = time.monotonic()
        worker.do("acquire", LONG, "scope")
        server.knows(1)
        clock.now += LONG + 1  # it is no trick of the clock
        worker.killed()


def test_wall_clocks_that_are_set_apart(etcd: EtcdServer, prefix: str) -> None:
    make = EtcdTimers(prefix, etcd.get_endpoint())
    with serving(prefix, etcd.get_endpoint()) as server, Worker(make, 3600) as ahead, Worker(make, -3600) as behind:
        for worker in (ahead, behind):
            worker.do("acquire", LONG, "a")
        server.knows(2)
        server.turn()
        begun = time.monotonic()
        for worker in (ahead, behind):
            worker.tell("acquire", 1.0, "b")
        assert min(ahead.killed(), behind.killed()) - begun >= 1.0


def test_only_who_holds_a_timer_is_killed_whatever_is_written(
    client: EtcdClient, etcd: EtcdServer, prefix: str
) -> None:
    """Not a process that a record names: neither one that holds no timer, nor one that holds others."""
    make = EtcdTimers(prefix, etcd.get_endpoint(), ttl=60)
    with (
        serving(prefix, etcd.get_endpoint()) as server,
        Worker(make) as holds,
        ServerProcess(prefix, etcd.get_endpoint()) as another,
    ):
        holds.do("acquire", LONG, "scope")
        (kv,) = records(client, prefix)
        found = parse_timers(kv.key, kv.value)
        (timer,), worker = found.timers, found.worker
        late = replace(timer, until_ms=0)
        for at, forged in enumerate(
            [
                HeldTimers(worker, (replace(late, token=timer.token ^ 1),)),
                HeldTimers(worker, (replace(late, slot=timer.slot + 1),)),
                HeldTimers(replace(worker, start=worker.start - 1), (late,)),
                *(
                    HeldTimers(replace(worker, pid=pid, start=started(pid) or 0), (late,))
                    for pid in (1, os.getpid(), os.getppid(), another.pid)
                ),
            ]
        ):
            plant(client, prefix, client.grant(60).id, forged)
            eventually(lambda: len(records(client, prefix)) == at + 2, "it is written")  # noqa: B023
        client.put(f"{timers_span(run_prefix(KEY_PREFIX, prefix), worker.host).start}x", b"what is this?", kv.lease)
        holds.do("acquire", LONG, "another")
        server.knows(2)
        assert holds.runs()
        assert started(another.pid)
        holds.tell("acquire", 0.1, "a third")  # it may be killed before it answers
        holds.killed()


def test_an_agents_server_ends_its_own_workers_only(make_nodes: MakeNodes, etcd: EtcdServer) -> None:
    """Not those of another agent of the run on this host, which has a server of its own."""
    node = make_nodes(1, 1, run_id="a job", timers="1").one()
    code = (
        "import ftcoord.timer, time; timers = ftcoord.timer.EtcdTimerClient(timeout=60);"
        "timers.acquire('scope', time.time()); print('holds it', flush=True); time.sleep(600)"
    )
    with python("-c", code, env={MARK: "of another agent"}) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "holds it\n"
        with python("-c", code) as worker:
            assert worker.wait(90) == -signal.SIGKILL
        assert stranger.poll() is None
    node.crash()


# -- servers ----------------------------------------------------------------------------------------------------------


def test_a_server_that_was_killed_is_replaced(etcd: EtcdServer, prefix: str) -> None:
    with workers(EtcdTimers(prefix, etcd.get_endpoint()), 3) as (first, second, third):
        with ServerProcess(prefix, etcd.get_endpoint()) as server:
            begun = time.monotonic()
            second.do("acquire", 4.0, "scope")
            third.do("acquire", LONG, "scope")
            first.tell("hang", 0.5)
            first.killed()
            server.kill()
        with ServerProcess(prefix, etcd.get_endpoint()):
            assert second.killed() - begun >= 4.0
            assert third.runs()
            third.tell("hang", 0.5)
            third.killed()


@pytest.mark.parametrize("left", [-1, 1e9], ids=["expired", "hardly ever expires"])
def test_timers_of_torchs_local_client_are_refused_with_words(etcd: EtcdServer, prefix: str, left: float) -> None:
    """Their workers are plain integers. Of a batch that has one, nothing stays behind."""
    with serving(prefix, etcd.get_endpoint()) as server:
        ours, theirs = (TimerRequest(worker, "scope", time.time() + left) for worker in ("ours", 7))
        with pytest.raises(TypeError, match=r"worker 7, a plain integer.*configure\(ftcoord.timer.EtcdTimerClient"):
            server.register_timers([ours, theirs])
        assert not server.get_expired_timers(time.time() + 2e9)


# -- etcd that is away ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "back"), [("kill", "restart"), ("pause", "resume")])
def test_an_outage(
    fragile: EtcdServer, how: str, back: str, clock: HandClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody is killed while it lasts, and afterwards only who still holds an expired timer. Nobody is held up."""
    endpoint = fragile.get_endpoint()
    make = EtcdTimers("job", endpoint, timeout=1.0, ttl=10)
    with serving("job", endpoint, clock=clock) as server, workers(make, 3) as (stuck, freed, busy):
        for worker in (stuck, freed):
            worker.do("acquire", LONG, "scope")
        server.knows(2)
        getattr(fragile, how)()
        assert freed.do("release", "scope") < 30
        clock.now = time.monotonic() + LONG + 1
        assert busy.do("work", LONG, 60) < 45  # they would wait for 60 s
        busy.do("acquire", 100 * LONG, "held")
        assert stuck.pid in due(server)
        WAIT(1)
        assert stuck.runs()
        getattr(fragile, back)()
        eventually(lambda: clock.goes_on(0.1) or not stuck.runs(), "the server has waited for late releases")
        stuck.killed()
        told = lambda: [(one.pid, one.scope) for one in ftcoord.timer.active("job", endpoint)]  # noqa: E731
        eventually(lambda: told() == [(busy.pid, "held")], "what was released and held is written")
        server.knows(1)
        assert freed.runs()
        assert busy.runs()
    assert how == "pause" or "no worker is reaped" in caplog.text


# -- workers ----------------------------------------------------------------------------------------------------------


def test_a_write_each_at_the_most(client: EtcdClient, etcd: EtcdServer, prefix: str) -> None:
    with contextlib.closing(EtcdTimerClient(prefix, etcd.get_endpoint(), timeout=60, ttl=600)) as timers:
        for _ in range(10):
            timers.acquire("outer", time.time() + LONG)
            timers.acquire("inner", time.time() + LONG)
            timers.release("inner")
            timers.release("outer")
        eventually(lambda: ftcoord.timer.active(prefix, client) == [], "the releases")
        (kv,) = records(client, prefix)
        assert 20 <= kv.version <= 40


# -- the fleet --------------------------------------------------------------------------------------------------------


def test_what_others_see(etcd: EtcdServer, prefix: str, clock: HandClock) -> None:
    endpoint = etcd.get_endpoint()
    with serving(prefix, endpoint, clock=clock) as server, workers(EtcdTimers(prefix, endpoint), 2) as (one, two):
        two.do("acquire", 3 * LONG, "a step")
        one.do("acquire", LONG, "the barrier")
        first, second = ftcoord.timer.active(prefix, endpoint)
        assert (first.pid, first.scope, second.pid, second.scope) == (one.pid, "the barrier", two.pid, "a step")
        assert (first.host, first.rank) == (os.uname().nodename, None)
        assert first.age + first.left == pytest.approx(LONG, abs=10)
        server.knows(2)
        clock.now = time.monotonic() + LONG + 1
        one.killed()
        eventually(lambda: [info.pid for info in ftcoord.timer.active(prefix, endpoint)] == [two.pid], "its end")


# -- torchrun ---------------------------------------------------------------------------------------------------------


def test_under_torchrun_a_stuck_worker_is_killed_and_the_job_goes_on(tmp_path: Path) -> None:
    """The agent lives; torch's own file timers would have killed it. The workers are let into its embedded etcd."""
    command = [
        *("-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--max-restarts=1"),
        *("--rdzv-backend=etcd-v3", "--rdzv-endpoint=embedded", f"--rdzv-id={tmp_path.name}"),
        *("--rdzv-conf=timers=1,lease_ttl=2", f"--log-dir={tmp_path}", str(ROOT / "examples" / "stuck_worker.py")),
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = warm.run(*command, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "attempt 0: rank 0 is stuck in step 10" in done.stdout
    assert re.search(r"'step 10' for \d+\.\d s", done.stderr), done.stderr
    assert done.stdout.count("attempt 1: rank") == 2
