"""Members that DNS names, as etcdctl finds them: the records of a domain stand in for the list of endpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import name_server
import pytest
from helpers import DEADLINE, own_port
from name_server import NameServer
from test_security import Authority, Issued, SecureServer, authority, node, secure

from ftcoord import cli
from ftcoord.config import EtcdConfig
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import ConfigError, EtcdUnavailable, WrongEndpoint
from ftcoord.etcd.addresses import own_addresses
from ftcoord.etcd.client import EtcdClient
from ftcoord.rendezvous.handler import connect

__all__ = ["authority", "node", "secure"]  # fixtures

PLAIN, SECURE = "_etcd-client._tcp", "_etcd-client-ssl._tcp"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    """This process's name server, without a record yet."""
    with NameServer({}) as server:
        name_server.use(server, monkeypatch)
        yield server


def client_of(endpoint: str | None, env: dict[str, str] | None = None, **settings: Any) -> EtcdClient:
    return EtcdClient(EtcdConfig.load(endpoint, env=env or {}, **settings))


def place_of(server: EtcdServer) -> tuple[str, int]:
    return "localhost", server.get_port()


@pytest.mark.parametrize(
    ("endpoint", "env"),
    [
        ("srv://etcd.example", {}),
        ("SRV://Etcd.Example", {}),
        (None, {"FTCOORD_ENDPOINTS": "srv://etcd.example"}),
        (None, {"ETCDCTL_DISCOVERY_SRV": "etcd.example", "ETCDCTL_ENDPOINTS": "127.0.0.1:1"}),
    ],
)
def test_the_members_of_a_domain_are_found(
    names: NameServer, etcd: EtcdServer, endpoint: str | None, env: dict[str, str]
) -> None:
    names.records[f"{PLAIN}.etcd.example"] = [place_of(etcd)]
    with client_of(endpoint, env) as client:
        assert client.status().version
        assert client.config.describe() == "http+srv://etcd.example"


def test_a_member_that_is_away_costs_nothing(names: NameServer, etcd: EtcdServer) -> None:
    nobody = own_port()
    names.records[f"{PLAIN}.etcd.example"] = [("nowhere.invalid", 2379), ("localhost", nobody), place_of(etcd)]
    with client_of("srv://etcd.example") as client:
        assert client.status(timeout=DEADLINE).version


def test_records_that_change_are_followed(names: NameServer, etcd: EtcdServer) -> None:
    nobody = own_port()
    names.records[f"{PLAIN}.etcd.example"] = [("localhost", nobody)]
    with client_of("srv://etcd.example") as client:
        with pytest.raises(EtcdUnavailable, match=rf"^no etcd at srv://etcd.example \(.*:{nobody}\): "):
            client.status(timeout=0.5)
        names.records[f"{PLAIN}.etcd.example"] = [place_of(etcd)]
        assert client.status(timeout=DEADLINE).version


def test_a_record_that_is_missing_is_named_with_what_to_do(names: NameServer) -> None:
    with client_of("srv://etcd.example") as client, pytest.raises(EtcdUnavailable) as caught:
        client.status(timeout=0.5)
    assert str(caught.value) == (
        "no etcd at srv://etcd.example: DNS has no SRV record _etcd-client._tcp.etcd.example; for those of"
        " _etcd-client-ssl write https+srv://etcd.example, or give TLS settings"
    )


def test_an_agent_waits_for_records_that_are_not_there_yet(names: NameServer, etcd: EtcdServer) -> None:
    class Late(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:  # at the third question
            return [place_of(etcd)] if len(names.asked) > 2 else default

    names.records = Late()
    connect(EtcdConfig.load("srv://etcd.example", env={}), DEADLINE).close()


def test_the_certificate_names_the_domain(
    names: NameServer, secure: SecureServer, authority: Authority, node: Issued
) -> None:
    tls = {"ca_cert": authority.cert, "cert": node.cert, "key": node.key}
    names.records[f"{SECURE}.etcd.example"] = [("localhost", secure.secure_port)]
    for endpoint in ("srv://etcd.example", "https+srv://etcd.example"):
        with client_of(endpoint, **tls) as client:
            assert client.status().version


def test_whoever_forges_a_record_chooses_neither_the_name_nor_whether_tls_is_used(
    names: NameServer, etcd: EtcdServer, secure: SecureServer, authority: Authority, node: Issued
) -> None:
    """The certificate is good for the host in the record, and not for the domain."""
    tls = {"ca_cert": authority.cert, "cert": node.cert, "key": node.key}
    names.records[f"{SECURE}.other.example"] = [("localhost", secure.secure_port)]
    with client_of("srv://other.example", **tls) as client, pytest.raises(WrongEndpoint, match="for another host"):
        client.status(timeout=5)
    names.records = {f"{PLAIN}.etcd.example": [place_of(etcd)]}
    with client_of("srv://etcd.example", **tls) as client, pytest.raises(EtcdUnavailable, match="leave out the TLS"):
        client.status(timeout=0.5)


def test_commands_and_the_doctor(names: NameServer, etcd: EtcdServer, capsys: pytest.CaptureFixture[str]) -> None:
    names.records[f"{PLAIN}.etcd.example"] = [place_of(etcd)] * 2 + [("127.0.0.1", etcd.get_port())]
    assert cli.main(["ls", "--endpoints=srv://etcd.example", "-o", "json"]) == 0
    json.loads(capsys.readouterr().out)
    cli.main(["doctor", "--endpoints=srv://etcd.example", "-o", "json"])
    text = capsys.readouterr().out
    assert f"localhost:{etcd.get_port()}" in text
    assert cli.main(["doctor", "--endpoints=srv://other.example"]) == 3
    assert "DNS has no SRV record _etcd-client._tcp.other.example" in capsys.readouterr().err


def test_the_address_of_this_host_is_that_towards_a_member(names: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    names.records[f"{PLAIN}.etcd.example"] = [("localhost", 1), ("nowhere.invalid", 2)]
    towards: list[tuple[str, int]] = []
    monkeypatch.setattr("ftcoord.etcd.addresses.address_towards", lambda *place: towards.append(place) or "10.0.0.7")
    assert list(own_addresses(EtcdConfig.load("srv://etcd.example", env={}))) == ["10.0.0.7"]
    assert towards == [("nowhere.invalid", 2)]
    assert list(own_addresses(EtcdConfig.load("srv://other.example", env={}))) == []


@pytest.mark.parametrize(
    ("endpoint", "problem"),
    [
        ("srv://etcd.example:2379", "without a port"),
        ("srv://10.0.0.1", "takes a domain"),
        ("srv://[::1]", "takes a domain"),
        ("srv://", "neither a DNS name nor an IP address"),
        ("srv://a,srv://b", "give it alone"),
        ("srv://a,h1:2379", "give it alone"),
        ("dns+srv://a", "none of http, https and srv"),
    ],
)
def test_refused(endpoint: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        EtcdConfig.load(endpoint, env={})


def test_a_service_of_another_name_is_refused() -> None:
    env = {"ETCDCTL_DISCOVERY_SRV": "etcd.example", "ETCDCTL_DISCOVERY_SRV_NAME": "blue"}
    with pytest.raises(ConfigError, match=r"^ETCDCTL_DISCOVERY_SRV_NAME='blue' .*FTCOORD_ENDPOINTS"):
        EtcdConfig.load(env=env)
    assert EtcdConfig.load(env={"FTCOORD_ENDPOINTS": "h1", **env}).describe() == "http://h1:2379"


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftcoord.config.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'ftcoord\[srv\]'"):
        EtcdConfig.load("srv://etcd.example", env={})
