"""What clients, servers and heartbeats refuse before any socket is opened, and what an agent tells its workers."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import pem
from torch.distributed.elastic.rendezvous import RendezvousParameters

import ftcoord
from ftcoord.config import EtcdConfig
from ftcoord.errors import ConfigError
from ftcoord.rendezvous.backend import create_backend
from ftcoord.timer import client as client_module
from ftcoord.timer.environment import VARIABLE, describe, inherited
from ftcoord.timer.ledger import Ledger, holds
from ftcoord.timer.process import kill, lives, started, this_process

NOWHERE = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    for module in ("ftcoord.etcd.namespace", "ftcoord.timer.environment"):
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
    (lambda: ftcoord.timer.on_expired("\udc80", print), "run="),
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
    with pytest.raises(TypeError, match="callback"):
        ftcoord.timer.on_expired("job", "print")  # type: ignore[arg-type]


def test_a_heartbeat_is_a_context_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftcoord.etcd.namespace.SharedClient", lambda config: None)
    with pytest.raises(RuntimeError, match="with Heartbeat"):
        ftcoord.Heartbeat("job", "me", 5).update(1)


class Keys:
    """In place of etcd: what a client has written, rendered."""

    def __init__(self, *_: object) -> None:
        self.written: dict[str, bytes] = {}

    def check_process(self) -> None:
        pass

    def put(self, name: str, render: Callable[[], bytes]) -> None:
        self.written[name] = render()

    def wait(self, name: str, timeout: float) -> bool:
        return True

    def close(self, timeout: float) -> None:
        pass

    def left(self, name: str = "0") -> float:
        """Seconds that a timer has."""
        return float(json.loads(self.written[name])["left_ms"]) / 1000


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[client_module.EtcdTimerClient, Keys]]:
    keys = Keys()
    monkeypatch.setattr(client_module, "LeasedKeys", lambda *_: keys)
    monkeypatch.setattr("ftcoord.etcd.namespace.SharedClient", lambda config: EtcdNowhere())
    client = ftcoord.timer.EtcdTimerClient("job", NOWHERE)
    yield client, keys
    client.close()


class EtcdNowhere:
    def close(self) -> None:
        pass


@pytest.mark.parametrize("when", [math.nan, math.inf, -math.inf, 1e10])
def test_times_that_are_none(timers: tuple[client_module.EtcdTimerClient, Keys], when: float) -> None:
    with pytest.raises(ConfigError, match="expiration_time"):
        timers[0].acquire("scope", when)
    assert timers[1].written == {}


def test_scopes_that_are_none(timers: tuple[client_module.EtcdTimerClient, Keys]) -> None:
    client, keys = timers
    with pytest.raises(ConfigError, match="scope_id"):
        client.acquire("", time.time() + 1)
    for bad in (None, 5):
        with pytest.raises(TypeError, match="scope_id"):
            client.acquire(bad, time.time() + 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expiration_time"):
        client.acquire("scope", "now")  # type: ignore[arg-type]
    assert keys.written == {}


def test_of_a_long_name_the_end_is_recorded(timers: tuple[client_module.EtcdTimerClient, Keys]) -> None:
    client, keys = timers
    client.acquire("x" * 5000 + ".py#7", time.time() + 1)
    scope = json.loads(keys.written["0"])["scope"]
    assert (len(scope), scope[-6:]) == (1024, "x.py#7")


def test_a_process_holds_so_many_timers_and_no_more(timers: tuple[client_module.EtcdTimerClient, Keys]) -> None:
    client, keys = timers
    for number in range(8192):
        client.acquire(f"scope {number}", time.time() + 60)
    with pytest.raises(ConfigError, match="8192"):
        client.acquire("one more", time.time() + 60)
    client.release("scope 7")
    client.acquire("one more", time.time() + 60)
    assert json.loads(keys.written["7"])["scope"] == "one more"


def test_a_wall_clock_that_is_set(
    timers: tuple[client_module.EtcdTimerClient, Keys], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, keys = timers
    true_time = time.time
    client.acquire("scope", time.time() + 60)
    assert keys.left() == pytest.approx(60, abs=20)
    torchs = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: true_time() + 3600)  # between torch's look at the clock and ours
    client.acquire("scope", torchs)
    assert keys.left() == pytest.approx(60, abs=20)
    client.acquire("scope", time.time() + 60)
    assert keys.left() == pytest.approx(60, abs=20)
    client.acquire("scope", time.time() - 60)
    assert keys.left() == 0


def test_the_ledger_tells_at_once() -> None:
    ledger, me = Ledger(), started(this_process(0, 1).pid)
    pid = this_process(0, 1).pid
    assert me is not None
    assert holds(pid, ledger.fd, 3, 77) is False
    ledger.hold(3, 77)
    ledger.hold(4, 2**62)
    assert holds(pid, ledger.fd, 3, 77) is True
    assert holds(pid, ledger.fd, 4, 2**62) is True
    ledger.hold(3, 78)
    assert holds(pid, ledger.fd, 3, 77) is False
    ledger.release(4)
    assert holds(pid, ledger.fd, 4, 2**62) is False
    assert holds(pid, 0, 3, 78) is None
    assert holds(2**30, ledger.fd, 3, 78) is None


def test_a_process_is_known_by_its_start() -> None:
    me = this_process(0, 1)
    assert lives(me)
    other = type(me)(me.host, me.pid, me.start - 1, me.node, me.rank, 0, 1)
    assert not lives(other)
    assert not kill(other)
    assert started(2**30) is None


# -- what an agent tells ----------------------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[EtcdConfig]:
    """The configurations that clients were made with."""
    configs: list[EtcdConfig] = []
    monkeypatch.setattr("ftcoord.timer.environment.SharedClient", configs.append)
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
    for text in ("{", "[]", "{}", '{"prefix": "/p", "endpoints": "h", "more": 1}'):
        with pytest.raises(ConfigError, match=VARIABLE):
            inherited({VARIABLE: text})
