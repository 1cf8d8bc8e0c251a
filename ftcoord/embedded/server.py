"""An embedded etcd server on this machine."""

from __future__ import annotations

import contextlib
import logging
from typing import IO, TYPE_CHECKING, Any, TypeVar

from ftcoord import concurrency
from ftcoord.embedded.member import EtcdMember
from ftcoord.embedded.ports import LOOPBACK, PortLost
from ftcoord.errors import ServerError

if TYPE_CHECKING:
    from ftcoord.etcd.client import EtcdClient

logger = logging.getLogger(__name__)

_Self = TypeVar("_Self", bound="EtcdServer")


class EtcdServer(EtcdMember):
    """A single etcd server, with the methods of torch's class of that name.

        with EtcdServer() as server:
            client = server.get_client()

    It ends with the process that started it, even if that is killed with SIGKILL, and its temporary data is removed. It
    does not end with the thread that started it, nor with a forked child. Unlike torch's class, it keeps a `data_dir`
    that you give, and `get_client` returns a client of etcd's v3 API.

    Args:
        data_dir: etcd's data; kept on `stop`. None for a temporary directory that is removed.
        port: the client port; 0 for any free one.
        host: the IP address to listen on, 127.0.0.1 by default.
        log_path: the file that etcd's log is appended to; None for ``etcd.log`` beside its data.
        heartbeat_interval_ms: etcd's flag, 100 by default.
        election_timeout_ms: etcd's flag, 1000 by default, at least 5 heartbeat intervals. etcd grants no lease shorter
            than 1.5 times this.
        extra_args: further etcd flags, last on its command line. Anyone on the machine can read them.
        name: the member's name; in etcd it is prefixed with ``ftcoord-``.
        login: whether etcd requires a login: the user ``root``, with a random password, which `config` and
            `get_client` use. It is in the file ``password`` (mode 0600) of etcd's data, so that a later start on the
            same data has the same one. A start without `login` on such data switches it off.

    Raises ConfigError if an argument is not valid.
    """

    def start(self, timeout: float = 60, num_retries: int = 3, stderr: int | IO[Any] | None = None) -> None:
        """Start etcd, and wait until it serves.

        Args:
            timeout: seconds that this may take in all.
            num_retries: how often to try in all if another process takes the port first. Other failures are final.
            stderr: a file, a descriptor or ``subprocess.DEVNULL`` for etcd's log, instead of its log file.

        Raises:
            ConfigError: `stderr` is ``subprocess.PIPE``.
            ServerError: it is already started, there is no etcd binary, the port is in use, or etcd ended or did not
                serve in time; the message then has the end of etcd's log. Or its data has users of its own. Nothing is
                left behind.
        """
        if self._process is not None:
            raise ServerError(f"etcd is started already on {self.get_endpoint()}: use it, or call stop() or restart()")
        deadline = concurrency.now() + timeout
        for tries_left in reversed(range(max(1, num_retries))):
            try:
                self._start(deadline - concurrency.now(), stderr)
            except PortLost as error:
                if not tries_left:
                    raise
                logger.info("starting etcd again, on another port if possible: %s", error)
            else:
                logger.info("etcd serves on %s", self.get_endpoint())
                return

    def get_host(self) -> str:
        """``localhost``, as in torch; or the address that it listens on, if that is not 127.0.0.1."""
        host = super().get_host()
        return "localhost" if host == LOOPBACK else host

    def get_client(self) -> EtcdClient:
        """Make a client of this server; the caller closes it. Raises ServerError if it was never started.

        Of python-etcd's client, which torch's class returns, it has only `version`: the other calls are those of etcd's
        v2 API, which etcd 3.6 and later do not have. See `EtcdClient`.
        """
        from ftcoord.etcd.client import EtcdClient

        return EtcdClient(self.config())

    def __enter__(self: _Self) -> _Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def _start(self, timeout: float, stderr: int | IO[Any] | None) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(self.stop)
            self.launch(self.prepare(), stderr)
            self.wait_ready(timeout)
            undo.pop_all()
