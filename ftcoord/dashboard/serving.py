"""Runs the dashboard's server."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from starlette.types import ASGIApp

from ftcoord import concurrency
from ftcoord.closing import Closing
from ftcoord.config import EtcdConfig
from ftcoord.dashboard.acts import PageActor
from ftcoord.dashboard.app import make_app
from ftcoord.dashboard.board import Board, LeaseBook
from ftcoord.dashboard.connections import BoundedProtocol
from ftcoord.dashboard.torchft_paths import TorchftPaths
from ftcoord.errors import ServerError
from ftcoord.etcd.client import EtcdClient
from ftcoord.metrics.exporter import Collect
from ftcoord.operator.reading import read_job
from ftcoord.operator.status import Rules, tell_job
from ftcoord.operator.told import JobStatus

if TYPE_CHECKING:
    from prometheus_client.core import Metric

END_TIMEOUT: Final = 2
"""Seconds that answers in progress may take when the server ends."""


@dataclass(frozen=True, slots=True)
class Page:
    """What the dashboard shows, where it is served, and who may do what there.

    Args:
        etcd, key_prefix: where the jobs are.
        rules: the rules to judge them by.
        listen: the host and port; port 0 for a free one.
        about: what the dashboard says about itself.
        host_names: host names accepted in the Host header, besides addresses and localhost; in lower case.
        who: as whom it acts.
        token: the token for orders; empty for a read-only dashboard.
        gateway_job: the only job that it shows, with torchft's paths; empty for all jobs.
        allow_kill: whether torchft's kill path works without the token.
    """

    etcd: EtcdConfig
    key_prefix: str
    rules: Rules
    listen: tuple[str, int]
    about: Mapping[str, Any]
    host_names: Collection[str]
    who: str
    token: str
    gateway_job: str = ""
    allow_kill: bool = False


def serve(page: Page, ready: Callable[[str], None]) -> None:
    """Serve the dashboard until SIGINT or SIGTERM, even without etcd. `ready` is called with its address.

    Raises ServerError when it cannot listen there, and ConfigError.
    """
    with _made(page) as (server, listener, address):

        def end(*_signal: object) -> None:
            server.should_exit = True

        for number in (signal.SIGTERM, signal.SIGINT):  # the server ends at either, and then gives it to us again
            signal.signal(number, end)
        ready(address)
        server.run([listener])


class PageServer(Closing):
    """Serves the dashboard on its own thread, until `close()`.

    Raises ServerError when it cannot listen or serve there, ThreadNotStarted, and ConfigError.
    """

    def __init__(self, page: Page) -> None:
        with ExitStack() as undo:
            self._server, listener, self.address = undo.enter_context(_made(page))
            self._thread = concurrency.thread(self._server.run_on_thread, "ftcoord-page", listener)
            self._thread.start()
            undo.callback(self._end)
            self._server.settled.wait()
            if not self._server.started:
                raise ServerError(f"the page cannot be served at {self.address}: {self._server.error}")
            self._ends = undo.pop_all()

    @property
    def has_failed(self) -> bool:
        """Whether it has ended though nobody closed it."""
        return not self._thread.is_alive() and not self._server.should_exit

    def close(self) -> None:
        """Stop serving, within a few seconds. Idempotent."""
        self._ends.close()

    def _end(self) -> None:
        self._server.should_exit = True
        self._thread.join()


class _Server(uvicorn.Server):
    """One that says when it serves."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.settled = concurrency.event()  # it serves (`started`), or has ended
        self.error = ""  # why it did not start; written before `settled` is set

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.settled.set()

    def run_on_thread(self, listener: socket.socket) -> None:
        try:
            self.run([listener])
        except (OSError, SystemExit) as error:  # no descriptors; uvicorn's exit, which would end this thread unheard
            self.error = str(error)
        finally:
            self.settled.set()


@contextmanager
def _made(page: Page) -> Iterator[tuple[_Server, socket.socket, str]]:
    """A server that does not run yet, its socket, and its address."""
    host, port = page.listen
    with (
        _listening(host, port) as listener,
        EtcdClient(page.etcd) as client,
        Board(client, page.key_prefix, page.rules) as board,
    ):
        config = uvicorn.Config(
            _app(page, client, board, LeaseBook(client)),
            http=BoundedProtocol,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,  # else whoever calls from this machine says from where orders come
            timeout_graceful_shutdown=END_TIMEOUT,
        )
        yield _Server(config), listener, f"http://{host}:{listener.getsockname()[1]}"


def _app(page: Page, client: EtcdClient, board: Board, leases: LeaseBook) -> ASGIApp:
    actor = PageActor(client, page.key_prefix, page.who, page.etcd.request_timeout)
    acting = actor if page.token else None
    names = {*page.host_names, page.listen[0].lower()}
    if not page.gateway_job:
        collect = _runs(page.etcd, page.key_prefix)
        return make_app(board, leases, page.about, collect, names, actor=acting, token=page.token)

    def read() -> JobStatus:
        return tell_job(read_job(client, page.key_prefix, page.gateway_job), page.rules)

    killer, token = (actor, "") if page.allow_kill else (acting, page.token)
    paths = TorchftPaths(page.gateway_job, read, leases, killer, token)
    return make_app(board, leases, page.about, None, names, actor=acting, token=page.token, torchft=paths)


def _runs(etcd: EtcdConfig, key_prefix: str) -> Collect:
    """The metrics of all runs. Serving them needs prometheus_client, which their users must have installed."""
    made = list[Collect]()

    def collect() -> Iterable[Metric]:
        from ftcoord.operator.metrics import RunsCollector

        if not made:
            made.append(RunsCollector(etcd, key_prefix).collect)
        return made[0]()

    return collect


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        return socket.create_server((host.strip("[]"), port), family=family)
    except OSError as error:
        raise ServerError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
