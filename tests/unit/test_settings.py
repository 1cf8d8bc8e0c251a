"""What torchrun's arguments and ``rdzv_conf`` become, which of two keys wins, and what is refused."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from helpers import pem
from hypothesis import given, strategies as st

from ftcoord.config import Credentials, Endpoint, EtcdConfig, Tls
from ftcoord.core.rendezvous import RoundOptions
from ftcoord.errors import ConfigError
from ftcoord.rendezvous.settings import RendezvousSettings, RunTimes

SECRET = "s3cr3t-hunter2"


def parse(conf: dict[str, Any] | None = None, **arguments: Any) -> RendezvousSettings:
    base: dict[str, Any] = {
        "backend": "etcd-v3",
        "endpoint": "host:1",
        "run_id": "job",
        "min_nodes": 1,
        "max_nodes": 2,
        "local_addr": None,
        "env": {},
    }
    return RendezvousSettings.parse(**{**base, "conf": conf or {}, **arguments})


def test_defaults() -> None:
    assert parse() == RendezvousSettings(
        backend="etcd-v3",
        run_id="job",
        min_nodes=1,
        max_nodes=2,
        local_addr=None,
        etcd=EtcdConfig((Endpoint("host", 1),)),
        times=RunTimes(join_timeout=600.0, close_timeout=30.0, request_timeout=5.0, lease_ttl=5, run_ttl=3600),
        rounds=RoundOptions(last_call_timeout=30.0, settle_timeout=1.0, recall_on_loss=True, restart="failed"),
        orphans="end",
        on_spare_close="exit",
        key_prefix="/ftcoord/v2",
    )


ACCEPTED: list[tuple[dict[str, Any], str, object]] = [
    ({"join_timeout": "60"}, "times.join_timeout", 60.0),
    ({"join_timeout": 60}, "times.join_timeout", 60.0),
    ({"join_timeout": 0.5}, "times.join_timeout", 0.5),
    ({"timeout": 900}, "times.join_timeout", 900.0),
    ({"timeout": 900, "join_timeout": "60"}, "times.join_timeout", 60.0),
    ({"join_timeout": None}, "times.join_timeout", 600.0),
    ({"last_call_timeout": " 5 "}, "rounds.last_call_timeout", 5.0),
    ({"close_timeout": "2.5"}, "times.close_timeout", 2.5),
    ({"settle_timeout": ".1"}, "rounds.settle_timeout", 0.1),
    ({"heartbeat_timeout": "7"}, "times.request_timeout", 7.0),
    ({"heartbeat_timeout": "7", "read_timeout": "8"}, "times.request_timeout", 8.0),
    ({"heartbeat_timeout": "7", "read_timeout": "8", "request_timeout": 9}, "times.request_timeout", 9.0),
    ({"lease_ttl": "2"}, "times.lease_ttl", 2),
    ({"lease_ttl": 20.0}, "times.lease_ttl", 20),
    ({"lease_ttl": 3600, "run_ttl": 14401}, "times.lease_ttl", 3600),
    ({"keep_alive_interval": "4"}, "times.lease_ttl", 12),
    ({"keep_alive_max_attempt": "4"}, "times.lease_ttl", 20),
    ({"keep_alive_interval": 2.5, "keep_alive_max_attempt": 3}, "times.lease_ttl", 8),
    ({"keep_alive_interval": 1.1, "keep_alive_max_attempt": 10}, "times.lease_ttl", 11),
    ({"keep_alive_interval": 0.1, "keep_alive_max_attempt": 1}, "times.lease_ttl", 2),
    ({"keep_alive_interval": 100, "lease_ttl": 5}, "times.lease_ttl", 5),
    ({"run_ttl": "60"}, "times.run_ttl", 60),
    ({"on_member_loss": "ignore"}, "rounds.recall_on_loss", False),
    ({"on_member_loss": "RESTART"}, "rounds.recall_on_loss", True),
    ({"orphans": "leave"}, "orphans", "leave"),
    ({"timers": "1"}, "timers", True),
    ({"timers": 0}, "timers", False),
    ({"timers": True}, "timers", True),
    *(({"timers": word}, "timers", True) for word in ("yes", " On ", "TRUE", 1)),
    *(({"timers": word}, "timers", False) for word in ("no", "off", "false", False)),
    ({"on_spare_close": "raise"}, "on_spare_close", "raise"),
    ({"on_spare_close": " Exit "}, "on_spare_close", "exit"),
    ({"key_prefix": "/team/a"}, "key_prefix", "/team/a"),
    ({"key_prefix": " /team/a// "}, "key_prefix", "/team/a"),
    ({"etcd_prefix": "/torchelastic/p2p/"}, "key_prefix", "/torchelastic/p2p"),
    ({"etcd_prefix": "/old", "key_prefix": "/new"}, "key_prefix", "/new"),
    ({"protocol": "HTTP"}, "etcd", EtcdConfig((Endpoint("host", 1),))),
    ({"protocol": "https"}, "etcd", EtcdConfig((Endpoint("host", 1),), tls=Tls())),
]


@pytest.mark.parametrize(("conf", "setting", "expected"), ACCEPTED)
def test_accepted(conf: dict[str, Any], setting: str, expected: object) -> None:
    value = attrgetter(setting)(parse(conf))
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize("names", [("ca_cert", "cert", "key"), ("cacert", "ssl_cert", "ssl_cert_key")])
def test_both_spellings_of_tls(tmp_path: Path, names: tuple[str, str, str]) -> None:
    path = tmp_path / "all.pem"
    path.write_text(pem("CERTIFICATE") + pem("PRIVATE KEY"))
    conf = {**dict.fromkeys(names, str(path)), "server_name": "etcd.example"}
    settings = parse({**conf, "protocol": "https"})
    assert settings.etcd is not None
    assert settings.etcd.tls == Tls(ca=str(path), cert=str(path), key=str(path), server_name="etcd.example")
    assert parse(conf) == settings
    both = {"ca_cert": str(path), "cacert": f" {path} ", "cert": str(path), "ssl_cert": str(path)}
    assert parse({**conf, **both}) == settings


def test_the_conf_comes_before_the_environment() -> None:
    env = {
        "FTCOORD_ENDPOINTS": "other:5",
        "FTCOORD_REQUEST_TIMEOUT": "33",
        "FTCOORD_USER": "bob",
        "FTCOORD_PASSWORD": SECRET,
    }
    from_env = EtcdConfig((Endpoint("other", 5),), credentials=Credentials("bob", SECRET), request_timeout=33.0)
    assert parse(endpoint="", env=env).etcd == from_env
    assert parse(endpoint="", env=env).times.request_timeout == 33.0
    assert parse(endpoint="host:1", env=env).etcd == EtcdConfig.load("host:1", env=env)
    settings = parse({"user": "alice", "read_timeout": "4"}, env=env)
    expected = EtcdConfig((Endpoint("host", 1),), credentials=Credentials("alice", SECRET), request_timeout=4.0)
    assert settings.etcd == expected
    assert settings.times.request_timeout == 4.0


def test_nowhere_an_endpoint_means_this_machine() -> None:
    assert parse(endpoint="").etcd == EtcdConfig((Endpoint("127.0.0.1", 2379),))


def test_embedded() -> None:
    env = {"FTCOORD_ENDPOINTS": "a"}
    settings = parse({"read_timeout": "4", "protocol": "http"}, endpoint=" Embedded ", max_nodes=1, env=env)
    assert settings.etcd is None
    assert settings.times.request_timeout == 4.0


@pytest.mark.parametrize("min_nodes", [1, 2])
def test_embedded_is_for_one_node(min_nodes: int) -> None:
    """The others would each wait beside an etcd of their own."""
    with pytest.raises(ConfigError, match=rf"^--nnodes='{min_nodes}:2' .*serves this agent only.*`ftcoord server`"):
        parse(endpoint="embedded", min_nodes=min_nodes)


@pytest.mark.parametrize(
    ("given_address", "expected"),
    [(None, None), ("", None), ("Node-1", "node-1"), ("10.0.0.1", "10.0.0.1"), ("FD00::1", "fd00::1")],
)
def test_local_addr(given_address: str | None, expected: str | None) -> None:
    assert parse(local_addr=given_address).local_addr == expected


NOT_SECONDS = ["", " ", "0", 0, "-1", -1, "inf", float("inf"), "nan", float("nan"), True, False, "5s", "1_0", 2e9]
SECONDS = ["join_timeout", "timeout", "last_call_timeout", "close_timeout", "settle_timeout", "request_timeout"]
SECONDS += ["read_timeout", "heartbeat_timeout", "keep_alive_interval"]
NOT_WHOLE = ["", "0", 0, -3, "2.5", 2.5, "inf", float("nan"), True, "ten", 10**10]

REFUSED: list[tuple[str, object]] = [
    *((key, value) for key in SECONDS for value in NOT_SECONDS),
    *((key, value) for key in ("lease_ttl", "run_ttl", "keep_alive_max_attempt") for value in NOT_WHOLE),
    ("lease_ttl", 1),
    ("lease_ttl", "1"),
    ("lease_ttl", 3601),
    ("lease_ttl", [10]),
    ("run_ttl", 20),
    ("keep_alive_max_attempt", 1001),
    ("keep_alive_max_attempt", 900),
    *(("key_prefix", value) for value in ("", " ", "/", "//", "a", "a/b", "/a//b", "//a", "/a\nb", "/a\0", 5, b"/a")),
    *(("etcd_prefix", value) for value in ("", "torchelastic/p2p")),
    *(("timers", value) for value in ("", "y", "2", -1, 0.5)),
    *(("on_member_loss", value) for value in ("", "exit", "raise", "no", 1, True)),
    *(("on_spare_close", value) for value in ("", "restart", "close", 0)),
    *(("protocol", value) for value in ("", "ftp", "tls", "http://", 1, False)),
    *((key, value) for key in ("ca_cert", "cacert", "server_name", "user") for value in ("", " ", 5, True)),
    ("ca_cert", "/no/such/file"),
    ("cacert", "/no/such/file"),
    ("cert", "/no/such/file"),
    ("ssl_cert", "/no/such/file"),
    ("key", "/no/such/file"),
    ("ssl_cert_key", "/no/such/file"),
    ("server_name", "a:1"),
    ("user", "alice"),
    *((key, "x") for key in ("joint_timeout", "is_host", "store_type", "rank", "cas_backoff_max_seconds", "LEASE_TTL")),
    *((key, "x") for key in ("", " lease_ttl", "lease-ttl", "heartbeat", "endpoint", "run_id", "nonsense")),
]


@pytest.mark.parametrize(("key", "value"), REFUSED)
def test_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({key: value})
    error = caught.value
    assert error.key == key
    if value is None or isinstance(value, (str, bool, int, float)):
        assert str(error).startswith(f"{key}={value!r} ")
    assert len(error.allowed) > 10


def test_a_value_is_checked_also_when_another_key_overrides_it() -> None:
    confs: list[dict[str, Any]] = [
        {"timeout": "x", "join_timeout": 5},
        {"read_timeout": 0, "request_timeout": 5},
        {"keep_alive_interval": -1, "lease_ttl": 5},
    ]
    for conf in confs:
        with pytest.raises(ConfigError):
            parse(conf)


def test_helpful_texts() -> None:
    def message(key: str) -> str:
        with pytest.raises(ConfigError) as caught:
            parse({key: "x"})
        return str(caught.value)

    assert "did you mean join_timeout?" in message("join_time")
    assert "did you mean heartbeat_timeout?" in message("heartbeat")
    assert "did you mean" not in message("zzz")
    for key in ("lease_ttl", "join_timeout", "ssl_cert_key", "etcd_prefix", "on_spare_close"):
        assert key in message("zzz")
    assert "c10d" in message("is_host")
    assert "c10d" in message("store_type")
    assert "static" in message("rank")
    assert "2 s" in message("lease_ttl")
    assert "FTCOORD_PASSWORD_FILE" in message("password")


REFUSED_ARGUMENTS: list[tuple[str, object]] = [
    *(("run_id", value) for value in ("", " ", "\t\n", None, 5, b"job", True, "\udc80")),
    *(("min_nodes", value) for value in (0, -1, "1", 1.0, True, None)),
    *(("max_nodes", value) for value in (0, "2", 2.5, True, None)),
    *(("backend", value) for value in ("", " ", None, 5)),
    *(("local_addr", value) for value in (" ", "a b", "a:1", "[::1]", "http://a", 5, "fe80::1%eth0", "0.0.0.0", "::")),
    *(("endpoint", value) for value in ("a,,b", "a:0", "ftp://a", "a/b", "embedded,a", "a,http://b,https://c", 5)),
]


@pytest.mark.parametrize(("key", "value"), REFUSED_ARGUMENTS)
def test_refused_arguments(key: str, value: object) -> None:
    arguments: dict[str, Any] = {key: value}
    with pytest.raises(ConfigError) as caught:
        parse(**arguments)
    assert caught.value.key == key
    assert str(caught.value).startswith(f"{key} is missing: " if value is None else f"{key}=")


def test_fewer_at_most_than_at_least() -> None:
    with pytest.raises(ConfigError, match=r"^max_nodes=3 .*at least 4"):
        parse(min_nodes=4, max_nodes=3)


def test_a_lease_needs_a_longer_run() -> None:
    assert parse({"run_ttl": 21}).times.run_ttl == 21
    with pytest.raises(ConfigError, match=r"^run_ttl=3600 .*4 x lease_ttl, 4000"):
        parse({"lease_ttl": 1000})
    with pytest.raises(ConfigError, match=r"^run_ttl=1 .*4 x lease_ttl, 20"):
        parse({"run_ttl": "1"})


def test_keep_alives_that_make_too_long_a_lease() -> None:
    with pytest.raises(ConfigError, match=r"^keep_alive_interval=2000\.0 .*2000 s x 3 attempts must be at most 3600 s"):
        parse({"keep_alive_interval": "2000"})
    with pytest.raises(ConfigError, match=r"^keep_alive_max_attempt=721 .*5 s x 721 attempts"):
        parse({"keep_alive_max_attempt": 721})


@pytest.mark.parametrize(
    ("conf", "endpoint"),
    [({"protocol": "https"}, "http://a"), ({"protocol": "http"}, "https://a"), ({"protocol": "https"}, "embedded")],
)
def test_the_protocol_contradicts_the_endpoint(conf: dict[str, str], endpoint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(conf, endpoint=endpoint)
    assert (caught.value.key, caught.value.value) == ("protocol", conf["protocol"])


@pytest.mark.parametrize("key", ["ca_cert", "cacert", "cert", "ssl_cert", "key", "ssl_cert_key", "server_name", "user"])
def test_an_embedded_etcd_takes_no_login(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}='x' .*embedded"):
        parse({key: "x"}, endpoint="embedded")


VALUES = st.text(max_size=12) | st.integers() | st.floats() | st.none()


@given(st.dictionaries(st.sampled_from([key for key, _ in REFUSED]) | st.text(max_size=12), VALUES, max_size=3))
def test_any_conf_is_accepted_or_a_config_error(conf: dict[str, Any]) -> None:
    refused: str | None = None
    try:
        settings = parse(conf)
    except ConfigError as error:
        refused = error.key
    if refused is not None:
        assert refused in (*conf, "run_ttl")  # a valid lease_ttl may be too long for the default run_ttl
        return
    assert settings.times.run_ttl > 4 * settings.times.lease_ttl
    assert settings.key_prefix.startswith("/")
