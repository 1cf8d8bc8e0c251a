"""Timers and heartbeats: what is refused before any socket is opened, what an agent tells its workers, and records."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from held import TIMER, WORKER, expired_kv, timers_kv
from helpers import pem
from torch.distributed.elastic.rendezvous import RendezvousParameters

import ftcoord
from ftcoord.config import EtcdConfig
from ftcoord.core import timers as records
from ftcoord.core.layout import heartbeat_key, is_expired_key
from ftcoord.core.timers import MOST_TIMERS, HeldTimers, Timer, Worker, parse_timers
from ftcoord.errors import ConfigError, StateError
from ftcoord.heartbeat import Beat, HeartbeatEvent, Roll, encode, parse_beat
from ftcoord.rendezvous.backend import create_backend
from ftcoord.timer import VARIABLE, Ledger, describe, etcd_timer as client_module, holds, inherited, this_process

NOWHERE = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    for module in ("ftcoord.etcd.client", "ftcoord.timer"):
        monkeypatch.setattr(f"{module}.SharedClient", refuse)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: ftcoord.timer.EtcdTimerClient(""), "run="),
    (lambda: ftcoord.timer.EtcdTimerClient("job", timeout=-1), "timeout=-1"),
    (lambda: ftcoord.timer.EtcdTimerClient("job", timeout=math.nan), "timeout=nan"),
    (lambda: ftcoord.timer.EtcdTimerClient("job", timeout="soon"), "timeout="),  # type: ignore[arg-type]
    (lambda: ftcoord.timer.EtcdTimerClient("job", ttl=1), "ttl=1"),
    (lambda: ftcoord.timer.EtcdTimerClient("job", ttl=2.5), "ttl=2.5"),  # type: ignore[arg-type]
    (lambda: ftcoord.timer.EtcdTimerClient("job", "a b"), "endpoints"),
    (lambda: ftcoord.timer.EtcdTimerClient("job", key_prefix="x"), "key_prefix="),
    (lambda: ftcoord.timer.EtcdTimerClient(None, "host"), "run is missing"),
    (lambda: ftcoord.timer.EtcdTimerServer(" "), "run="),
    (lambda: ftcoord.timer.EtcdTimerServer("job", max_interval=0), "max_interval=0"),
    (lambda: ftcoord.timer.active(""), "run="),
    (lambda: ftcoord.timer.active("\udc80"), "run="),
    (lambda: ftcoord.Heartbeat("job", "", 5), "name=''"),
    (lambda: ftcoord.Heartbeat("", "me", 5), "run="),
    (lambda: ftcoord.Heartbeat("job", "me", -1), "ttl=-1"),
    (lambda: ftcoord.Heartbeat("job", "me", math.nan), "ttl=nan"),
    (lambda: ftcoord.Heartbeat("job", "me", 5, math.inf), "data="),
    (lambda: ftcoord.Heartbeat("job", "me", 5, "x" * 2**20), "data="),
    (lambda: ftcoord.watch_heartbeats(None), "run is missing"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "named"), REFUSED)
def test_bad_arguments(make: Callable[[], object], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make()
    assert str(refused.value).startswith(named)


def test_torchs_own_rendezvous_serves_no_timers() -> None:
    with pytest.raises(ConfigError, match="timers"):
        create_backend(RendezvousParameters("etcd-v3-dynamic", NOWHERE, "job", 1, 1, timers="1"))


def test_wrong_types() -> None:
    with pytest.raises(TypeError, match="JSON"):
        ftcoord.Heartbeat("job", "me", 5, object())


def test_a_heartbeat_is_a_context_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftcoord.etcd.client.SharedClient", lambda config: None)
    with pytest.raises(RuntimeError, match="with Heartbeat"):
        ftcoord.Heartbeat("job", "me", 5).update(1)


class Key:
    """In place of etcd: what a client has written."""

    def __init__(self, *_: object, **__: object) -> None:
        self.written: tuple[Timer, ...] = ()

    def check_process(self) -> None:
        pass

    def put(self, value: bytes) -> None:
        self.written = parse_timers("", value).timers

    def wait(self, timeout: float) -> bool:
        return True

    def close(self, timeout: float) -> None:
        pass


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[client_module.EtcdTimerClient, Key]]:
    key = Key()
    monkeypatch.setattr(client_module, "LeasedKey", lambda *_, **__: key)
    monkeypatch.setattr("ftcoord.etcd.client.SharedClient", lambda config: EtcdNowhere())
    client = ftcoord.timer.EtcdTimerClient("job", NOWHERE)
    yield client, key
    client.close()


class EtcdNowhere:
    def close(self) -> None:
        pass


@pytest.mark.parametrize("when", [math.nan, math.inf, -math.inf, 1e10])
def test_times_that_are_none(timers: tuple[client_module.EtcdTimerClient, Key], when: float) -> None:
    with pytest.raises(ConfigError, match="expiration_time"):
        timers[0].acquire("scope", when)
    assert timers[1].written == ()


def test_scopes_that_are_none(timers: tuple[client_module.EtcdTimerClient, Key]) -> None:
    client, key = timers
    with pytest.raises(ConfigError, match="scope_id"):
        client.acquire("", time.time() + 1)
    for bad in (None, 5):
        with pytest.raises(TypeError, match="scope_id"):
            client.acquire(bad, time.time() + 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expiration_time"):
        client.acquire("scope", "now")  # type: ignore[arg-type]
    assert key.written == ()


def test_of_a_long_name_the_end_is_recorded(timers: tuple[client_module.EtcdTimerClient, Key]) -> None:
    client, key = timers
    client.acquire("x" * 5000 + ".py#7", time.time() + 1)
    (timer,) = key.written
    assert (len(timer.scope), timer.scope[-6:]) == (256, "x.py#7")


def test_a_process_holds_so_many_timers_and_no_more(timers: tuple[client_module.EtcdTimerClient, Key]) -> None:
    client, key = timers
    for number in range(MOST_TIMERS):
        client.acquire(f"scope {number}", time.time() + 60)
    with pytest.raises(ConfigError, match="256"):
        client.acquire("one more", time.time() + 60)
    client.release("scope 7")
    client.acquire("one more", time.time() + 60)
    assert (key.written[-1].scope, key.written[-1].slot) == ("one more", 7)


def test_the_ledger_shows_at_once_what_this_very_process_holds() -> None:
    ledger = Ledger("/run")
    me = this_process(ledger.fd)

    def held(slot: int, token: int, worker: Worker = me, run: str = "/run") -> bool:
        return holds(run, worker, replace(TIMER, slot=slot, token=token))

    assert not held(3, 77)
    ledger.note(3, 77)
    ledger.note(4, 2**62)
    assert held(3, 77)
    assert held(4, 2**62)
    assert not held(3, 77, run="/another run")
    for other in ({"start": me.start - 1}, {"ledger": 0}, {"ledger": 2**20}, {"pid": 2**22}):
        assert not held(3, 77, replace(me, **other))
    ledger.note(3, 78)
    assert not held(3, 77)
    ledger.note(4, 0)
    assert not held(4, 2**62)
    ledger.close()
    assert not held(3, 78)


# -- what an agent tells ----------------------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[EtcdConfig]:
    """The configurations that clients were made with."""
    configs: list[EtcdConfig] = []
    monkeypatch.setattr("ftcoord.timer.SharedClient", configs.append)
    return configs


def test_workers_find_all_they_need(told: list[EtcdConfig], tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text(pem("CERTIFICATE"))
    env = {"FTCOORD_PASSWORD": "s3cr3t", "FTCOORD_ENDPOINTS": "elsewhere"}
    config = EtcdConfig.load("h1:1,h2:2", ca_cert=ca, user="u", server_name="etcd", request_timeout=3, env=env)
    text = describe("/prefix/run", config)
    assert "s3cr3t" not in text
    assert inherited({**env, VARIABLE: text}).prefix == "/prefix/run"
    assert told == [config]


@pytest.mark.parametrize("user", ["ETCDCTL_USER=u:s3cr3t", "ETCDCTL_USER=u ETCDCTL_PASSWORD=s3cr3t"])
def test_passwords_come_as_the_agent_got_them(told: list[EtcdConfig], user: str) -> None:
    env = dict(pair.split("=") for pair in user.split())
    config = EtcdConfig.load("h1:1", env=env)
    assert config.credentials is not None
    inherited({**env, VARIABLE: describe("/p", config)})
    assert told == [config]


def test_an_embedded_etcd_has_nothing_of_the_environments(told: list[EtcdConfig]) -> None:
    config = EtcdConfig.load("127.0.0.1:5", env={})
    with_login = EtcdConfig.load("127.0.0.1:5", env={}, user="root", password="its own")
    for one in (config, with_login):
        text = describe("/p", one, with_password=True)
        inherited({"FTCOORD_CA_CERT": "/nowhere", "FTCOORD_PASSWORD": "x", VARIABLE: text})
    assert told == [config, with_login]


def test_a_worker_that_nobody_told() -> None:
    with pytest.raises(ConfigError, match="timers=1"):
        inherited({})
    for text in ("{", "[]", "{}", '{"prefix": "/p", "endpoints": ["h"]}'):
        with pytest.raises(ConfigError, match=VARIABLE):
            inherited({VARIABLE: text})


# -- records ----------------------------------------------------------------------------------------------------------

KEY, VALUE = timers_kv("/run").key, timers_kv("/run").value
MOST_BYTES = 1024 * 1024
"""Of a value that etcd takes on default settings (1.5 MiB), with the rest of the request."""


def test_a_record_of_timers_comes_back() -> None:
    assert KEY == "/run/timers/h1/0000000000000001"
    assert records.parse_timers(KEY, VALUE) == HeldTimers(WORKER, (TIMER,))
    assert records.parse_timers(KEY, records.encode(HeldTimers(WORKER, ()))).timers == ()
    assert [is_expired_key(key) for key in (KEY, expired_kv("/run").key)] == [False, True]


def test_the_longest_record_is_not_too_long_for_etcd() -> None:
    longest = replace(TIMER, scope="\U0001f600" * records.LONGEST_SCOPE)
    assert len(records.encode(HeldTimers(WORKER, (longest,) * MOST_TIMERS))) < MOST_BYTES


def test_on_its_own_host_a_timer_is_told_by_the_monotonic_clock() -> None:
    info = records.inform(WORKER, replace(TIMER, until_ms=5_009_000), "h1", now=5006.0, wall=0.0)
    assert (info.host, info.pid, info.rank, info.scope) == ("node7", 7, 3, "step")
    assert (info.age, info.left) == (2.0, 3.0)


def test_elsewhere_it_is_told_by_the_wall_clocks() -> None:
    info = records.inform(replace(WORKER, rank=-1), TIMER, "h2", now=0.0, wall=1001.0)
    assert (info.age, info.left, info.rank) == (2.0, 3.0, None)


def test_a_beat_comes_back() -> None:
    beat = Beat("a", '{"x":1}')
    key = heartbeat_key("/run", "a", 0xAB)
    assert key == "/run/heartbeats/a/00000000000000ab"
    assert parse_beat(key, encode(beat)) == beat
    with pytest.raises(StateError, match="no JSON"):
        parse_beat(key, encode(Beat("a", "{")))


def test_the_newest_alone_counts() -> None:
    """A process that was started again lives beside the lease of the one that was killed."""
    roll = Roll()
    roll.note("a/1", 5, Beat("a", "1"))
    assert roll.note("a/2", 6, Beat("a", "2")) == HeartbeatEvent("updated", "a", 2)
    assert roll.note("a/1", 5, Beat("a", "old")) is None
    assert roll.note("a/1", 5, Beat("a", "old", left=True)) is None
    assert roll.note("a/2", 6, Beat("a", "2", left=True)) == HeartbeatEvent("lost", "a", 2, "left")
    assert roll.drop("a/1", "a") is None
    assert roll.note("a/3", 7, Beat("a", "3")) == HeartbeatEvent("joined", "a", 3)
    assert roll.drop("a/3", "a") == HeartbeatEvent("lost", "a", 3, "expired")
