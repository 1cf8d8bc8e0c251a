"""Expiration timers on a real etcd, with workers and servers that are processes of their own."""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import warm
from etcd_cluster import EtcdCluster
from helpers import eventually, in_fork
from rdzv_nodes import MakeNodes
from timed import EtcdTimers, ServerProcess, Worker, workers
from torch.distributed.elastic.timer import TimerRequest

import ftcoord
from ftcoord.core import timers as core_timers
from ftcoord.core.layout import KEY_PREFIX, run_prefix, timer_key, timers_span
from ftcoord.core.timer_records import Timer, encode, parse_timer
from ftcoord.core.timers import TimerInfo
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import ClientClosed, ConfigError
from ftcoord.etcd.api import Get, KeyValue
from ftcoord.etcd.client import EtcdClient
from ftcoord.proc import started
from ftcoord.timer import server as server_module
from ftcoord.timer.client import EtcdTimerClient
from ftcoord.timer.environment import VARIABLE
from ftcoord.timer.process import host_id, this_process
from ftcoord.timer.server import Reap

LONG = 300.0
"""Seconds that nothing here takes."""
WAIT = threading.Event().wait
"""For the passing of time itself, never for a condition."""
ROOT = Path(str(ftcoord.__file__)).parent.parent


class HandClock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

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
        eventually(lambda: len(self._book.entries) == count, lambda: f"{count} timers, not {len(self._book.entries)}")


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


def slots(client: EtcdClient, run: str) -> list[KeyValue]:
    """All there is of a run's timers in etcd."""
    return list(client.range(Get(timers_span(run_prefix(KEY_PREFIX, run)))).kvs)


def writes(client: EtcdClient, run: str) -> int:
    """How many there were of a run's timers. etcd's revision also counts leases of other tests that end."""
    return sum(kv.version for kv in slots(client, run))


def timer_of(client: EtcdClient, run: str) -> Timer:
    """The only timer of a run."""
    (timer,) = [timer for kv in slots(client, run) if (timer := parse_timer(kv.key, kv.value))]
    return timer


def plant(client: EtcdClient, run: str, lease: int, pid: int, late: int = 0) -> None:
    """Write an expired timer as anybody could: of the process with this pid, or one that had the pid before it."""
    worker = replace(this_process(ledger=-1, ttl=60), pid=pid, start=(started(pid) or 0) - late)
    key = timer_key(run_prefix(KEY_PREFIX, run), host_id(), lease, str(pid))
    client.put(key, encode(Timer(worker, "scope", 0, 0, 0, 0, 0, 1)), lease)


def due(server: WatchedServer) -> set[int]:
    """The workers whose time is over, by what the server knows."""
    return {worker.pid for worker in server.get_expired_timers(time.time())}


# -- who is reaped ----------------------------------------------------------------------------------------------------


def test_a_thousand_timers_at_once(etcd: EtcdServer, prefix: str) -> None:
    scopes = [f"scope {number}" for number in range(100)]
    make = EtcdTimers(prefix, etcd.get_endpoint(), timeout=0)
    with serving(prefix, etcd.get_endpoint()) as server, workers(make, 10) as crew:
        for worker in crew:
            worker.tell("acquire", LONG, *scopes)
        for worker in crew:
            worker.answer()
        server.knows(1000)
        assert len(ftcoord.timer.active(prefix, etcd.get_endpoint())) == 1000
        crew[0].tell("acquire", 0.2, *scopes)
        for worker in crew[1:]:
            worker.tell("release", *scopes)
        crew[0].killed()
        for worker in crew[1:]:
            worker.answer()
        server.knows(0)
        assert all(worker.runs() for worker in crew[1:])


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
            worker.do("acquire", LONG, *scopes)
            server.knows(len(scopes))
            clock.now = min(one.due for one in server._book.entries.values()) - 0.04
            worker.do("release", *scopes)
            clock.now += LONG  # over for all of them
            server._queue.wake()
            server.knows(0)
        assert worker.runs()
        worker.do("acquire", LONG, "scope")
        server.knows(1)
        clock.now += LONG + 1  # it is no trick of the clock
        worker.killed()


def test_wall_clocks_that_are_set_apart(etcd: EtcdServer, prefix: str) -> None:
    make = EtcdTimers(prefix, etcd.get_endpoint())
    with (
        serving(prefix, etcd.get_endpoint()) as server,
        Worker(make, 3600) as ahead,
        Worker(make, -3600) as behind,
    ):
        for worker in (ahead, behind):
            worker.do("acquire", LONG, "a")
        server.knows(2)
        server.turn()
        begun = time.monotonic()
        for worker in (ahead, behind):
            worker.do("acquire", 1.0, "b")
        assert min(ahead.killed(), behind.killed()) - begun >= 1.0


def test_a_worker_that_does_not_run_at_all_is_reaped(etcd: EtcdServer, prefix: str) -> None:
    """It cannot renew its lease, of 6 s, and C code that holds the interpreter for long does the same to it."""
    with serving(prefix, etcd.get_endpoint()), Worker(EtcdTimers(prefix, etcd.get_endpoint(), ttl=6)) as worker:
        worker.do("acquire", 12.0, "scope")
        worker.stop()
        worker.killed()


