"""What a timer server does with a timer that another server found expired, in memory and on a clock of the test's."""

from __future__ import annotations

from dataclasses import replace

from ftcoord.core.timer_records import Timer, Worker
from ftcoord.core.timers import CLAIM_TIMEOUT
from ftcoord.etcd.api import KeyValue
from ftcoord.testing import MemoryEtcd
from ftcoord.timer.requests import EtcdTimerRequest
from ftcoord.timer.server import EtcdTimerServer

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
