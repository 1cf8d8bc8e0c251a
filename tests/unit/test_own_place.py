"""Where a manager listens, and the host that its address names."""

from __future__ import annotations

import logging
import socket
from typing import Any

import pytest

from ftcoord.coordination import address
from ftcoord.coordination.address import parse_address

JOB = "etcd://etcd.example:2379/job"
OWN = {"10.0.0.7", "10.0.0.8", "127.0.0.1", "127.0.1.1", "::1", "fd00::7"}


class Datagrams:
    """A host with the addresses of OWN, in place of `socket.socket`; it reaches etcd from 10.0.0.8."""

    def __init__(self, *_: object) -> None:
        pass

    def bind(self, place: tuple[str, int]) -> None:
        if place[0] not in OWN:
            raise OSError(99, "Cannot assign requested address")

    def connect(self, place: object) -> None:
        pass

    def getsockname(self) -> tuple[str, int]:
        return "10.0.0.8", 4711

    def close(self) -> None:
        pass


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What names resolve to; addresses resolve to themselves, and other names do not."""
    known: dict[str, list[str]] = {"etcd.example": ["10.0.0.1"], "localhost": ["127.0.0.1"]}

    def getaddrinfo(host: str, port: Any, **_: Any) -> list[Any]:
        found = known.get(host) or ([host] if ":" in host or host.replace(".", "").isdigit() else [])
        if not found:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in found]

    monkeypatch.setattr(address.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(address.socket, "socket", Datagrams)
    return known


@pytest.mark.parametrize(
    ("known", "hostname", "expected"),
    [
        (["10.0.0.7"], "node", ("10.0.0.7:7", "node")),
        (["127.0.1.1", "10.0.0.7"], "node", ("10.0.0.7:7", "node")),
        (["10.9.9.9", "fd00::7"], "node", ("[fd00::7]:7", "node")),  # the first one is another host's
        ([], "127.0.0.1", ("127.0.0.1:7", "127.0.0.1")),
        ([], "[::1]", ("[::1]:7", "[::1]")),
        ([], "localhost", ("127.0.0.1:7", "localhost")),
        (["127.0.1.1"], "node", ("10.0.0.8:7", "10.0.0.8")),  # so only here: others do not know the name as loopback
    ],
)
def test_one_address_is_listened_at_and_it_is_the_published_one(
    names: dict[str, list[str]], known: list[str], hostname: str, expected: tuple[str, str]
) -> None:
    names["node"] = known
    assert address.own_place("[::]:7", hostname, parse_address(JOB)) == expected


def test_a_host_that_knows_loopback_only_keeps_its_name(names: dict[str, list[str]]) -> None:
    names["node"] = ["127.0.1.1"]
    job = parse_address("etcd://127.0.0.1:2379/job")
    assert address.own_place("[::]:7", "node", job) == ("127.0.1.1:7", "node")


@pytest.mark.parametrize("known", [[], ["203.0.113.5"]], ids=["unknown", "of a gateway to this host"])
def test_a_name_without_an_address_of_this_host_is_reached_at_any_with_a_warning(
    names: dict[str, list[str]], known: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    names["node"] = known
    with caplog.at_level(logging.WARNING):
        assert address.own_place("[::]:7", "node", parse_address(JOB)) == ("[::]:7", "node")
    assert "bind=ADDRESS in the job's address" in caplog.text


@pytest.mark.parametrize("bind", ["127.0.0.1:7", "0.0.0.0:7", "host:7"])
def test_what_a_script_binds_to_is_respected(names: dict[str, list[str]], bind: str) -> None:
    assert address.own_place(bind, "node", parse_address(JOB)) == (bind, "node")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("10.0.0.7", ("10.0.0.7:7", "10.0.0.7")),
        ("127.0.0.1", ("127.0.0.1:7", "127.0.0.1")),
        ("[::1]", ("[::1]:7", "::1")),
        ("0.0.0.0", ("0.0.0.0:7", "node")),
        ("::", ("[::]:7", "node")),
    ],
)
def test_the_jobs_address_comes_first(names: dict[str, list[str]], given: str, expected: tuple[str, str]) -> None:
    assert address.own_place("[::]:7", "node", parse_address(f"{JOB}?bind={given}")) == expected
