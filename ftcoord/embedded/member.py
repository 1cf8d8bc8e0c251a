"""One local etcd process: its ports, command line, log and health."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ftcoord import concurrency
from ftcoord.config import Credentials, Endpoint, EtcdConfig
from ftcoord.embedded.binary import COMMIT_WHOLE, find_etcd, loses_writes
from ftcoord.embedded.ports import LOOPBACK, PortLost, ReservedPort, join, listen_address, local_address
from ftcoord.embedded.process import SupervisedProcess
from ftcoord.errors import ConfigError, EtcdError, ServerError
from ftcoord.etcd.release import EMBEDDED_NAMES

POLL_INTERVAL = 0.02
"""Seconds between two checks of a server that is starting: etcd does not announce that it serves."""

_HTTP_TIMEOUT = 2.0
_LOG_LINES = 12

USER = "root"
"""The user of an etcd with a login."""
_PASSWORD_FILE = "password"
_CHEAP_HASH = "--bcrypt-cost=4"
"""A random password cannot be guessed, however quickly its hash is computed; and each login computes it."""


class EtcdMember:
    """One etcd process on this machine, alone or as a member of a local cluster. Its peer port is on 127.0.0.1 only.

    The lower layer of `EtcdServer` and `EtcdCluster`, which start it with `prepare`, `launch` and `wait_ready`. Except
    for `stop`, `is_running`, `is_paused`, `get_host` and `prepare`, methods raise ServerError before it is started.

    Args:
        data_dir: etcd's data; kept on `stop`. None for a temporary directory that is removed.
        port: the client port; 0 for any free one.
        host: the IP address that clients connect to.
        log_path: the file that etcd's log is appended to; None for ``etcd.log`` beside its data.
        heartbeat_interval_ms: etcd's flag.
        election_timeout_ms: etcd's flag, at least 5 heartbeat intervals. etcd grants no lease shorter than 1.5 times
            this.
        extra_args: further etcd flags, last on its command line. Anyone on the machine can read them.
        name: the member's name in its cluster. In etcd it is prefixed with ``ftcoord-``, so that clients know that
            ftcoord started this member.
        login: whether etcd requires a login: the user ``root``, with a random password. It is in the file
            ``password`` (mode 0600) of etcd's data, so that a later start on the same data has the same one. A start
            without `login` on such data switches it off.

    Raises:
        ConfigError: an argument is not valid.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        *,
        port: int = 0,
        host: str = LOOPBACK,
        log_path: str | os.PathLike[str] | None = None,
        heartbeat_interval_ms: int = 100,
        election_timeout_ms: int = 1000,
        extra_args: Sequence[str] = (),
        name: str = "default",
        login: bool = False,
    ) -> None:
        _check(port, heartbeat_interval_ms, election_timeout_ms, extra_args)
        self.name = f"{EMBEDDED_NAMES}{name}"
        self._host = listen_address(host)
        self._wanted_port = port
        self._data_dir = None if data_dir is None else os.path.abspath(data_dir)
        self._wanted_log = None if log_path is None else os.path.abspath(log_path)
        self._flags = [
            f"--heartbeat-interval={heartbeat_interval_ms}",
            f"--election-timeout={election_timeout_ms}",
            *([_CHEAP_HASH] if login else ()),
            *extra_args,
        ]
        self._login = login
        self._password = ""  # of the data: there is one too if its login is to be switched off
        self._client_port: ReservedPort | None = None
        self._peer_port: ReservedPort | None = None
        self._process: SupervisedProcess | None = None
        self._cancel_finalizer: Callable[[], None] | None = None
        self._data = ""
        self._log: Path | None = None
        self._log_start = 0
        self._paused = False

    def get_host(self) -> str:
        """The address at which this machine reaches the server."""
        return local_address(self._host)

    def get_port(self) -> int:
        """The client port; it does not change between `start` and `stop`.

        Raises:
            ServerError: never started.
        """
        if self._client_port is None:
            raise ServerError("etcd has no port yet: call start() first")
        return self._client_port.number

    def get_endpoint(self) -> str:
        """``host:port`` for clients."""
        return join(self.get_host(), self.get_port())

    def config(self, request_timeout: float = 5.0) -> EtcdConfig:
        """How clients reach it: its endpoint, and its login if it has one. Raises ServerError if never started."""
        return self._config(self._login, request_timeout)

    def password_file(self) -> str:
        """The path of the file with the login's password; empty without a login."""
        return os.path.join(self._data, _PASSWORD_FILE) if self._login else ""

    @property
    def pid(self) -> int:
        """The pid of etcd itself.

        Raises:
            ServerError: it does not run.
        """
        pid = self._started().pid()
        if pid is None:
            raise ServerError("etcd does not run: call restart()")
        return pid

    def is_running(self) -> bool:
        """Whether the etcd process exists, paused or not."""
        try:
            return self._started().exit_code() is None
        except ServerError:  # never started, or its supervisor is gone
            return False

    def is_paused(self) -> bool:
        """Whether `pause` was called, and since then no `resume`, `kill` or `restart`."""
        return self._paused

    def healthy(self, timeout: float = _HTTP_TIMEOUT) -> bool:
        """Whether it serves linearizable reads, and so knows a leader. A member out of space (NOSPACE) is healthy.

        Args:
            timeout: seconds for each of the two requests that this may take.
        """
        answer = self._ask("GET", "/health", None, timeout)
        if answer is not None and answer[0] == http.client.SERVICE_UNAVAILABLE:
            # Not asked first: the exclusion makes etcd log a warning whenever it is not out of space.
            answer = self._ask("GET", "/health?exclude=NOSPACE", None, timeout)
        return answer is not None and isinstance(answer[1], dict) and str(answer[1].get("health")) == "true"

    def http(
        self, method: str, path: str, body: Mapping[str, object] | None = None, *, timeout: float = _HTTP_TIMEOUT
    ) -> dict[str, Any] | None:
        """Send a request to etcd's HTTP side, such as ``/version``; returns the JSON object.

        None for any answer but status 200 with a JSON object, and for no answer within `timeout` seconds.
        """
        answer = self._ask(method, path, body, timeout)
        return answer[1] if answer is not None and answer[0] == http.client.OK and isinstance(answer[1], dict) else None

    def prepare(self) -> str:
        """Choose and reserve the ports.

        Returns:
            This member's part of ``--initial-cluster``.

        Raises:
            PortLost: the given port is in use.
        """
        self._client_port = ReservedPort(self._host, self._wanted_port)
        self._peer_port = ReservedPort(LOOPBACK)
        return f"{self.name}={self._peer_url()}"

    def launch(self, initial_cluster: str, stderr: int | IO[Any] | None = None) -> None:
        """Start etcd, after `prepare`. Does not wait until it serves.

        Args:
            initial_cluster: what all members' `prepare` returned, joined by commas.
            stderr: a file or a descriptor for etcd's log, instead of its log file.

        Raises:
            ConfigError: `stderr` is ``subprocess.PIPE``, which nobody would read.
            ServerError: there is no etcd binary, or the binary, the data directory or the log file cannot be used.
        """
        if stderr in (subprocess.PIPE, subprocess.STDOUT):
            raise ConfigError("stderr", stderr, "a file, a descriptor, subprocess.DEVNULL, or None for etcd's log file")
        binary = find_etcd()
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as files:
            scratch = None
            if self._data_dir is None:
                scratch = tempfile.mkdtemp(prefix="ftcoord-etcd-")
                undo.callback(shutil.rmtree, scratch, ignore_errors=True)
            data = self._data = self._data_dir or os.path.join(str(scratch), "data")
            try:
                os.makedirs(data, mode=0o700, exist_ok=True)
                self._password = _password_in(data, create=self._login)
                self._log = None
                if stderr is None:
                    self._log = Path(self._wanted_log or os.path.join(scratch or data, "etcd.log"))
                    stderr = files.enter_context(open(self._log, "ab"))
                self._process = SupervisedProcess(
                    [binary, *(COMMIT_WHOLE if loses_writes(binary) else ()), *self._arguments(data, initial_cluster)],
                    output=stderr,
                    environment=_environment(),
                    scratch=scratch,
                )
            except OSError as error:
                raise ServerError(f"cannot start etcd: {error}; choose another data_dir or log_path") from error
            undo.pop_all()
        self._cancel_finalizer = concurrency.when_forgotten(self, _end, self._process, self._ports(), last=True)
        self.relaunch()

    def relaunch(self) -> None:
        """Start etcd again on the same ports and data; a running one is ended first. Does not wait until it serves."""
        process = self._started()
        self._log_start = self._log.stat().st_size if self._log is not None else 0
        for port in self._ports():
            port.hand_over()
        process.start()
        self._paused = False

    def wait_ready(self, timeout: float) -> None:
        """Wait until etcd serves, and requires a login or none, as was asked for.

        Raises:
            PortLost: etcd ended because one of its ports is in use.
            ServerError: etcd ended, or did not serve within `timeout` seconds. The message has the end of its log. Or
                its data has users of its own.
        """
        deadline = concurrency.now() + timeout
        while not self.healthy(min(_HTTP_TIMEOUT, max(POLL_INTERVAL, deadline - concurrency.now()))):
            code = self._started().exit_code()
            if code is not None:
                raise self._startup_error(f"etcd ended with code {code} before it served")
            if concurrency.now() >= deadline:
                raise self._startup_error(f"etcd did not serve within {timeout:.3g} s")
            concurrency.sleep(POLL_INTERVAL)
        if self._password:
            self._set_login(max(1.0, deadline - concurrency.now()))

    def kill(self) -> None:
        """End etcd with SIGKILL, as in a crash. Its data and port are kept for `restart`."""
        self._started().kill()
        self._paused = False

    def pause(self) -> None:
        """Stop etcd with SIGSTOP: it hangs, with its connections open, until `resume`. No effect if it has ended."""
        self._started().pause()
        self._paused = self.is_running()

    def resume(self) -> None:
        """Let a paused etcd continue."""
        self._started().resume()
        self._paused = False

    def restart(self, timeout: float = 60, *, wait: bool = True) -> None:
        """Start etcd again on the same port with the same data; a running one is ended first.

        Args:
            timeout: seconds to wait until it serves.
            wait: False to return as soon as the process runs: a member without a majority cannot serve yet.

        Raises:
            ServerError: it was never started, or does not come up. It can be tried again.
        """
        self.relaunch()
        if wait:
            self.wait_ready(timeout)

    def wipe(self) -> None:
        """End etcd with SIGKILL and remove its data, as if its host were lost. Its port is kept for `restart`."""
        self.kill()
        shutil.rmtree(os.path.join(self._data, "member"))

    def stop(self) -> None:
        """End etcd and remove its temporary data. Idempotent; does nothing in a forked child."""
        if self._process is not None and not self._process.is_owner():
            return
        if self._process is not None:
            if self._cancel_finalizer is not None:
                self._cancel_finalizer()
            self._process.close()
        self._process = None
        self._paused = False
        for port in self._ports():
            port.release()

    def _config(self, login: bool, request_timeout: float) -> EtcdConfig:
        user = Credentials(USER, self._password) if login else None
        endpoint = Endpoint(self.get_host(), self.get_port())
        return EtcdConfig((endpoint,), credentials=user, request_timeout=request_timeout)

    def _set_login(self, timeout: float) -> None:
        from ftcoord.embedded import rpc  # loads gRPC

        try:
            rpc.set_login(self._config(True, timeout), self._login)
        except EtcdError as error:
            todo = "choose another data_dir, or leave its users as they are: start it without a login (`--no-login`)"
            raise ServerError(f"cannot set the login of the etcd in {self._data}: {error}; {todo}") from None

    def _started(self) -> SupervisedProcess:
        if self._process is None:
            raise ServerError("etcd is not started: call start() first")
        return self._process

    def _ports(self) -> list[ReservedPort]:
        return [port for port in (self._client_port, self._peer_port) if port is not None]

    def _peer_url(self) -> str:
        assert self._peer_port is not None
        return f"http://{join(LOOPBACK, self._peer_port.number)}"

    def _arguments(self, data_dir: str, initial_cluster: str) -> list[str]:
        """etcd's flags: only those that every version from 3.4 on has.

        A web page of any site can send requests to this machine's ports. etcd refuses those that name another host (DNS
        rebinding), and has no JSON gateway, which takes writes that a browser sends without asking first.
        """
        hosts = dict.fromkeys((LOOPBACK, "localhost", "::1", self._host))
        return [
            f"--host-whitelist={','.join(hosts)}",
            "--enable-grpc-gateway=false",
            f"--name={self.name}",
            f"--data-dir={data_dir}",
            f"--listen-client-urls=http://{join(self._host, self.get_port())}",
            f"--advertise-client-urls=http://{self.get_endpoint()}",
            f"--listen-peer-urls={self._peer_url()}",
            f"--initial-advertise-peer-urls={self._peer_url()}",
            f"--initial-cluster={initial_cluster}",
            "--logger=zap",
            "--log-level=warn",
            "--log-outputs=stderr",
            *self._flags,
        ]

    def _ask(self, method: str, path: str, body: Mapping[str, object] | None, timeout: float) -> tuple[int, Any] | None:
        """The status and JSON of etcd's answer; None without an answer."""
        connection = http.client.HTTPConnection(local_address(self._host), self.get_port(), timeout=timeout)
        try:
            connection.request(method, path, body=None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            connection.close()

    def _startup_error(self, problem: str) -> ServerError:
        """The error, with etcd's log since its last launch."""
        if self._log is None:
            return ServerError(f"{problem} on {self.get_endpoint()}; correct what it wrote to the given stderr")
        with open(self._log, "rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode(errors="replace").splitlines()
        if len(lines) > _LOG_LINES:  # the first line says it when a flag was wrong: the rest is etcd's help text
            lines = [lines[0], "...", *lines[-_LOG_LINES + 2 :]]
        log = "\n  ".join(lines) or "(empty)"
        kind = PortLost if "address already in use" in log else ServerError
        return kind(f"{problem} on {self.get_endpoint()}; correct what its log says and try again. The log:\n  {log}")


def _end(process: SupervisedProcess, ports: Sequence[ReservedPort]) -> None:
    process.close()
    for port in ports:
        port.release()


def _password_in(data_dir: str, create: bool) -> str:
    """The password in the file there; a new one if it is to be created; else, empty. Raises OSError."""
    path, flags = os.path.join(data_dir, _PASSWORD_FILE), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    if not create and not os.path.exists(path):
        return ""
    with open(path, "r+", opener=lambda name, _: os.open(name, flags, 0o600)) as file:
        password = file.read().strip()
        if create and not password:
            password = secrets.token_urlsafe(24)
            file.write(f"{password}\n")
            file.flush()
            os.fsync(file.fileno())  # before etcd requires it
    return password


def _check(port: int, heartbeat_ms: int, election_ms: int, extra_args: Sequence[str]) -> None:
    if not 0 <= port <= 65535:
        raise ConfigError("port", port, "a port number, or 0 for any free one")
    if heartbeat_ms < 1:
        raise ConfigError("heartbeat_interval_ms", heartbeat_ms, "at least 1")
    if not 5 * heartbeat_ms <= election_ms <= 50_000:
        raise ConfigError("election_timeout_ms", election_ms, "5 heartbeat intervals to 50000 ms")
    if isinstance(extra_args, str):
        raise ConfigError("extra_args", extra_args, "a list of flags, such as ['--quota-backend-bytes=16777216']")


def _environment() -> dict[str, str]:
    """Ours without etcd's own variables, each of which stands for a flag."""
    keep = "ETCD_UNSUPPORTED_ARCH"  # without it etcd 3.4 refuses to run on arm64
    return {name: value for name, value in os.environ.items() if not name.startswith("ETCD_") or name == keep}
