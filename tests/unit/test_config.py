"""Endpoints, TLS, users and their variables: what is accepted, what wins, what is refused, and what is never shown."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import pem
from hypothesis import given, strategies as st

from ftcoord.config import Credentials, Endpoint, EtcdConfig, Tls
from ftcoord.errors import ConfigError
from ftcoord.escaping import HIDDEN

SECRET = "s3cr3t-hunter2"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """PEM files (only their markers are looked at here), a password, and files that must be refused."""
    contents = {
        "ca": pem("CERTIFICATE"),
        "cert": pem("CERTIFICATE"),
        "key": pem("PRIVATE KEY"),
        "rsa_key": pem("RSA PRIVATE KEY"),
        "locked_key": pem("ENCRYPTED PRIVATE KEY"),
        "marked": "\ufeff" + pem("CERTIFICATE"),
        "cut": pem("CERTIFICATE") + pem("CERTIFICATE")[:-30],
        "password": f"{SECRET}\n",
        "marked_password": f"\ufeff{SECRET}\r\n\r\n",
        "mark": "\ufeff\n",
        "empty": "",
        "newline": "\n",
        "text": "not a certificate",
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    return {name: str(tmp_path / name) for name in (*contents, "binary", "missing")} | {"directory": str(tmp_path)}


def load(*args: Any, **kwargs: Any) -> EtcdConfig:
    """`EtcdConfig.load` away from the variables of the shell that runs the tests."""
    return EtcdConfig.load(*args, **{"env": {}, **kwargs})


def chain(error: BaseException) -> Iterator[str]:
    yield from (str(error), repr(error), repr(vars(error)))
    yield "".join(traceback.format_exception_only(error))
    for other in (error.__cause__, error.__context__):
        if other is not None:
            yield from chain(other)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((nothing, "http://127.0.0.1:2379") for nothing in (None, "", " \t")),
        *((default_port, "http://host:2379") for default_port in ("host", "http://host", "HOST,host:2379")),
        *((edge, f"http://{edge}") for edge in ("host:1", "host:65535", "10.1.2.3:9", "my_service:2379")),
        ("http://host:80/", "http://host:80"),
        ("HTTPS://Host.Example", "https://host.example:2379"),
        ("https://h1:1,h2:2", "https://h1:1, https://h2:2"),
        (" a , b:1 ,\tc ", "http://a:2379, http://b:1, http://c:2379"),
        (["a:1", "b:2"], "http://a:1, http://b:2"),
        (("a", "b,c"), "http://a:2379, http://b:2379, http://c:2379"),
        ("b,a,b:2379,A", "http://b:2379, http://a:2379"),
        ("[::1]:1234", "http://[::1]:1234"),
        ("fd00:1:2:3:4:5:6:2379", "http://[fd00:1:2:3:4:5:6:2379]:2379"),
        ("fd00::a", "http://[fd00::a]:2379"),
        ("fd00::2379", "http://[fd00::2379]:2379"),
        *((same, "http://[::1]:2379") for same in ("[::1]", "::1", "[0:0:0:0:0:0:0:1],::1")),
        ("https://[2001:DB8::1]:5", "https://[2001:db8::1]:5"),
        ("etcd-0.etcd.ns.svc.cluster.local.:2379", "http://etcd-0.etcd.ns.svc.cluster.local.:2379"),
    ],
)
def test_endpoints(value: Any, expected: str) -> None:
    config = load(value)
    assert config.describe() == expected
    assert str(config) == expected


MALFORMED_ENDPOINTS = [
    *(",", "a,,b", "a,", ",a", " , ", "http://", "://a"),
    *(f"a:{port}" for port in ("", "0", "65536", "-1", "+1", "1.5", "http", "1_0", "²", " 1", "1e3")),
    *(":2379", "2379", "https://:2379"),
    *("ftp://a", "unix:///run/etcd.sock", "dns:///a", "http//a", "http:/a"),
    *("a/", "a/path", "http://a/path", "http://a:1//", "http://a?x=1", "http://a#x"),
    *("http://a,https://b", "a,http://b,https://c", "embedded", "embedded,a"),
    *("a b", "a;b", "a:1 b:2", "a:1;b:2", "a|b", '"a:1"', "'a'", "::1:2379", "fd00::7:2379", "a,fd00::7:1"),
    *("a b", "a;b", "a\nb", "a\0", "-a", "a-.b", "a..b", ".", "a" * 64, ".".join(["a" * 60] * 5), "hôte"),
    *("10.0.0.256", "10.0.1", "1:2:3", "::g", "[::1", "::1]", "[::1]2379", "[::1]:", "[::1]:0", "[::1]:1:2", "[]:1"),
    *("[127.0.0.1]:1", "[host]:1", "fe80::1%eth0", "[fe80::1%25eth0]:1"),
]


@pytest.mark.parametrize("value", MALFORMED_ENDPOINTS)
@pytest.mark.parametrize("source", ["endpoints", "FTCOORD_ENDPOINTS", "ETCDCTL_ENDPOINTS"])
def test_malformed_endpoints_are_refused(value: str, source: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(value) if source == "endpoints" else load(env={source: value})
    error = caught.value
    assert error.key == source
    assert isinstance(error.value, str)
    plain = value.partition("?")[0].partition("#")[0]
    shown, items = (
        error.value.partition("?")[0].partition("#")[0],
        (plain, *(item.strip() for item in plain.split(","))),
    )
    if shown.endswith(HIDDEN):  # what follows a host, and is no port, may be a password
        assert any(item.startswith(shown.removesuffix(HIDDEN)) for item in items)
    else:
        assert shown in items
    assert str(error).startswith(f"{source}={error.value!r} ")


@given(st.text(max_size=40))
def test_any_text_is_an_endpoint_list_or_a_config_error(value: str) -> None:
    try:
        config = load(value)
    except ConfigError:
        return
    assert config.endpoints
    for endpoint in config.endpoints:
        assert load(str(endpoint)).endpoints == (endpoint,)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("h1:2379 h2:2379", "endpoints are separated by commas"),
        ("h1:2379;h2:2379", "endpoints are separated by commas"),
        ("fd00::7:2379", r"its end may be a port: write \[fd00::7:2379\]:2379 if all of it is the address"),
        ('"h1:2379"', "it has quotes, which no shell has removed"),
    ],
)
def test_what_is_wrong_with_a_list_is_told(value: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(value)


@given(st.ip_addresses(), st.integers(1, 65535))
def test_every_address_survives_the_way_to_a_target_and_back(address: Any, port: int) -> None:
    endpoint = Endpoint(str(address), port)
    assert load(f"https://{endpoint.target}").endpoints == (endpoint,)
    assert str(endpoint) == endpoint.target


LOOPBACK = ("127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "localhost", "etcd.localhost.")
ELSEWHERE = ("10.0.0.1", "0.0.0.0", "::2", "localhost.example")


@pytest.mark.parametrize("host", LOOPBACK + ELSEWHERE)
def test_is_loopback(host: str) -> None:
    assert Endpoint(host, 2379).is_loopback is (host in LOOPBACK)


@pytest.mark.parametrize(
    ("endpoints", "arguments", "encrypted"),
    [
        ("a", {}, False),
        ("http://a", {}, False),
        ("https://a", {}, True),
        ("a,https://b", {}, True),
        ("a", {"ca_cert": "ca"}, True),
        ("a", {"cert": "cert", "key": "key"}, True),
        ("a", {"server_name": "etcd.example"}, True),
        (None, {"ca_cert": "ca"}, True),
        ("https://a", {"ca_cert": "ca", "cert": "cert", "key": "rsa_key", "server_name": "b"}, True),
        *((endpoint, {"secure": True}, True) for endpoint in ("a", "https://a")),
        *((endpoint, {"secure": False}, False) for endpoint in ("a", "http://a")),
    ],
)
def test_when_tls_is_on(files: dict[str, str], endpoints: str, arguments: dict[str, Any], encrypted: bool) -> None:
    paths = {name: files.get(value, value) for name, value in arguments.items()}
    config = load(endpoints, **paths)
    assert (config.tls is not None) is encrypted
    assert config.describe().startswith("https://" if encrypted else "http://")
    if config.tls is not None:
        assert config.tls == Tls(*(paths.get(name) for name in ("ca_cert", "cert", "key", "server_name")))


REFUSED_TLS: list[tuple[str, str | None, dict[str, Any]]] = [
    ("secure", "http://a", {"secure": True}),
    ("secure", "https://a", {"secure": False}),
    ("ca_cert", "http://a", {"ca_cert": "ca"}),
    ("cert", "http://a", {"cert": "cert", "key": "key"}),
    ("server_name", "http://a", {"server_name": "b"}),
    ("ca_cert", "a", {"ca_cert": "ca", "secure": False}),
    ("cert", "https://a", {"cert": "cert"}),
    ("key", "https://a", {"key": "key"}),
    *(
        ("ca_cert", "a", {"ca_cert": it})
        for it in ("missing", "directory", "empty", "text", "key", "cut", "marked", "", "a\0b", 5)
    ),
    ("cert", "https://a", {"cert": "key", "key": "key"}),
    *(("key", "https://a", {"cert": "cert", "key": it}) for it in ("cert", "missing", "locked_key")),
    *(("server_name", "https://a", {"server_name": it}) for it in ("a:1", " ", "a b")),
]


@pytest.mark.parametrize(("key", "endpoints", "arguments"), REFUSED_TLS)
def test_refused_tls(files: dict[str, str], key: str, endpoints: str, arguments: dict[str, Any]) -> None:
    paths = {name: files.get(value, value) for name, value in arguments.items()}
    with pytest.raises(ConfigError) as caught:
        load(endpoints, **paths)
    assert caught.value.key == key
    shown = {"secure": "https" if arguments.get("secure") else "http"}.get(key, paths[key])
    assert caught.value.value == shown


def test_a_variable_for_tls_is_not_silently_ignored_with_http(files: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"^ETCDCTL_CACERT="):
        load("http://a", env={"ETCDCTL_CACERT": files["ca"]})


SETTINGS: list[tuple[str, str, str | None, Callable[[EtcdConfig], object]]] = [
    ("endpoints", "FTCOORD_ENDPOINTS", "ETCDCTL_ENDPOINTS", lambda config: config.endpoints[0].host),
    ("ca_cert", "FTCOORD_CA_CERT", "ETCDCTL_CACERT", lambda config: config.tls and config.tls.ca),
    ("cert", "FTCOORD_CERT", "ETCDCTL_CERT", lambda config: config.tls and config.tls.cert),
    ("key", "FTCOORD_KEY", "ETCDCTL_KEY", lambda config: config.tls and config.tls.key),
    ("server_name", "FTCOORD_SERVER_NAME", None, lambda config: config.tls and config.tls.server_name),
    ("user", "FTCOORD_USER", "ETCDCTL_USER", lambda config: config.credentials and config.credentials.user),
    ("password", "FTCOORD_PASSWORD", "ETCDCTL_PASSWORD", lambda c: c.credentials and c.credentials.password),
    ("request_timeout", "FTCOORD_REQUEST_TIMEOUT", None, lambda config: config.request_timeout),
]


@pytest.mark.parametrize(("argument", "ours", "etcdctl", "read"), SETTINGS, ids=[row[0] for row in SETTINGS])
def test_argument_before_ftcoord_before_etcdctl(
    tmp_path: Path, argument: str, ours: str, etcdctl: str | None, read: Callable[[EtcdConfig], object]
) -> None:
    """Each source alone, then all at once, then with empty variables in front."""
    cert, key = pem("CERTIFICATE"), pem("PRIVATE KEY")
    values: list[Any] = ["first", "second", "third"]
    if argument in ("ca_cert", "cert", "key"):
        for name in values:
            (tmp_path / name).write_text(cert + key)
        values = [str(tmp_path / name) for name in values]
    if argument == "request_timeout":
        values = [1.5, "2.5", ""]
    pairs = {"cert": "key", "key": "cert", "user": "password", "password": "user"}
    rest = {pairs[argument]: values[0]} if argument in pairs else {}
    expected = [float(value) if value else 5.0 for value in values] if argument == "request_timeout" else values

    def found(given: object, env: dict[str, str]) -> object:
        return read(load(**rest, **{argument: given}, env=env))

    variables = {ours: values[1]} | ({etcdctl: values[2]} if etcdctl else {})
    assert found(values[0], {}) == expected[0]
    assert found(values[0], variables) == expected[0]
    assert found(None, variables) == expected[1]
    assert found(None, {ours: values[1]}) == expected[1]
    if etcdctl:
        assert found(None, {etcdctl: values[2]}) == expected[2]
        assert found(None, {ours: "", etcdctl: values[2]}) == expected[2]
        assert found(None, {ours: "  ", etcdctl: values[2]}) == expected[2]


def test_without_an_environment_the_process_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCOORD_ENDPOINTS", "from-the-process:1")
    assert EtcdConfig.load().endpoints == (Endpoint("from-the-process", 1),)


LOGINS: list[tuple[dict[str, str], dict[str, str], tuple[str, str]]] = [
    ({"user": "a", "password": "p"}, {}, ("a", "p")),
    ({"user": "a"}, {"FTCOORD_PASSWORD": "p"}, ("a", "p")),
    ({"user": "a"}, {"FTCOORD_PASSWORD": " p "}, ("a", " p ")),
    ({"user": "a"}, {"ETCDCTL_PASSWORD": "p"}, ("a", "p")),
    ({"password": "p"}, {"FTCOORD_USER": "a"}, ("a", "p")),
    ({"password": "p"}, {"ETCDCTL_USER": "a:q"}, ("a", "p")),
    ({}, {"ETCDCTL_USER": "a:p"}, ("a", "p")),
    ({}, {"ETCDCTL_USER": "a:p:q@r"}, ("a", "p:q@r")),
    ({}, {"ETCDCTL_USER": "a:p", "ETCDCTL_PASSWORD": "q"}, ("a", "q")),
    ({}, {"ETCDCTL_USER": "a:p", "FTCOORD_PASSWORD": "q"}, ("a", "q")),
    ({}, {"ETCDCTL_USER": "a", "ETCDCTL_PASSWORD": "p"}, ("a", "p")),
    ({}, {"FTCOORD_USER": "a", "ETCDCTL_USER": "a:p"}, ("a", "p")),
    ({"user": "a"}, {"ETCDCTL_USER": "b:x", "FTCOORD_PASSWORD": "p"}, ("a", "p")),
    ({}, {"FTCOORD_USER": "a", "FTCOORD_PASSWORD_FILE": "password"}, ("a", SECRET)),
    ({}, {"FTCOORD_USER": "a", "FTCOORD_PASSWORD_FILE": "password", "ETCDCTL_PASSWORD": "q"}, ("a", SECRET)),
    ({}, {"FTCOORD_USER": "a", "FTCOORD_PASSWORD_FILE": "marked_password"}, ("a", SECRET)),
    *(({"user": "a"}, {name: "\ufeffp\r\n"}, ("a", "p")) for name in ("FTCOORD_PASSWORD", "ETCDCTL_PASSWORD")),
    ({}, {"ETCDCTL_USER": "\ufeffa:p\n"}, ("a", "p")),
    ({"user": "a", "password": "p\n"}, {}, ("a", "p")),
    ({"password": "p"}, {"FTCOORD_USER": "a", "FTCOORD_PASSWORD_FILE": "missing"}, ("a", "p")),
]


@pytest.mark.parametrize(("arguments", "env", "expected"), LOGINS)
def test_logins(
    files: dict[str, str], arguments: dict[str, str], env: dict[str, str], expected: tuple[str, str]
) -> None:
    if "FTCOORD_PASSWORD_FILE" in env:
        env = env | {"FTCOORD_PASSWORD_FILE": files[env["FTCOORD_PASSWORD_FILE"]]}
    assert load("a", **arguments, env=env).credentials == Credentials(*expected)


REFUSED_LOGINS: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("user", {"user": "a"}, {}),
    ("user", {"user": "a"}, {"ETCDCTL_USER": f"b:{SECRET}"}),
    ("FTCOORD_USER", {}, {"FTCOORD_USER": "a", "ETCDCTL_USER": f"b:{SECRET}"}),
    ("ETCDCTL_USER", {}, {"ETCDCTL_USER": "a"}),
    ("ETCDCTL_USER", {}, {"ETCDCTL_USER": "a:"}),
    ("ETCDCTL_USER", {}, {"ETCDCTL_USER": f":{SECRET}"}),
    ("password", {"password": SECRET}, {}),
    ("FTCOORD_PASSWORD", {}, {"FTCOORD_PASSWORD": SECRET}),
    ("FTCOORD_PASSWORD_FILE", {}, {"FTCOORD_PASSWORD_FILE": "password"}),
    ("ETCDCTL_PASSWORD", {}, {"ETCDCTL_PASSWORD": SECRET}),
    ("user", {"user": f"a:{SECRET}"}, {}),
    ("user", {"user": f"a:{SECRET}", "password": SECRET}, {}),
    ("FTCOORD_USER", {}, {"FTCOORD_USER": f"a:{SECRET}", "FTCOORD_PASSWORD": SECRET}),
    ("user", {"user": "", "password": SECRET}, {}),
    ("user", {"user": 5, "password": SECRET}, {}),
    ("password", {"user": "a", "password": ""}, {}),
    ("FTCOORD_PASSWORD", {"user": "a"}, {"FTCOORD_PASSWORD": "\ufeff\n"}),
    ("password", {"user": "a", "password": SECRET.encode()}, {}),
    ("FTCOORD_PASSWORD", {"user": "a"}, {"FTCOORD_PASSWORD": SECRET, "FTCOORD_PASSWORD_FILE": "password"}),
    *(
        ("FTCOORD_PASSWORD_FILE", {"user": "a"}, {"FTCOORD_PASSWORD_FILE": name})
        for name in ("missing", "directory", "empty", "newline", "mark", "binary")
    ),
]


@pytest.mark.parametrize(("key", "arguments", "env"), REFUSED_LOGINS)
def test_refused_logins_keep_the_secret(
    files: dict[str, str], key: str, arguments: dict[str, Any], env: dict[str, str]
) -> None:
    if "FTCOORD_PASSWORD_FILE" in env:
        env = env | {"FTCOORD_PASSWORD_FILE": files[env["FTCOORD_PASSWORD_FILE"]]}
    with pytest.raises(ConfigError) as caught:
        load("a", **arguments, env=env)
    assert caught.value.key == key
    assert not any(SECRET in shown for shown in chain(caught.value))


SECRET_URLS = [
    *(f"http://user:{SECRET}@host:2379", f"user:{SECRET}@host", f"http://{SECRET}@host", f"ftp://user:{SECRET}@host"),
    *(f"http://user:a{mark}{SECRET}@host" for mark in ",@/?#:"),
    *(f"http://user:{SECRET},b@host", f"good:1,https://user:{SECRET}@host"),
    *(f"http://host?password={SECRET}", f"http://host/path#{SECRET}"),
]


@pytest.mark.parametrize("endpoint", SECRET_URLS)
@pytest.mark.parametrize("source", ["endpoints", "FTCOORD_ENDPOINTS"])
def test_secrets_in_a_url_are_refused_and_not_shown(endpoint: str, source: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(endpoint) if source == "endpoints" else load(env={source: endpoint})
    assert caught.value.key == source
    assert not any(SECRET in shown for shown in chain(caught.value))
    assert "host" in str(caught.value.value)


def test_key_material_in_place_of_a_path_is_not_shown(files: dict[str, str]) -> None:
    pasted = f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n"
    for arguments in ({"cert": files["cert"], "key": pasted}, {"key": pasted}, {"cert": pasted, "key": pasted}):
        for endpoint in ("https://a", "http://a"):
            with pytest.raises(ConfigError) as caught:
                load(endpoint, **arguments)
            assert not any(SECRET in shown for shown in chain(caught.value))


def test_no_secret_in_any_repr() -> None:
    config = load("a", user="alice", password=SECRET)
    assert config.credentials is not None
    assert config.credentials.password == SECRET
    for thing in (config, config.credentials, [config], {"config": config}):
        assert SECRET not in repr(thing) + str(thing) + f"{thing}"
    assert "alice" not in config.describe()


@pytest.mark.parametrize(("value", "expected"), [(1, 1.0), (0.25, 0.25), ("7", 7.0), (" .5 ", 0.5), ("1e2", 100.0)])
def test_request_timeout(value: Any, expected: float) -> None:
    timeout = load(request_timeout=value).request_timeout
    assert timeout == expected
    assert type(timeout) is float


@pytest.mark.parametrize(
    "value",
    [
        *(0, -1, 0.0, float("nan"), float("inf"), 2e9, 10**400, True, False, [], b"5", object()),
        *("", " ", "0", "-1", "+1", "inf", "nan", "1e999", "5s", "1_0", "\u0665", "0x10", "five", "1,5"),
    ],
)
def test_refused_request_timeouts(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^request_timeout=.*seconds"):
        load(request_timeout=value)


def test_errors_use_the_names_the_caller_gives() -> None:
    with pytest.raises(ConfigError, match=r"^rdzv_endpoint='a:\*\*\*' "):
        load("a:x", names={"endpoints": "rdzv_endpoint"})
    with pytest.raises(ConfigError, match=r"^ssl_cert='/c' "):
        load("a", cert="/c", names={"cert": "ssl_cert"})
    with pytest.raises(ConfigError, match=r"^protocol='http' "):
        load("https://a", secure=False, names={"secure": "protocol"})
    with pytest.raises(ConfigError, match=r"^FTCOORD_ENDPOINTS="):
        load(env={"FTCOORD_ENDPOINTS": "a:x"}, names={"endpoints": "rdzv_endpoint"})
