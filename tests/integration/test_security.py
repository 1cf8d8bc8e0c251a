"""TLS, client certificates, users and passwords, and the environment they come from."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from etcd_cluster import FragileEtcd
from helpers import DEADLINE, Seen, eventually, own_port

from ftcoord import cli, errors
from ftcoord.config import EtcdConfig
from ftcoord.core.lease import SessionState
from ftcoord.embedded.server import LOOPBACK, EtcdServer
from ftcoord.etcd.api import Get, Span
from ftcoord.etcd.client import EtcdClient
from ftcoord.metrics import exporter, process
from ftcoord.metrics.exporter import CONNECTION_TIMEOUT, MOST_SCRAPERS, MetricsAddress, MetricsServer, serving_tls
from ftcoord.primitives.session import Session

TOKEN_TTL = 2
JSON_GATEWAY = "--enable-grpc-gateway"
"""Lets users be added by it: an etcd that ftcoord starts has it switched off."""


# -- certificates ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Issued:
    """The paths of a certificate and its key."""

    cert: str
    key: str


class Authority:
    """A certificate authority, by the openssl program."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory / name
        self._directory.mkdir()
        self._own = self._request("ca")
        extensions = "basicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign,cRLSign\n"
        self._sign("ca", extensions, "-signkey", self._own.key, "-days", "2")
        self.cert = self._own.cert

    def issue(self, name: str, *alternatives: str, days: int = 2) -> Issued:
        """A certificate for a server (with its alternative names) or a client, good for so many days."""
        issued = self._request(name)
        extensions = "basicConstraints=CA:FALSE\nkeyUsage=critical,digitalSignature\n"
        extensions += "extendedKeyUsage=serverAuth,clientAuth\n"
        if alternatives:
            extensions += f"subjectAltName={','.join(alternatives)}\n"
        self._sign(name, extensions, "-CA", self.cert, "-CAkey", self._own.key, "-CAcreateserial", "-days", f"{days}")
        return issued

    def _request(self, name: str) -> Issued:
        (self._directory / "request.cnf").write_text(f"[req]\nprompt=no\ndistinguished_name=dn\n[dn]\nCN={name}\n")
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        self._openssl("req", "-new", "-config", "request.cnf", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr")
        return Issued(str(self._directory / f"{name}.pem"), str(self._directory / f"{name}.key"))

    def _sign(self, name: str, extensions: str, *options: str) -> None:
        (self._directory / "extensions.cnf").write_text(extensions)
        request = ("-req", "-in", f"{name}.csr", "-out", f"{name}.pem", "-extfile", "extensions.cnf")
        self._openssl("x509", *request, *options)

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._directory, check=True, capture_output=True)


class SecureServer(FragileEtcd):
    """An etcd with a second client address, for TLS with client certificates; the first one is for its health."""

    def __init__(self, authority: Authority, *extra_args: str, days: int = 2) -> None:
        own = authority.issue(f"server-{days}", "DNS:localhost", "DNS:etcd.example", days=days)
        tls = (f"--cert-file={own.cert}", f"--key-file={own.key}", f"--trusted-ca-file={authority.cert}")
        super().__init__(extra_args=[*tls, "--client-cert-auth", JSON_GATEWAY, *extra_args])
        self.issued = own
        self.secure_port = own_port()

    def _arguments(self) -> list[str]:
        both = f"http://{self.get_endpoint()},https://{LOOPBACK}:{self.secure_port}"
        return [*super()._arguments(), f"--listen-client-urls={both}"]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "authority")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority that nobody trusts."""
    return Authority(tmp_path_factory.mktemp("tls"), "stranger")


@pytest.fixture(scope="module")
def node(authority: Authority) -> Issued:
    """A client certificate."""
    return authority.issue("node")


@pytest.fixture(scope="module")
def secure(authority: Authority) -> Iterator[SecureServer]:
    with SecureServer(authority) as server:
        yield server


def url(server: SecureServer, scheme: str = "https", host: str = "localhost") -> str:
    return f"{scheme}://{host}:{server.secure_port}"


def connect(endpoint: str, **settings: Any) -> EtcdClient:
    return EtcdClient(EtcdConfig.load(endpoint, env={}, **settings))


def test_mutual_tls(secure: SecureServer, authority: Authority, node: Issued, prefix: str) -> None:
    seen = Seen()
    with connect(url(secure), ca_cert=authority.cert, cert=node.cert, key=node.key) as client:
        client.watch(Span(prefix), client.get(prefix).revision + 1, seen)
        with Session(client, 60) as session:
            client.put(prefix, b"1", session.lease_id)
            assert seen.events(1)[0].kv.value == b"1"


def test_https_without_a_ca_trusts_what_the_system_trusts(
    secure: SecureServer, authority: Authority, node: Issued, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", authority.cert)
    with connect(url(secure), cert=node.cert, key=node.key) as client:
        assert client.put(prefix, b"").succeeded


def test_a_certificate_has_the_name_of_a_host_without_its_last_dot(
    secure: SecureServer, authority: Authority, node: Issued, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the dot no search list is tried, as in Kubernetes for each name otherwise."""
    real, tls = socket.getaddrinfo, {"ca_cert": authority.cert, "cert": node.cert, "key": node.key}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *how, **more: real(host.rstrip("."), *how, **more))
    config = EtcdConfig.load(url(secure, host="localhost."), env={}, **tls)
    with EtcdClient(config) as client:
        assert client.put(prefix, b"").succeeded


