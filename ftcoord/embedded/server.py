"""An embedded etcd for one machine."""

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
    """A single etcd, with the methods of torch's class of that name.

        with EtcdServer() as server:
            client = server.get_client()

    It listens on 127.0.0.1 unless told otherwise, and ends with the process that started it, also when that is killed
    with -9; its temporary data goes with it. It does not end with the thread that started it, nor with a forked child.
    The arguments are those of `EtcdMember`; other than in torch, a `data_dir` that you give is kept, and `get_client`
    gives a client of etcd's v3 API.
    """

    def start(self, timeout: float = 60, num_retries: int = 3, stderr: int | IO[Any] | None = None) -> None:
        """Start etcd and wait until it serves.

        Args:
            timeout: seconds that all of it may take.
            num_retries: how often to try in all when somebody else takes the port first. Other failures are final.
            stderr: a file, descriptor or ``subprocess.DEVNULL`` for etcd's log instead of its log file.

        Raises:
            ConfigError: `stderr` is ``subprocess.PIPE``.
            ServerError: it is started already; no binary, or the port is in use, or etcd ended or did not serve in
                time: the message has the end of its log. Nothing is left behind.
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
        """``localhost``, as torch's says, or the address that it was told to listen on, if that is another one."""
        host = super().get_host()
        return "localhost" if host == LOOPBACK else host

    def get_client(self) -> EtcdClient:
        """A new client of this server; the caller closes it.

        Of the client that torch's gives it has `version`. Reading, writing and watching are those of `EtcdClient`: the
        rest of python-etcd's calls are those of etcd's v2 API, which an etcd from 3.6 on does not have.
        """
        from ftcoord.etcd.client import EtcdClient

        return EtcdClient(self.get_endpoint())

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
