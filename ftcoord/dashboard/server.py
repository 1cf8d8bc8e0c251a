"""Runs the dashboard's server, and bounds its connections.

uvicorn limits neither how many connections there are, nor how long it waits for a request, or for its answer to be
read: clients that connect and send nothing would take descriptors of this process until none are left. In a gateway
they are also those by which it serves its managers.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ftcoord import concurrency
from ftcoord.closing import Closing
from ftcoord.dashboard.app import Page, make_app
from ftcoord.dashboard.feeds import MOST_VIEWERS, SHARE, Board, LeaseBook
from ftcoord.errors import ServerError
from ftcoord.etcd.client import EtcdClient
from ftcoord.operator.metrics import RunsCollector

END_TIMEOUT: Final = 2
"""Seconds that answers in progress may take when the server ends."""
MOST_CONNECTIONS: Final = MOST_VIEWERS + 100
"""At a time. One that comes when there are as many is closed at once."""
MOST_OF_ADDRESS: Final = MOST_CONNECTIONS // SHARE
"""Of them from one address: behind a proxy all viewers have one."""
UNREAD_TIMEOUT: Final = 30.0
"""Seconds that a peer may read so little that nothing more can be written to it."""
HEADERS_TIMEOUT: Final = 20.0
"""Seconds that a connection has for the headers of its next request, from its beginning or from the last answer."""


class PageServer(Closing):
    """Serves the dashboard on its own thread, until `close()`, even without etcd.

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
    """One that sets an event when it serves."""

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
        except (
            OSError,
            SystemExit,
        ) as error:  # no descriptors; uvicorn's exit, which would end this thread without a log line
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
        collect = RunsCollector(page.etcd, page.key_prefix).collect
        config = uvicorn.Config(
            make_app(page, client, board, LeaseBook(client), collect),
            http=BoundedProtocol,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,  # else a client on this machine could choose the address that orders seem to come from
            timeout_graceful_shutdown=END_TIMEOUT,
        )
        yield _Server(config), listener, f"http://{host}:{listener.getsockname()[1]}"


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        return socket.create_server((host.strip("[]"), port), family=family)
    except OSError as error:
        raise ServerError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP, on a connection that ends when nothing is asked on it. For the thread of the event loop."""

    _silence: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        their = sum(_address_of(one) == _address_of(self) for one in self.connections)
        if len(self.connections) > MOST_CONNECTIONS or their > MOST_OF_ADDRESS:
            transport.abort()
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_unread()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_unread()
        # Not `close`, which waits until all is read.
        self._unread = self.loop.call_later(UNREAD_TIMEOUT, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_unread()
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_request()

    def _await_request(self) -> None:
        self._stop_waiting()
        self._silence = self.loop.call_later(HEADERS_TIMEOUT, self._end_if_silent)

    def _stop_waiting(self) -> None:
        if self._silence is not None:
            self._silence.cancel()

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()

    def _end_if_silent(self) -> None:
        """uvicorn's own timer of idle connections ends with the first byte, though no request may follow."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


def _address_of(one: object) -> str:
    """The address of a connection; empty if it is unknown."""
    client: tuple[str, int] | None = getattr(one, "client", None)
    return client[0] if client else ""
