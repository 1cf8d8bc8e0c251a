"""What a timer server does with a timer that another server found expired, or that fails, in memory and on a clock of
the test's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import eventually
from virtual import MemoryEtcd

from ftcoord.core.layout import KEY_PREFIX, run_prefix, timer_key
from ftcoord.core.timer_records import Timer, Worker, encode
from ftcoord.core.timers import CLAIM_TIMEOUT
from ftcoord.etcd.api import KeyValue
from ftcoord.timer import server as server_module
from ftcoord.timer.requests import EtcdTimerRequest
from ftcoord.timer.server import NO_EXPIRY_AFTER_GAP, TIMER_RETRY_PAUSE, EtcdTimerServer

WORKER = Worker(host="host", pid=1, start=1, node="node", rank=0, ledger=0, ttl=10)
EXPIRED = Timer(WORKER, "scope", 1000, 1000, 0, 0, slot=0, token=1, expired="one that cannot kill")


def told(server: EtcdTimerServer, timer: Timer, revision: int) -> None:
    """Its watch brings the timer as it was written at this revision."""
    server.register_timers([EtcdTimerRequest(KeyValue("/timer", b"", 1, revision, revision, 0), timer)])


def test_who_marks_a_timer_again_and_again_keeps_no_other_server_from_it() -> None:
    now = 100.0
    with MemoryEtcd() as etcd:
        server = EtcdTimerServer("run", etcd.client(), clock=lambda: now)
        told(server, EXPIRED, 1)
        for revision in (2, 3, 4):
            now += CLAIM_TIMEOUT / 4
            told(server, EXPIRED, revision)
        assert not server._book.expired(now)
        now = 100.0 + CLAIM_TIMEOUT
        (_, entry), *others = server._book.expired(now)
        assert not others
        assert isinstance(entry.item, EtcdTimerRequest)
        assert entry.item.kv.mod_revision == 4, "it marks the last one"
        server.stop()


def test_who_takes_a_timer_over_has_time_of_its_own() -> None:
    now = 100.0
    with MemoryEtcd() as etcd:
        server = EtcdTimerServer("run", etcd.client(), clock=lambda: now)
        told(server, EXPIRED, 1)
        now += CLAIM_TIMEOUT
        for another in (replace(EXPIRED, expired="another server"), replace(EXPIRED, token=2)):
            told(server, another, 2)
            assert not server._book.expired(now)
        server.stop()


def test_a_timer_that_fails_is_postponed_by_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    failing, reaped = replace(WORKER, pid=7), []
    monkeypatch.setattr(server_module, "lives", lambda worker: True)

    def holds(pid: int, ledger: int, slot: int, token: int) -> bool | None:
        if pid == failing.pid:
            raise OverflowError("no system call takes this")
        return True

    monkeypatch.setattr(server_module, "holds", holds)
    with MemoryEtcd() as etcd, etcd.client() as client:
        server = EtcdTimerServer("run", client, clock=lambda: now, reap=lambda info: reaped.append(info.pid))
        lease = client.grant(60).id
        for worker, left in ((failing, 0), (WORKER, 1)):
            key = timer_key(run_prefix(KEY_PREFIX, "run"), server._host, lease, str(worker.pid))
            record = replace(EXPIRED, worker=replace(worker, host=server._host), left_ms=left, expired="")
            client.put(key, encode(record), lease)
        eventually(lambda: server._run_watchdog() or len(server._book.entries) == 2, "both timers are known")
        for _ in range(5):
            now += NO_EXPIRY_AFTER_GAP + 1
            server._run_watchdog()
        assert reaped == [WORKER.pid]
        assert server._book.look_at() == now + TIMER_RETRY_PAUSE
        lines = [record.getMessage() for record in caplog.records if "cannot be handled" in record.getMessage()]
        assert lines == ["timer 'scope' cannot be handled, and is tried again: no system call takes this"]
        server.stop()


def test_a_turn_that_fails_is_followed_by_a_pause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug of a subclass")

    with MemoryEtcd() as etcd:
        server = EtcdTimerServer("run", etcd.client())
        monkeypatch.setattr(server, "register_timers", fail)
        waited: list[float] = []
        monkeypatch.setattr(server._resources.stopping, "wait", waited.append)
        for _ in range(3):
            server._turn()
        assert waited == [TIMER_RETRY_PAUSE] * 3
        assert caplog.text.count("a turn of the timer server failed") == 1
        server.stop()