def test_only_the_very_process_is_killed(client: EtcdClient, etcd: EtcdServer, prefix: str) -> None:
    """Not one that has its pid since; and where no ledger can be read, etcd's word is taken."""

    make, run = EtcdTimers(prefix, etcd.get_endpoint()), run_prefix(KEY_PREFIX, prefix)
    with serving(prefix, etcd.get_endpoint()) as server, Worker(make) as stranger, Worker(make) as meant:
        lease = client.grant(60).id
        plant(client, prefix, lease, stranger.pid, late=1)
        plant(client, prefix, lease, meant.pid)
        client.put(timer_key(run, host_id(), lease, "no timer"), b"what is this?", lease)
        meant.killed()
        server.knows(0)
        assert stranger.runs()
        client.revoke(lease)


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


def test_of_two_servers_one_reaps(etcd: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is stuck, however slow it is, so neither stands in for the other."""
    monkeypatch.setattr(core_timers, "CLAIM_TIMEOUT", LONG)
    reaped: list[tuple[str, int]] = []

    def reaper(name: str) -> Reap:
        return lambda info: reaped.append((info.scope, info.pid)) is None

    scopes, endpoint = [f"scope {number}" for number in range(20)], etcd.get_endpoint()
    with (
        serving(prefix, endpoint, reaper("a")) as a,
        serving(prefix, endpoint, reaper("b")) as b,
        Worker(EtcdTimers(prefix, endpoint, ttl=60)) as worker,
    ):
        worker.do("acquire", 1.0, *scopes)
        eventually(lambda: len(reaped) >= 20, "all are reaped")
        for server in (a, b):
            server.knows(0)
        assert sorted(reaped) == sorted((scope, worker.pid) for scope in scopes)
        assert worker.runs()
        assert ftcoord.timer.active(prefix, endpoint) == []
        worker.do("release", *scopes)


def test_a_server_that_is_stuck_is_stood_in_for(etcd: EtcdServer, prefix: str) -> None:
    asked, endless = threading.Event(), threading.Event()

    def reap(info: TimerInfo) -> bool:
        asked.set()
        return not endless.wait(120)

    with serving(prefix, etcd.get_endpoint(), reap), Worker(EtcdTimers(prefix, etcd.get_endpoint())) as worker:
        worker.tell("hang", 0.2)
        assert asked.wait(90)
        with serving(prefix, etcd.get_endpoint()):
            worker.killed()
        endless.set()


def test_reaping_that_fails_is_tried_again(etcd: EtcdServer, prefix: str) -> None:
    calls: list[TimerInfo] = []

    def reap(info: TimerInfo) -> bool:
        calls.append(info)
        return len(calls) == 3

    with serving(prefix, etcd.get_endpoint(), reap) as server, Worker(EtcdTimers(prefix, etcd.get_endpoint())) as one:
        one.do("acquire", 0.2, "scope")
        eventually(lambda: len(calls) == 3, "three tries")
        server.knows(0)
        assert {(info.pid, info.scope) for info in calls} == {(one.pid, "scope")}


def test_a_callback_that_returns_nothing_has_reaped(etcd: EtcdServer, prefix: str) -> None:
    calls: list[TimerInfo] = []
    with (
        serving(prefix, etcd.get_endpoint(), calls.append) as server,
        Worker(EtcdTimers(prefix, etcd.get_endpoint())) as one,
    ):
        one.do("acquire", 0.2, "scope")
        eventually(lambda: bool(calls), "a call")
        server.knows(0)
        assert len(calls) == 1


@pytest.mark.parametrize("left", [-1, 1e9], ids=["expired", "hardly ever expires"])
def test_timers_of_torchs_local_client_are_refused_with_words(etcd: EtcdServer, prefix: str, left: float) -> None:
    """Their workers are plain integers. Of a batch that has one, nothing stays behind."""
    with serving(prefix, etcd.get_endpoint()) as server:
        ours, theirs = (TimerRequest(worker, "scope", time.time() + left) for worker in ("ours", 7))
        with pytest.raises(TypeError, match=r"worker 7, a plain integer.*configure\(ftcoord.timer.EtcdTimerClient"):
            server.register_timers([ours, theirs])
        assert not server.get_expired_timers(time.time() + 2e9)
        server.register_timers([TimerRequest(7, "scope", -1)])  # a release ends nothing here, and harms nothing


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
        clock.now += LONG + 1
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


def test_a_leader_that_dies(cluster: EtcdCluster) -> None:
    make = EtcdTimers("job", cluster.endpoints)
    with serving("job", cluster.endpoints), workers(make, 3) as (stuck, busy, freed):
        freed.do("acquire", LONG, "scope")
        stuck.do("acquire", 4.0, "scope")
        busy.tell("work", LONG, 200)
        cluster.kill(cluster.leader())
        freed.do("release", "scope")
        busy.answer()
        stuck.killed()
        assert freed.runs()
        assert busy.runs()


def test_a_lease_that_is_lost_is_replaced(client: EtcdClient, etcd: EtcdServer, prefix: str) -> None:
    with contextlib.closing(EtcdTimerClient(prefix, etcd.get_endpoint(), timeout=60)) as timers:
        timers.acquire("scope", time.time() + LONG)
        timers.acquire("released", time.time() + LONG)
        timers.release("released")
        eventually(lambda: len(ftcoord.timer.active(prefix, client)) == 1, "the release")
        lease, after_ms = slots(client, prefix)[0].lease, timer_of(client, prefix).after_ms
        client.revoke(lease)
        eventually(lambda: [kv for kv in slots(client, prefix) if kv.lease != lease], "another lease")
        assert timer_of(client, prefix).after_ms == pytest.approx(after_ms, abs=1000)
    assert slots(client, prefix) == []


# -- workers ----------------------------------------------------------------------------------------------------------


def test_a_host_that_vanishes_leaves_nothing(client: EtcdClient, etcd: EtcdServer, prefix: str) -> None:
    with serving(prefix, etcd.get_endpoint()) as server:
        with Worker(EtcdTimers(prefix, etcd.get_endpoint(), ttl=2)) as worker:
            worker.do("acquire", LONG, "scope")
            server.knows(1)
        eventually(lambda: slots(client, prefix) == [], "the end of the lease")
        server.knows(0)


def test_one_write_each(client: EtcdClient, etcd: EtcdServer, prefix: str) -> None:
    with contextlib.closing(EtcdTimerClient(prefix, etcd.get_endpoint(), timeout=60, ttl=600)) as timers:
        timers.acquire("first", time.time() + LONG)
        before = writes(client, prefix)
        for _ in range(10):
            timers.acquire("outer", time.time() + LONG)
            timers.acquire("inner", time.time() + LONG)
            timers.release("inner")
            timers.release("outer")
        timers.release("first")
        eventually(lambda: ftcoord.timer.active(prefix, client) == [], "the releases")
        assert writes(client, prefix) - before <= 41
        assert len(slots(client, prefix)) == 3


def test_what_a_client_is_not_for(etcd: EtcdServer, prefix: str) -> None:
    timers = EtcdTimerClient(prefix, etcd.get_endpoint(), timeout=60)
    timers.acquire("scope", time.time() + LONG)
    assert in_fork(lambda: timers.acquire("scope", time.time() + LONG)) == "ForkedProcessError"
    assert in_fork(lambda: timers.release("scope")) == "ForkedProcessError"
    assert in_fork(timers.close) == "None"
    (info,) = ftcoord.timer.active(prefix, etcd.get_endpoint())
    assert info.pid == os.getpid()
    timers.close()
    timers.close()
    timers.release("scope")
    with pytest.raises(ClientClosed, match="make new ones"):
        timers.acquire("scope", time.time() + LONG)


# -- the fleet --------------------------------------------------------------------------------------------------------


def test_what_others_see(etcd: EtcdServer, prefix: str, clock: HandClock) -> None:
    told: list[TimerInfo] = []

    def note(info: TimerInfo) -> None:
        told.append(info)
        raise ValueError("a bug of the user's")

    endpoint = etcd.get_endpoint()
    with serving(prefix, endpoint, clock=clock) as server, workers(EtcdTimers(prefix, endpoint), 2) as (one, two):
        two.do("acquire", 3 * LONG, "a step")
        with ftcoord.timer.on_expired(prefix, note, endpoint):
            one.do("acquire", LONG, "the barrier")
            first, second = ftcoord.timer.active(prefix, endpoint)
            assert (first.pid, first.scope, second.pid, second.scope) == (one.pid, "the barrier", two.pid, "a step")
            assert (first.host, first.rank) == (os.uname().nodename, None)
            assert first.age + first.left == pytest.approx(LONG, abs=10)
            server.knows(2)
            clock.now += LONG + 1
            one.killed()
            eventually(lambda: told, "it is told of")
            clock.now += 3 * LONG
            two.killed()
            eventually(lambda: len(told) == 2, "so is the next one, though the callback failed")
        assert [(info.pid, info.scope) for info in told] == [(one.pid, "the barrier"), (two.pid, "a step")]
        eventually(lambda: not ftcoord.timer.active(prefix, endpoint), "the end of the leases")


# -- torchrun ---------------------------------------------------------------------------------------------------------


def test_a_handler_serves_the_timers_of_its_workers(make_nodes: MakeNodes, etcd: EtcdServer) -> None:
    node = make_nodes(1, 1, run_id="a job", timers="1").one()
    with contextlib.closing(EtcdTimerClient()) as timers:
        timers.acquire("scope", time.time() + LONG)
        eventually(lambda: len(ftcoord.timer.active("a job", etcd.get_endpoint())) == 1, "the timer")
    node.crash()
    assert VARIABLE not in os.environ
    with pytest.raises(ConfigError, match="timers=1"):
        EtcdTimerClient()


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
