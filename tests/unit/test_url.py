"""What an init_method says is checked before any socket is opened."""

from __future__ import annotations

import pytest

from ftcoord.errors import ConfigError
from ftcoord.rendezvous.init_method import NO_LIMIT, parse_url
from ftcoord.rendezvous.settings import RendezvousSettings


def parse(url: str) -> tuple[RendezvousSettings, int | None]:
    return parse_url(url, 60.0, env={})


def test_all_of_it() -> None:
    settings, rank = parse(
        "etcd://h1:2379,h2:3000/team%2Frun 7?rank=1&world_size=4&lease_ttl=5&key_prefix=%2Fx&local_addr=10.0.0.7"
    )
    assert rank == 1
    assert (settings.run_id, settings.min_nodes, settings.max_nodes) == ("team/run 7", 4, 4)
    assert (settings.times.lease_ttl, settings.key_prefix, settings.local_addr) == (5, "/x", "10.0.0.7")
    assert settings.times.join_timeout == 60.0
    assert settings.etcd is not None
    assert [(endpoint.host, endpoint.port) for endpoint in settings.etcd.endpoints] == [("h1", 2379), ("h2", 3000)]
    assert settings.etcd.tls is None


def test_the_other_scheme_is_tls() -> None:
    etcd = parse("etcds://h1/run?world_size=2")[0].etcd
    assert etcd is not None
    assert etcd.tls is not None


def test_without_a_rank_and_without_a_world() -> None:
    assert parse("etcd://h1/run?world_size=3")[1] is None
    settings, rank = parse("etcd://h1/run?join_timeout=5")
    assert rank is None
    assert (settings.min_nodes, settings.max_nodes, settings.times.join_timeout) == (1, NO_LIMIT, 5.0)


@pytest.mark.parametrize("url", ["etcd://h1/run/?world_size=3", " etcd://h1//run?world_size=3\n"])
def test_slashes_and_white_space_around_make_no_other_run(url: str) -> None:
    assert parse(url) == parse("etcd://h1/run?world_size=3")


def test_a_domain_stands_in_for_the_members() -> None:
    for scheme, expected in (("etcd+srv", "http+srv://etcd.example"), ("etcds+srv", "https+srv://etcd.example")):
        etcd = parse(f"{scheme}://etcd.example/run?world_size=3")[0].etcd
        assert etcd is not None
        assert etcd.describe() == expected


def test_torch_leaves_out_the_slashes_of_a_url_without_a_host() -> None:
    env = {"FTCOORD_ENDPOINTS": "h7:1"}
    assert parse_url("etcd:/run?rank=0&world_size=2", 60.0, env=env)[0].run_id == "run"


def test_endpoints_from_the_environment() -> None:
    etcd = parse_url("etcd:///run?world_size=2", 60.0, env={"FTCOORD_ENDPOINTS": "h7:1"})[0].etcd
    assert etcd is not None
    assert etcd.endpoints[0].host == "h7"


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("tcp://h1/run?world_size=2", "init_method"),
        ("etcd://h1/run&rank=0&world_size=2", "init_method"),
        ("etcd:/h1/run?world_size=2", "init_method"),
        ("etcd://h1/run/lease_ttl=5", "init_method"),
        ("etcd://h1/?world_size=2", "run_id"),
        ("etcd://h1/run?rank=0", "rank"),
        ("etcd://h1/run?rank=2&world_size=2", "rank"),
        ("etcd://h1/run?rank=-1&world_size=2", "rank"),
        ("etcd://h1/run?world_size=0", "world_size"),
        ("etcd://h1/run?world_size=two", "world_size"),
        ("etcd://h1/run?world_size=2&world_size=3", "world_size"),
        ("etcd://h1/run?world_size", "init_method"),
        ("etcd://h1/run?world_size=2&wordl=3", "wordl"),
        ("etcd://h1:port/run?world_size=2", "endpoint"),
        ("etcd://u:secret@h1/run?world_size=2", "endpoint"),
    ],
)
def test_refused(url: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(url)
    assert caught.value.key == key
    assert "secret" not in str(caught.value)
