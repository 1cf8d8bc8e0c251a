"""What a job's address says is checked before any socket is opened."""

from __future__ import annotations

import re

import pytest

from ftcoord.config import EtcdConfig
from ftcoord.coordination.address import Job, connect, parse_address
from ftcoord.core.manager_address import key_of, parted, with_token
from ftcoord.errors import ConfigError


def test_all_of_it() -> None:
    job = parse_address(
        "etcds://h1:2379,h2:3000/team%2Fjob 7?min_replicas=3&join_timeout_ms=10&heartbeat_timeout_ms=1500&allow_kill=1"
    )
    assert job == Job("etcds", "h1:2379,h2:3000", "team/job 7", 3, 10, 1500, 1)
    assert (job.options.min_replicas, job.options.join_timeout) == (3, 0.01)
    assert (job.heartbeat_timeout, job.silent_after) == (3.0, 1.5), "leases cannot do less"
    assert job.prefix == "/ftcoord/v2/team%2Fjob%207/quorum"
    config = job.config({})
    assert config.tls is not None
    assert [(endpoint.host, endpoint.port) for endpoint in config.endpoints] == [("h1", 2379), ("h2", 3000)]


def test_defaults_are_those_of_torchfts_command() -> None:
    job = parse_address("etcd://h1/job")
    assert (job.min_replicas, job.join_timeout_ms, job.heartbeat_timeout_ms, job.allow_kill) == (1, 60_000, 5_000, 0)


