"""What a process that stands by leases knows when it is started."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from ftcoord.config import EtcdConfig
from ftcoord.primitives.sentinel import Sentinel

LEASE, TTL, SENT_AT = 0x4711, 10.0, 123.5


def test_it_has_its_orders_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may be killed as soon as it runs: what it is told later may never come. They name also a lease that
    came before, for which none was started."""
    orders: list[dict[str, Any]] = []

    def start(arguments: list[str], *, stdin: int, **_: object) -> None:
        assert "ftcoord.primitives.sentinel_main" in arguments
        os.set_blocking(stdin, False)
        orders.extend(map(json.loads, os.read(stdin, 1 << 20).splitlines()))
        raise OSError("the process was killed here")

    monkeypatch.setattr(subprocess, "Popen", start)
    sentinel = Sentinel()
    sentinel.keep(EtcdConfig.of("127.0.0.1:1"), LEASE + 1, TTL, "", starts=False)
    assert not orders
    sentinel.keep(EtcdConfig.of("127.0.0.1:1"), LEASE, TTL, "/job/deaths/", ["a"], sent_at=SENT_AT)
    sentinel.drop(LEASE)
    noted, kept = [order for order in orders if "keep" in order]
    assert noted["keep"] == LEASE + 1
    assert (kept["keep"], kept["ttl"], kept["deaths"], kept["was"]) == (LEASE, TTL, "/job/deaths/", ["a"])
    assert kept["at"] == SENT_AT, "this process may have been stopped since"
    assert any("config" in order and order["etcd"] == kept["etcd"] for order in orders)


def test_a_process_that_has_given_up_root_can_end_its_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not kill its sentinel any longer."""

    def refuse() -> None:
        raise PermissionError(errno.EPERM, "it is root's")

    process = SimpleNamespace(pid=1, kill=refuse, wait=lambda _timeout: 0)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: process)
    sentinel = Sentinel()
    sentinel.keep(EtcdConfig.of("127.0.0.1:1"), LEASE, TTL, "/job/deaths/")
    assert sentinel.pid == 1
    sentinel.drop(LEASE)
    assert sentinel.pid is None
