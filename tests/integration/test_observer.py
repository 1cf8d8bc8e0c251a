"""What an observer reports of a job, through outages, callbacks that raise and a thread that fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers import DEADLINE, eventually
from rdzv_nodes import spawn
from replicas import replica_processes

from ftcoord.coordination import LighthouseClient, Observer, Quorum
from ftcoord.embedded.server import EtcdServer

LONG = timedelta(seconds=DEADLINE)


class Reports:
    """Everything that an observer calls its callbacks with, in order."""

    def __init__(self) -> None:
        self.quorums: list[tuple[int, list[str]]] = []
        self.lost: list[str] = []
        self.causes: list[str] = []

    def on_quorum(self, quorum: Quorum) -> None:
        self.quorums.append((quorum.quorum_id, members(quorum)))

    def on_lost(self, replica_id: str, cause: str) -> None:
        self.lost.append(replica_id)
        self.causes.append(cause)

    def observe(self, address: str) -> Observer:
        return Observer(address, LONG, on_quorum=self.on_quorum, on_lost=self.on_lost)


class World:
    """A job of two replicas, each in a client of its own, and an observer."""

    def __init__(self, server: EtcdServer, name: str, stack: ExitStack) -> None:
        self.address = f"etcd://{server.get_endpoint()}/{name}?min_replicas=1&heartbeat_timeout_ms=600000"
        self.clients = [stack.enter_context(closing(LighthouseClient(self.address, LONG))) for _ in "ab"]
        self.reports = Reports()
        self.observer = stack.enter_context(closing(self.reports.observe(self.address)))

    def quorum(self, names: str, step: int = 0) -> int:
        """The id of a quorum of these replicas. One that was in a smaller quorum, before all had asked, asks again."""
        clients = dict(zip(names, self.clients, strict=False))

        def ask(name: str) -> Future[Quorum]:
            return spawn(partial(clients[name].quorum, name, LONG, step=step))

        asks = {name: ask(name) for name in names}

        def all_are_in() -> bool:
            for name, future in asks.items():
                if future.done() and members(future.result()) != list(names):
                    asks[name] = ask(name)
            return all(future.done() for future in asks.values())

        eventually(all_are_in, f"a quorum of {names}")
        return asks[names[0]].result(DEADLINE).quorum_id


def members(quorum: Quorum) -> list[str]:
    return [one.replica_id for one in quorum.participants]


@pytest.fixture
def world(etcd: EtcdServer, prefix: str) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(etcd, prefix.strip("/"), stack)


def test_it_reports_the_last_quorum_and_every_later_one(world: World, etcd: EtcdServer) -> None:
    first = world.quorum("ab")
    eventually(lambda: (first, ["a", "b"]) in world.reports.quorums, "the first quorum is reported")
    late = Reports()
    with closing(late.observe(world.address)):
        eventually(lambda: late.quorums == [(first, ["a", "b"])], "a later observer is told of the last quorum")
        world.clients[1].leave("b")
        second = world.quorum("a")
        for reports in (late, world.reports):
            eventually(lambda reports=reports: reports.quorums[-1] == (second, ["a"]), "the second is reported to all")
    assert second > first
    current = world.observer.quorum()
    assert current is not None
    assert current.quorum_id == second


def test_a_job_without_a_quorum_has_none(world: World) -> None:
    assert world.observer.quorum() is None


def test_a_replica_that_is_killed_is_reported_when_its_heartbeat_times_out(etcd: EtcdServer, prefix: str) -> None:
    job = f"etcd://{etcd.get_endpoint()}/{prefix.strip('/')}?min_replicas=1&heartbeat_timeout_ms=3000"
    reports = Reports()
    with replica_processes(job, 1) as (process,), closing(reports.observe(job)):
        process.quorum(process.manage("a")).result(DEADLINE)
        eventually(lambda: reports.quorums[-1:] == [(1, ["a"])], "the quorum is reported")
        process.kill()
        eventually(lambda: reports.lost == ["a"], "the lost member is reported")


def test_a_death_is_reported_with_its_cause_though_no_heartbeat_times_out(etcd: EtcdServer, prefix: str) -> None:
    job = f"etcd://{etcd.get_endpoint()}/{prefix.strip('/')}?min_replicas=1&heartbeat_timeout_ms=3600000"
    reports = Reports()
    with replica_processes(job, 1) as (process,), closing(reports.observe(job)):
        process.quorum(process.manage("a")).result(DEADLINE)
        eventually(lambda: reports.quorums[-1:] == [(1, ["a"])], "the quorum is reported")
        process.guarded()
        process.die()
        eventually(lambda: reports.causes, "the lost member is reported")
    assert reports.lost == ["a"]
    assert reports.causes[0].endswith(f"(pid {process.pid}) was killed by signal 9 (SIGKILL)")


@pytest.mark.parametrize("raising", ["on_quorum", "on_lost"])
def test_a_callback_that_raises_is_logged_and_ends_nothing(
    world: World, raising: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = []

    def fail(*arguments: Any) -> None:
        calls.append(arguments)
        raise RuntimeError("the user's")

    reports = Reports()
    callbacks: dict[str, Callable[..., None]] = {
        "on_quorum": reports.on_quorum,
        "on_lost": reports.on_lost,
        raising: fail,
    }
    with closing(Observer(world.address, LONG, **callbacks)):
        for count in (1, 2):
            world.quorum("ab", step=count)
            world.clients[1].leave("b")
            eventually(lambda count=count: world.reports.lost == ["b"] * count, "the lost member is reported")
            eventually(lambda count=count: len(calls) >= count, f"{raising} is called {count} times")
    eventually(lambda: caplog.text.count("the user's") >= 2, "each failure is logged")
    assert bool(reports.quorums) is (raising != "on_quorum")


def test_it_goes_on_after_an_outage(fragile: EtcdServer) -> None:
    with ExitStack() as stack:
        world = World(fragile, "outage", stack)
        first = world.quorum("a")
        eventually(lambda: (first, ["a"]) in world.reports.quorums, "the first quorum is reported")
        fragile.kill()
        with pytest.raises(RuntimeError, match="status: Unavailable"):
            world.observer.quorum()
        fragile.restart()
        second = world.quorum("ab")
        eventually(lambda: world.reports.quorums[-1] == (second, ["a", "b"]), "the quorum after the outage is reported")
        assert world.reports.lost == []


def test_the_example_restarts_a_script_that_would_wait_for_a_lost_peer(etcd: EtcdServer, prefix: str) -> None:
    job = f"etcd://{etcd.get_endpoint()}/{prefix.strip('/')}?min_replicas=1&heartbeat_timeout_ms=3600000"
    example = Path(__file__).parents[2] / "examples" / "lost_replica.py"
    script = "import os, sys; print('started', os.getpid(), flush=True); sys.exit(int(bool(sys.stdin.readline())))"
    with replica_processes(job, 1) as (peer,):
        manager = peer.manage("a")
        peer.quorum(manager).result(DEADLINE)
        peer.guarded()
        supervisor = subprocess.Popen(
            [sys.executable, str(example), job, sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert supervisor.stdout is not None
            first = supervisor.stdout.readline()
            peer.quorum(manager, step=1, failures=1).result(DEADLINE)  # one that the script may be in
            peer.die()
            said = supervisor.stdout.readline()
            second = supervisor.stdout.readline()
            supervisor.communicate(timeout=DEADLINE)  # closes its input, and the script's, which ends by that
        finally:
            supervisor.kill()
            supervisor.communicate()
    assert first.split()[0] == second.split()[0] == "started"
    assert first != second
    assert said.startswith("a is lost: ")
    assert said.endswith(f"(pid {peer.pid}) was killed by signal 9 (SIGKILL); the script is started again\n")
    assert supervisor.returncode == 0


def test_the_example_of_the_docs(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    decided = world.quorum("a")
    text = (Path(__file__).parents[2] / "docs" / "torchft.md").read_text(encoding="utf-8")
    example = text.partition("## Observing a job")[2].partition("```python")[2].partition("```")[0]
    assert '"etcd://127.0.0.1:2379/job1"' in example
    exec(example.replace("etcd://127.0.0.1:2379/job1", world.address), {})
    assert f"{decided} ['a']" in capsys.readouterr().out