@pytest.mark.parametrize(
    "job",
    [
        Job("etcd", "h1:1,h2:2", "job"),
        Job("etcds", "[::1]:1", "a/b?c#d", 2, 0, 10, 1),
        Job("etcd", "", "job", 7),
        Job("etcd", "h1:1", "job", native=1, bind="::1"),
        Job("etcd+srv", "etcd.example", "job"),
        Job("etcds+srv", "etcd.example", "job", 2),
    ],
)
def test_an_address_is_parsed_as_it_was_written(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCOORD_ENDPOINTS", "h7:1")
    assert parse_address(str(job)) == job


@pytest.mark.parametrize(
    "address",
    [
        *("etcd://h1/job/?min_replicas=2", "etcd://h1//job?min_replicas=2", "etcd://h1//job//?min_replicas=2"),
        *(" etcd://h1/job?min_replicas=2 ", "etcd://h1/job?min_replicas=2\n", "\tETCD://h1/job ?min_replicas=2\r\n"),
    ],
)
def test_slashes_and_white_space_around_make_no_other_job(address: str) -> None:
    assert parse_address(address) == parse_address("etcd://h1/job?min_replicas=2")
    assert parse_address("etcd://h1/job%2F").name == "job/"


def test_a_domain_stands_in_for_the_members() -> None:
    job = parse_address("etcds+srv://etcd.example/job")
    config = job.config({"FTCOORD_ENDPOINTS": "h7:1"})
    assert config.describe() == "https+srv://etcd.example"
    assert job.at(config) == job
    assert parse_address("etcd:///job").at(EtcdConfig.load("srv://etcd.example", env={})).scheme == "etcd+srv"


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("etcd://h1/job&min_replicas=2", "a '?' is missing"),
        ("etcd://h1/job&min_replica=2", "a '?' is missing"),
        ("etcd://h1/job/min_replicas=2&join_timeout_ms=5", "a '?' is missing"),
        ("etcd://h1/jobmin_replicas=2", "a '?' is missing"),
        ("etcd:h1:2379/job", "the host stands after '//'"),
        ("etcd:/h1:2379/job", "the host stands after '//'"),
        ("etcd:///h1/job", "the host stands after '//'"),
        ("etcd:job", "the host stands after '//'"),
        ("h1:2379/job", "it begins with none of etcd://"),
        ("//h1:2379/job", "it begins with none of etcd://"),
        ("etcd://[::1/job", "write an IPv6 address as"),
        ("etcd://h1/%ff", "not UTF-8"),
    ],
)
def test_what_was_forgotten_is_told(address: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^address=.*{re.escape(problem)}"):
        parse_address(address)


def test_endpoints_from_the_environment_are_named_in_the_address_that_is_given_on() -> None:
    job = parse_address("etcd:///job")
    config = job.config({"FTCOORD_ENDPOINTS": "h7:1,h8:2"})
    assert job.at(config).endpoints == "h7:1,h8:2"


def test_the_address_of_a_lighthouse_is_refused_with_both_ways_out() -> None:
    with pytest.raises(ConfigError, match=r"^address='http://h1:29510' ") as caught:
        connect("http://h1:29510", 60.0)
    assert "run the script without ftcoord.torchft" in str(caught.value)
    assert "write it as etcd://host:port,host:port/job?min_replicas=2" in str(caught.value)


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("", "address"),
        ("nonsense", "address"),
        ("http://h1:29510", "address"),
        ("etcd://h1:2379", "address"),
        ("etcd://h1:2379/", "address"),
        ("etcd://h1//", "address"),
        ("etcd://h1/job#2?min_replicas=2", "address"),
        ("etcd://h1/job?min_replicas", "address"),
        ("etcd://h1/job?min_replicas=0", "min_replicas"),
        ("etcd://h1/job?min_replicas=two", "min_replicas"),
        ("etcd://h1/job?min_replicas=2&min_replicas=3", "min_replicas"),
        ("etcd://h1/job?join_timeout_ms=-1", "join_timeout_ms"),
        ("etcd://h1/job?heartbeat_timeout_ms=9", "heartbeat_timeout_ms"),
        ("etcd://h1/job?min_replica=2", "min_replica"),
        ("etcd://h1/job?native=yes", "native"),
        ("etcd://h1/job?bind=10.0.0.7:29512", "bind"),
        ("etcd://h1/job?bind=", "bind"),
        ("etcd+srv:///job", "endpoints"),
        ("etcd+srv://etcd.example:2379/job", "endpoints"),
        ("etcd://h1:port/job", "endpoints"),
        ("etcd://u:SECRET@h1/job", "endpoints"),
        ("etcd://h1:SECRET/job", "endpoints"),
        ("etcd://h1,user:SECRET,h2/job", "endpoints"),
        ("etcd://[::1]:SECRET/job", "endpoints"),
        ("etcd://h1/job&password=SECRET", "address"),
        ("etcd:/h1:SECRET/job", "address"),
        ("h1:SECRET/job", "address"),
        ("etcd://u:SECRET\u2100@h1/job", "address"),
        ("etcd://h1/job?password=SECRET", "password"),
        ("etcd://h1/job?password=SECRET&password=other", "password"),
    ],
)
def test_refused_at_once_and_without_secrets(address: str, key: str) -> None:
    with pytest.raises(ConfigError, match=r"^(?!.*SECRET)(?!.*within timeout)") as caught:
        connect(address, 60.0)
    assert caught.value.key == key
    assert "SECRET" not in repr(caught.value.value)


def test_a_misspelt_option_is_named_with_what_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"min_replica='\*\*\*' is not valid: did you mean min_replicas\?"):
        connect("etcd://h1/job?min_replica=2", 60.0)


def test_what_follows_a_host_is_shown_if_it_can_only_be_a_port() -> None:
    with pytest.raises(ConfigError, match=r"^endpoints='h1:70000' "):
        parse_address("etcd://h1:70000/job")


TOKEN = "0123456789abcdef" * 2


@pytest.mark.parametrize("port", [None, 1, 65535])
def test_a_managers_address_has_its_token_and_its_own_port(port: int | None) -> None:
    plain, fragment = parted(with_token("http://h:7", TOKEN, port))
    assert (plain, key_of(fragment)) == ("http://h:7", (bytes.fromhex(TOKEN), port))


@pytest.mark.parametrize(
    "fragment",
    [
        "",
        "#",
        f"#{TOKEN[1:]}",
        f"#{TOKEN.upper()}",
        *(f"#{TOKEN}:{port}" for port in ("", "0", "65536", "-1", "x", "1:1")),
    ],
)
def test_what_is_no_token_stays_in_the_address(fragment: str) -> None:
    assert parted(f"http://h:7{fragment}") == (f"http://h:7{fragment}", "")
