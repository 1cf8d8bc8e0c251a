"""The turns of a timer server whose timers fail, whose worker loses its lease, or which was not run: in memory, on a
clock of the test's."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
from held import TIMER, WORKER, timers_kv
from helpers import eventually
from virtual import MemoryEtcd

from ftcoord import proc
from ftcoord.core.layout import KEY_PREFIX, run_prefix
from ftcoord.core.timers import Timer, Worker
from ftcoord.timer import etcd_timer as server_module
from ftcoord.timer.etcd_timer import EtcdTimerServer


class Host:
    """A server, its clock, the timers that workers hold, and the workers that were reaped."""

    def __init__(self, undo: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.reaped = 100.0, list[int]()
        self.held = set[int]()
        self.prefix = run_prefix(KEY_PREFIX, "run")
        monkeypatch.setattr(server_module, "holds", self._holds)
        self.client = undo.enter_context(undo.enter_context(MemoryEtcd()).client())
        self.server = EtcdTimerServer("run", self.client, clock=lambda: self.now, reap=self._reap, max_interval=0.01)
        undo.callback(self.server.stop)

    def _holds(self, prefix: str, worker: Worker, timer: Timer) -> bool:
        if timer.scope == "odd":
            raise PermissionError("no system call takes this")
        return timer.token in self.held

    def _reap(self, info: object) -> bool:
        self.reaped.append(getattr(info, "pid"))  # noqa: B009
        return True

    def acquires(self, pid: int, until: float, scope: str = "step") -> int:
        """A worker acquires a timer; its lease."""
        timer = replace(TIMER, scope=scope, until_ms=int(1000 * until), token=pid)
        lease = self.client.grant(60).id
        kv = timers_kv(self.prefix, timer, worker=replace(WORKER, host=self.server._host, pid=pid), lease=lease)
        self.client.put(kv.key, kv.value, lease)
        self.held.add(pid)
        self.turns_until(lambda: pid in [entry.request.worker_id.pid for entry in self.server._book.values()])
        return lease

    def turns_until(self, condition: object) -> None:
        assert callable(condition)
        eventually(lambda: self.server._run_watchdog() or condition(), "the server has done it")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    with ExitStack() as undo:
        yield Host(undo, monkeypatch)


def test_a_timer_that_cannot_be_checked_keeps_no_other_one_from_expiring(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    host.acquires(7, 101.0, "odd")
    host.acquires(8, 102.0)
    host.now = 103.0
    host.turns_until(lambda: host.reaped)
    assert host.reaped == [8]
    assert "timers of worker 7 guard nobody: no system call takes this" in caplog.text


def test_a_worker_whose_lease_has_ended_is_reaped_if_it_still_holds_the_timer(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C code holds its interpreter, or it is stopped."""
    leases = [host.acquires(7, 200.0), host.acquires(8, 200.0)]
    host.held.remove(8)
    for lease in leases:
        host.client.revoke(lease)
    host.turns_until(lambda: len(host.server._book) == 1)
    monkeypatch.setattr(server_module, "LATE_AFTER", math.inf)
    host.now = 201.0
    host.turns_until(lambda: host.reaped)
    assert host.reaped == [7]


def test_a_server_that_was_not_run_gives_all_timers_as_much_time(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.acquires(7, 101.0)
    real = host.server._queue.get

    def suspended(size: int, timeout: float) -> object:
        host.now += 50.0
        return real(size, 0)

    with monkeypatch.context() as patch:
        patch.setattr(host.server._queue, "get", suspended)
        host.server._run_watchdog()
    assert host.reaped == []
    assert [entry.due for entry in host.server._book.values()] == [pytest.approx(151.0, abs=0.1)]


def test_no_timer_ends_the_process_of_its_server(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = replace(TIMER, until_ms=0, token=9)
    worker = replace(WORKER, host=host.server._host, pid=os.getpid(), start=proc.started(os.getpid()) or 0)
    kv = timers_kv(host.prefix, timer, worker=worker)
    host.server._reap = None
    killed = list[int]()
    monkeypatch.setattr(server_module, "send_if", lambda pid, number, is_it: killed.append(pid) or True)
    host.held.add(9)
    host.client.put(kv.key, kv.value)
    host.acquires(8, 101.0)
    host.now = 102.0
    host.turns_until(lambda: killed)
    assert killed == [8]