WANTED = "it wants a client certificate that it trusts: set FTCOORD_CERT and FTCOORD_KEY"


@pytest.mark.parametrize(
    ("scheme", "host", "settings", "advice"),
    [
        ("https", "localhost", {"ca_cert": "stranger", "cert": "node", "key": "node"}, "set FTCOORD_CA_CERT"),
        ("https", "localhost", {"ca_cert": "authority"}, WANTED),
        ("https", "localhost", {"ca_cert": "authority", "cert": "strange node", "key": "strange node"}, WANTED),
        ("https", "localhost", {"ca_cert": "authority", "cert": "expired", "key": "expired"}, WANTED),
        ("https", LOOPBACK, {"ca_cert": "authority", "cert": "node", "key": "node"}, "set FTCOORD_SERVER_NAME"),
        (
            "https",
            "localhost",
            {"ca_cert": "authority", "cert": "node", "key": "node", "server_name": "other.example"},
            "set FTCOORD_SERVER_NAME",
        ),
        ("http", "localhost", {}, "write https://"),
    ],
    ids=[
        "wrong CA",
        "no client certificate",
        "unknown client",
        "expired client certificate",
        "wrong host",
        "wrong server name",
        "http to https",
    ],
)
def test_a_connection_that_cannot_be_secured_is_a_clear_error(
    secure: SecureServer,
    authority: Authority,
    stranger: Authority,
    node: Issued,
    scheme: str,
    host: str,
    settings: dict[str, str],
    advice: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    strange = stranger.issue("node")
    files = {"authority": authority.cert, "stranger": stranger.cert}
    certificates = {"node": node, "strange node": strange, "expired": authority.issue("old", days=-1)}
    actual = {
        name: getattr(certificates[value], name) if value in certificates else files.get(value, value)
        for name, value in settings.items()
    }
    refused_in_time(connect(url(secure, scheme, host), **actual), advice)
    assert capfd.readouterr() == ("", "")


def test_https_to_a_server_without_tls_is_a_clear_error(
    etcd: EtcdServer, authority: Authority, node: Issued, capfd: pytest.CaptureFixture[str]
) -> None:
    endpoint = f"https://localhost:{etcd.get_port()}"
    refused_in_time(connect(endpoint, ca_cert=authority.cert, cert=node.cert, key=node.key), "write http://")
    assert capfd.readouterr() == ("", "")


def refused_in_time(client: EtcdClient, advice: str) -> None:
    """Neither reads nor writes work, nor do they hang, and the error tells what to do. Nothing was sent."""
    with client:
        client.watch(Span("/key"), 1, Seen())
        for use in (lambda: client.get("/key", timeout=1), lambda: client.put("/key", b"", timeout=1)):
            began = time.monotonic()
            with pytest.raises(errors.EtcdUnavailable, match=f"^no etcd at .*: .*{advice}"):
                use()
            assert time.monotonic() - began < 11  # 1 s, and 10 for a slow machine


def test_a_file_that_went_missing_is_named_before_any_connection(
    secure: SecureServer, authority: Authority, node: Issued, tmp_path: Path
) -> None:
    copy = tmp_path / "ca.pem"
    copy.write_bytes(Path(authority.cert).read_bytes())
    config = EtcdConfig.load(url(secure), ca_cert=copy, cert=node.cert, key=node.key, env={})
    copy.unlink()
    with pytest.raises(errors.ConfigError, match=r"ca\.pem"):
        EtcdClient(config)


def test_certificates_are_rotated_under_a_running_client(tmp_path: Path) -> None:
    """All of them, also the authority: whoever connects from then on needs the new ones."""
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    node, seen = old.issue("node"), Seen()
    tls = {"ca_cert": old.cert, "cert": node.cert, "key": node.key}
    with SecureServer(old) as server, connect(url(server), **tls) as client, Session(client, 60) as session:
        client.put("/key", b"1", session.lease_id)
        client.watch(Span("/key"), 1, seen)
        server.kill()
        for name, replaced in (("node", node), ("server", server.issued)):
            issued = new.issue(name, "DNS:localhost")
            shutil.copy(issued.cert, replaced.cert)
            shutil.copy(issued.key, replaced.key)
        shutil.copy(new.cert, old.cert)
        server.restart()
        client.put("/key", b"2", session.lease_id, timeout=DEADLINE)
        assert [event.kv.value for event in seen.events(2)] == [b"1", b"2"]
        assert session.state is not SessionState.LOST


# -- users ----------------------------------------------------------------------------------------------------------


def add_users(server: FragileEtcd) -> None:
    """root may do all, trainer what begins with /job/."""
    for name, password in (("root", "rootpass"), ("trainer", "swordfish")):
        ask(server, "user/add", name=name, password=password)
        ask(server, "role/add", name=name)
    ask(server, "role/grant", name="trainer", perm={"permType": 2, "key": "L2pvYi8=", "range_end": "L2pvYjA="})
    for name in ("root", "trainer"):
        ask(server, "user/grant", user=name, role=name)


def ask(server: FragileEtcd, what: str, **body: object) -> None:
    """Through etcd's HTTP gateway."""
    assert server.http("POST", f"/v3/auth/{what}", body, timeout=DEADLINE) is not None, what


@pytest.fixture
def guarded() -> Iterator[FragileEtcd]:
    """An etcd with users, whose tokens live for 2 s, and may be killed."""
    with FragileEtcd(extra_args=[f"--auth-token-ttl={TOKEN_TTL}", JSON_GATEWAY]) as server:
        add_users(server)
        ask(server, "enable")
        yield server


@pytest.fixture(scope="module")
def guarded_for_all() -> Iterator[FragileEtcd]:
    with FragileEtcd(extra_args=[JSON_GATEWAY]) as server:
        add_users(server)
        ask(server, "enable")
        yield server


def trainer(server: FragileEtcd) -> EtcdClient:
    return connect(server.get_endpoint(), user="trainer", password="swordfish")


def outlive_a_token() -> None:
    threading.Event().wait(2.5 * TOKEN_TTL)


def test_a_user_may_do_what_the_role_says(guarded_for_all: FragileEtcd) -> None:
    seen = Seen()
    with trainer(guarded_for_all) as client, Session(client, 60) as session:
        client.put("/job/key", b"", session.lease_id)
        client.watch(Span("/job/", is_prefix=True), 1, seen)
        seen.events(1)
        denied = Seen()
        client.watch(Span("/other/", is_prefix=True), 1, denied)
        assert isinstance(denied.error(), errors.EtcdAuthError)
        for use in (
            lambda: client.get("/other"),
            lambda: client.put("/other", b""),
            lambda: client.range(Get(Span("/", is_prefix=True))),
            lambda: client.delete(Span("/job", is_prefix=True)),
        ):
            with pytest.raises(errors.EtcdAuthError, match="permission denied"):
                use()
        client.put("/job/key", b"", session.lease_id)
        seen.events(2)


@pytest.mark.parametrize(
    ("login", "why"),
    [
        ({"user": "trainer", "password": "wrong"}, "authentication failed"),
        ({"user": "nobody", "password": "swordfish"}, "authentication failed"),
        ({}, "user name is empty"),
    ],
)
def test_wrong_logins(guarded_for_all: FragileEtcd, login: dict[str, str], why: str) -> None:
    with connect(guarded_for_all.get_endpoint(), **login) as client:
        seen = Seen()
        client.watch(Span("/job/key"), 1, seen)
        assert isinstance(seen.error(), errors.EtcdAuthError)
        for use in (lambda: client.get("/job/key"), lambda: client.put("/job/key", b"")):
            with pytest.raises(errors.EtcdAuthError, match=why) as caught:
                use()
            assert "swordfish" not in str(caught.value)


def test_tokens_that_run_out_are_renewed(guarded: FragileEtcd) -> None:
    """Of a client that calls, of one that only watches, and of one that keeps a session."""
    first, second = Seen(), Seen()
    with trainer(guarded) as calling, trainer(guarded) as watching, trainer(guarded) as keeping:
        calling.put("/job/key", b"1")
        watching.watch(Span("/job/key"), 1, first)
        first.events(1)
        with Session(keeping, 15) as session:
            keeping.put("/job/lease", b"", session.lease_id)
            outlive_a_token()
            assert calling.put("/job/key", b"2").succeeded
            first.events(2)
            watching.watch(Span("/job/", is_prefix=True), 1, second)  # on the stream that the old token opened
            second.events(3)
            outlive_a_token()
            calling.put("/job/key", b"3")
            assert [event.kv.value for event in first.events(3)] == [b"1", b"2", b"3"]
            second.events(4)
            assert session.state is not SessionState.LOST
            assert keeping.get("/job/lease").one is not None


def test_a_user_where_authentication_is_off_and_then_switched_on() -> None:
    seen = Seen()
    with FragileEtcd(extra_args=[JSON_GATEWAY]) as server, trainer(server) as client, Session(client, 60) as session:
        client.put("/job/key", b"1", session.lease_id)
        client.watch(Span("/job/key"), 1, seen)
        seen.events(1)
        add_users(server)
        ask(server, "enable")
        client.put("/job/key", b"2", session.lease_id)
        other = Seen()
        client.watch(Span("/job/key"), 1, other)
        for each in (seen, other):
            assert [event.kv.value for event in each.events(2)] == [b"1", b"2"]


# -- the environment ------------------------------------------------------------------------------------------------


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in list(os.environ):
        if name.startswith(("FTCOORD_", "ETCDCTL_")) and name != "FTCOORD_ETCD_BINARY":
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture(scope="module")
def fortress(authority: Authority) -> Iterator[SecureServer]:
    """TLS, client certificates and users."""
    with SecureServer(authority) as server:
        add_users(server)
        ask(server, "enable")
        yield server


def test_everything_comes_from_the_environment(
    fortress: SecureServer, authority: Authority, node: Issued, tmp_path: Path, clean_environment: pytest.MonkeyPatch
) -> None:
    """Ours, else etcdctl's: tests/unit/test_config.py has all of both."""
    secret = tmp_path / "password"
    secret.write_text("swordfish\n")
    variables = {
        "ETCDCTL_ENDPOINTS": "https://192.0.2.1:1",
        "FTCOORD_ENDPOINTS": url(fortress, host=LOOPBACK),
        "ETCDCTL_CACERT": authority.cert,
        "ETCDCTL_CERT": node.cert,
        "ETCDCTL_KEY": node.key,
        "FTCOORD_SERVER_NAME": "etcd.example",
        "ETCDCTL_USER": "root:wrong",
        "FTCOORD_USER": "trainer",
        "FTCOORD_PASSWORD_FILE": str(secret),
    }
    for variable, value in variables.items():
        clean_environment.setenv(variable, value)
    with EtcdClient() as client:
        assert client.put("/job/key", b"").succeeded
        assert "swordfish" not in repr(client)
        with pytest.raises(errors.EtcdAuthError):
            client.get("/other")


def test_commands_take_tls_and_a_login_as_all_else_does(
    fortress: SecureServer,
    authority: Authority,
    node: Issued,
    clean_environment: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--endpoints", url(fortress, host=LOOPBACK), "--ca-cert", authority.cert, "--cert", node.cert]
    flags += ["--key", node.key, "--server-name", "etcd.example", "--user", "trainer", "--output", "json"]
    clean_environment.setenv("FTCOORD_PASSWORD", "swordfish")
    assert cli.main(["ls", *flags, "--key-prefix", "/job"]) == 0
    assert cli.main(["ls", *flags, "--key-prefix", "/other"]) == 1
    assert "role" in capsys.readouterr().err
    for prefix, level in (("/job", "ok"), ("/other", "problem")):
        assert cli.main(["doctor", *flags, "--key-prefix", prefix]) == (level == "problem")
        found = {one["about"]: one["level"] for one in json.loads(capsys.readouterr().out)["findings"]}
        assert (found["right to read"], found["right to write"], found["TLS"]) == (level, level, "ok")
    clean_environment.setenv("FTCOORD_PASSWORD", "wrong")
    assert cli.main(["ls", *flags, "--key-prefix", "/job"]) == 1
    assert "FTCOORD_PASSWORD" in capsys.readouterr().err


# -- metrics --------------------------------------------------------------------------------------------------------


def test_metrics_are_told_to_clients_of_the_authority_only(authority: Authority, node: Issued) -> None:
    served = authority.issue("metrics", "IP:127.0.0.1")
    tls = serving_tls(served.cert, served.key, authority.cert)
    context = ssl.create_default_context(cafile=authority.cert)
    with MetricsServer(MetricsAddress(LOOPBACK, 0, tls), process.collect_process) as server:
        assert server.url.startswith("https://")
        with pytest.raises(OSError, match=r"(?i)certificate|reset|broken|closed|EOF"):
            urllib.request.urlopen(server.url, timeout=DEADLINE, context=context)
        context.load_cert_chain(node.cert, node.key)
        with urllib.request.urlopen(server.url, timeout=DEADLINE, context=context) as answer:
            assert b"ftcoord_info" in answer.read()


@pytest.mark.parametrize("secure", [True, False])
def test_silent_connections_delay_neither_scrapes_nor_the_end(authority: Authority, secure: bool) -> None:
    served = authority.issue("metrics", "IP:127.0.0.1")
    tls = serving_tls(served.cert, served.key, None) if secure else None
    context = ssl.create_default_context(cafile=authority.cert)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(MetricsServer(MetricsAddress(LOOPBACK, 0, tls), process.collect_process))
        port = urlsplit(server.url).port
        for _ in range(MOST_SCRAPERS + 20):
            stack.enter_context(socket.create_connection((LOOPBACK, port), DEADLINE))

        def is_served() -> bool:
            """Not at first, perhaps: those that were ended for others must have noticed it."""
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(server.url, None, DEADLINE, context=context) as answer,
            ):
                return b"ftcoord_info" in answer.read()
            return False

        for _ in range(2):
            eventually(is_served, "a scrape is served")
        served_by = [one for one in threading.enumerate() if "process_request" in one.name]
        assert 0 < len(served_by) <= MOST_SCRAPERS
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < CONNECTION_TIMEOUT / 3
        for thread in served_by:
            thread.join(DEADLINE)
            assert not thread.is_alive()


@pytest.mark.parametrize("first", [b"", b"GET / HT"])
def test_a_connection_to_the_metrics_lasts_only_so_long(monkeypatch: pytest.MonkeyPatch, first: bytes) -> None:
    monkeypatch.setattr(exporter, "CONNECTION_TIMEOUT", 0.2)
    with (
        MetricsServer(MetricsAddress(LOOPBACK, 0), process.collect_process) as server,
        socket.create_connection((LOOPBACK, urlsplit(server.url).port), DEADLINE) as slow,
    ):
        slow.sendall(first)
        assert slow.recv(1) == b""


@pytest.mark.parametrize(
    ("host", "status"), [("evil.example", 421), ("node7", 200), (LOOPBACK, 200), ("localhost:1", 200)]
)
def test_metrics_are_told_to_who_calls_the_server_by_its_name(host: str, status: int) -> None:
    address = MetricsAddress(LOOPBACK, 0, host_names=("node7",))
    with MetricsServer(address, process.collect_process) as server:
        connection = HTTPConnection(LOOPBACK, urlsplit(server.url).port, timeout=DEADLINE)
        connection.request("GET", "/metrics", headers={"Host": host})
        assert connection.getresponse().status == status
        connection.close()
