"""The address at which a node's host is reached, and what is said of one that others cannot reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import builders
import pytest
from virtual import Scheduler

from ftcoord.config import EtcdConfig
from ftcoord.core.rendezvous_records import Chunk, KnownRound, Round, Seat
from ftcoord.errors import ConfigError
from ftcoord.etcd import addresses
from ftcoord.rendezvous import bootstrap
from ftcoord.rendezvous.bootstrap import address_trouble, check_local_addr, own_address


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`network(names, ways, *interfaces)`: what names mean on this host, `hosta`, and its addresses on the way to
    others."""

    def set_up(names: Mapping[str, Sequence[str]], ways: Mapping[str, str], *interfaces: str) -> None:
        monkeypatch.setattr(bootstrap.socket, "getfqdn", lambda: "hosta")
        monkeypatch.setattr(bootstrap, "_addresses_of", lambda name: [*names.get(name, ())])
        for module in (bootstrap, addresses):
            monkeypatch.setattr(module, "address_towards", lambda host, _port: ways.get(host))
        monkeypatch.setattr(bootstrap, "_interfaces", lambda: iter(interfaces))

    return set_up


DEBIAN = {"hosta": ["127.0.1.1"]}
DNS = {"hosta": ["127.0.0.1", "10.0.0.7"]}


@pytest.mark.parametrize(
    ("endpoints", "names", "ways", "interfaces", "address"),
    [
        pytest.param("etcd1", {}, {"etcd1": "10.0.0.7"}, (), "10.0.0.7", id="towards etcd"),
        pytest.param("etcd1,etcd2", {}, {"etcd2": "10.0.0.7"}, (), "10.0.0.7", id="towards the next etcd"),
        pytest.param(
            "hosta", DEBIAN, {"hosta": "127.0.0.1"}, ("10.0.0.7",), "10.0.0.7", id="etcd is here, by its name"
        ),
        pytest.param("0.0.0.0", DEBIAN, {"0.0.0.0": "127.0.0.1"}, ("10.0.0.7",), "10.0.0.7", id="a wildcard"),
        pytest.param("[fe80::1]", DEBIAN, {"fe80::1": "fe80::2"}, ("10.0.0.7",), "10.0.0.7", id="an address of a link"),
        pytest.param("localhost", DNS, {}, ("10.9.9.9",), "hosta", id="a name that resolves"),
        pytest.param("localhost", DEBIAN, {}, (None, "127.0.0.1", "10.0.0.7"), "10.0.0.7", id="a name on loopback"),
        pytest.param("localhost", {}, {}, (None, "10.0.0.7"), "10.0.0.7", id="a name that does not resolve"),
        pytest.param("localhost", DEBIAN, {}, (None, "127.0.0.1"), "hosta", id="a name on loopback, and no network"),
        pytest.param("localhost", {}, {}, (), "127.0.0.1", id="nothing"),
    ],
)
def test_a_host_is_reached_at_an_address_that_is_not_its_own_alone(
    network: Any, endpoints: str, names: Any, ways: Any, interfaces: Sequence[str], address: str
) -> None:
    network(names, ways, *interfaces)
    etcd = EtcdConfig.load(endpoints, env={})
    assert own_address(None, etcd) == address
    assert own_address("given", etcd) == "given"


def test_a_name_that_does_not_resolve_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's workers could meet at it. A new pod's name may take a while to come into DNS."""
    known: dict[str, list[str]] = {"pod-1": ["10.0.0.7"]}
    asked: list[str] = []

    def addresses_of(name: str) -> list[str]:
        asked.append(name)
        return known.get(name, []) if len(asked) > 3 else []

    monkeypatch.setattr(bootstrap, "_addresses_of", addresses_of)

    def play() -> None:
        for fine in (None, "10.0.0.7", "::1", "pod-1"):
            check_local_addr(fine)
        with pytest.raises(ConfigError, match=r"^local_addr='pod_2' .*does not resolve on this host"):
            check_local_addr("pod_2")

    Scheduler(1).run(play)
    assert asked[:5] == ["pod-1"] * 4 + ["pod_2"]


def test_a_node_that_is_always_alone_needs_no_interface(network: Any) -> None:
    network(DEBIAN, {}, "10.0.0.7")
    assert own_address(None, EtcdConfig.load("localhost", env={}), alone=True) == "hosta"


def test_the_interfaces_of_this_host_have_its_loopback_among_them() -> None:
    assert "127.0.0.1" in [*bootstrap._interfaces()]


def a_round(address: str, *hosts: str) -> Round:
    seats = tuple(Seat(f"m{at}", f"n{at}", f"{host} (pid {at})") for at, host in enumerate(hosts))
    return builders.round_(1, seats, address=address)


@pytest.mark.parametrize(
    ("address", "hosts", "me", "trouble"),
    [
        ("127.0.0.1", "hosta hostb", "hosta", "is an address of one host only"),
        ("127.0.0.1", "hosta hostb", "hostb", "is an address of one host only"),
        ("localhost", "hosta hostb", "hosta", "is an address of one host only"),
        ("::1", "hosta hostb", "hostb", "is an address of one host only"),
        ("0.0.0.0", "hosta hostb", "hostb", "is an address of one host only"),
        ("127.0.0.1", "hosta hosta", "hosta", ""),
        ("10.0.0.7", "hosta hostb", "hostb", ""),
        ("hosta", "hosta hostb", "hosta", ""),
        ("hosta", "hosta hostb", "hostb", "means this host here (127.0.1.1)"),
        ("hostx", "hosta hostb", "hostb", "does not resolve on this host"),
        ("hostb", "hosta hostb", "hostb", ""),
    ],
)
def test_an_address_that_other_hosts_cannot_reach_is_told_with_the_node_to_start_anew(
    network: Any, address: str, hosts: str, me: str, trouble: str
) -> None:
    network({**DEBIAN, "hostb": ["10.0.0.8"]}, {})
    round_ = a_round(address, *hosts.split())
    told = address_trouble(round_, f"{me} (pid 7)", "10.0.0.9")
    assert bool(told) == bool(trouble)
    assert trouble in told
    assert not told or "start hosta (pid 0) with --local-addr=" in told


@pytest.mark.parametrize(("other", "is_told"), [("hostb", True), ("hosta", False)])
def test_of_a_large_round_some_hosts_are_known(network: Any, other: str, is_told: bool) -> None:
    network(DEBIAN, {})
    round_ = a_round("127.0.0.1", "hosta", "hosta")
    known = KnownRound.of(round_, Chunk((1,), (Seat("m1", "n1", f"{other} (pid 1)"),)), 0)
    told = address_trouble(known, "hosta (pid 0)", "127.0.0.1")
    assert ("start rank 0's node with --local-addr=" in told) == is_told
