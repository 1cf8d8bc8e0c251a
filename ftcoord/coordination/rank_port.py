"""The port of a manager: one TCP port for ftcoord's own ranks and torchft's native ones.

An event loop on one thread serves all connections, so a waiting call costs no thread. The first bytes of a connection
show its kind. The bytes of native ranks are forwarded to a gRPC server, see `native_ranks`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from ftcoord import concurrency, fork
from ftcoord.coordination.askers import Askers
from ftcoord.coordination.native_ranks import NativeRanks
from ftcoord.coordination.rank_connection import RankConnection
from ftcoord.coordination.rank_frames import HELLO, WELCOME
from ftcoord.coordination.rank_group import RankGroup
from ftcoord.coordination.splice import SpliceEnd
from ftcoord.coordination.tcp import keep_alive

log = logging.getLogger(__name__)

HTTP2: Final = b"PRI * HTTP/2.0"
"""The first bytes of a gRPC connection."""
GREETING_TIMEOUT: Final = 20.0
"""Seconds that a connection may stay open without a greeting."""
MOST_NEWCOMERS: Final = 512
"""The most connections that may be open without a greeting; beyond that the oldest are closed. Else anyone who reaches
the port could use up the process's file descriptors, of which it often has 1,024."""
REPEAT_INTERVAL: Final = 60.0
"""Seconds until a persistent system error is logged again."""
BACKLOG: Final = 1024


def listen(bind: str) -> socket.socket:
    """A socket that listens at `host:port` or `[address]:port`; `[::]` includes IPv4.

    Raises RuntimeError with torchft's text.
    """
    host, colon, port = bind.rpartition(":")
    if not colon or not host:
        raise RuntimeError(f"invalid socket address {bind!r}; write it as [::]:29512 or 0.0.0.0:29512")
    if not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise RuntimeError(f"invalid port value in {bind!r}; it is a number from 0 to 65535")
    try:
        return _bound(host.removeprefix("[").removesuffix("]"), int(port))
    except OSError as error:
        if isinstance(error, socket.gaierror) or not error.errno:  # its numbers are no errnos
            raise RuntimeError(f"cannot listen on {bind}: {error}") from None
        raise RuntimeError(f"cannot listen on {bind}: {os.strerror(error.errno)} (os error {error.errno})") from None


def _bound(host: str, port: int) -> socket.socket:
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    dual = family == socket.AF_INET6 and host == "::"
    listener = socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=dual)
    keep_alive(listener)  # what it accepts inherits this
    fork.hide(listener.fileno())
    return listener


def stop_listening(listener: socket.socket) -> None:
    """Close a socket from `listen`. Idempotent."""
    fork.unhide(listener.fileno())
    listener.close()


class RankPort:
    """Serves the calls that arrive at a listening socket, which it owns, until `close()`.

    Args:
        listener: see `listen`.
        group: the ranks.
        failed: called when its thread fails.
    """

    def __init__(self, listener: socket.socket, group: RankGroup, failed: Callable[[BaseException], None]) -> None:
        self._group, self._failed = group, failed
        self._native, self._askers = NativeRanks(group), Askers(self._call_soon)
        self._open: set[asyncio.Transport] = set()  # only the loop's thread, as all of asyncio's objects
        self._newcomers: dict[asyncio.Transport, None] = {}  # likewise; the oldest first
        self._listener, self._loop = listener, asyncio.new_event_loop()
        self._loop.set_exception_handler(_ErrorLog())
        # Any thread adds, one step of a deque at a time; two that wake the loop at the same time do so once too often.
        self._due: deque[Callable[[], None]] = deque()
        self._is_woken = False
        with contextlib.ExitStack() as undo:
            undo.callback(self._loop.close)
            make = partial(_Newcomer, self._loop, self._watch_end, self._greet)
            self._server = self._loop.run_until_complete(self._loop.create_server(make, sock=listener))
            listener.listen(BACKLOG)  # asyncio has set its own, smaller one: so many it accepts at a time
            self._thread = concurrency.thread(self._run, "ftcoord-ranks")
            self._thread.start()
            undo.pop_all()

    def close(self) -> None:
        """Close all connections, and stop listening: before this returns, unless the loop's thread calls it.
        Idempotent."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread is not concurrency.current_thread():
            self._thread.join()

    def _call_soon(self, function: Callable[[], None]) -> None:
        """Call a function on the loop's thread: at once if this is that thread, else soon; never after the end."""
        if self._thread is concurrency.current_thread():
            function()
            return
        self._due.append(function)
        if not self._is_woken:  # one wake for all ranks that a quorum answers: else the loop runs after each of them
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, and all connections with it
                self._loop.call_soon_threadsafe(self._do_due)

    def _do_due(self) -> None:
        self._is_woken = False  # first: what is added from now on may be seen below, and wakes the loop once more
        while self._due:
            self._loop.call_soon(self._due.popleft())  # each by itself: one that fails must not keep the others back

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            failure = sys.exc_info()[1]
            try:
                self._end()
            finally:  # what fails once may fail again: the owner hears of it all the same
                if failure is not None:
                    self._failed(failure)

    def _end(self) -> None:
        fork.unhide(self._listener.fileno())
        self._server.close()  # and the listener
        for transport in self._open:
            transport.abort()
        self._loop.run_until_complete(_let_transports_end())
        self._askers.close()
        self._native.close()
        self._loop.close()

    # -- on the loop's thread -------------------------------------------------------------------------------------

    def _greet(self, transport: asyncio.Transport, said: bytes, on_end: Callable[[], None]) -> bool:
        """Hand a connection to its protocol, if the bytes received show which one; returns whether they do."""
        if said.startswith(HELLO):
            self._newcomers.pop(transport, None)
            transport.write(WELCOME)
            rank = RankConnection(self._group, transport, self._call_soon, self._askers.ask, on_end)
            transport.set_protocol(rank)
            rank.data_received(said[len(HELLO) :])
            return True
        if said.startswith(HTTP2):
            self._newcomers.pop(transport, None)
            end = SpliceEnd(on_end)
            transport.set_protocol(end)
            end.connection_made(transport)
            task = self._loop.create_task(self._join_native(end, said))
            end.tasks.add(task)
            task.add_done_callback(end.tasks.discard)
            return True
        if not (HELLO.startswith(said) or HTTP2.startswith(said)):
            log.info("a connection was closed: it speaks neither torchft's protocol nor ftcoord's")
            transport.abort()
        return False

    async def _join_native(self, rank: SpliceEnd, said: bytes) -> None:
        """Connect a native rank to the gRPC server. Bytes that it sends meanwhile wait."""
        assert rank.transport is not None
        try:
            service = await self._native.connect(self._loop, lambda: SpliceEnd(lambda: None))
        except OSError as error:
            log.error("a native rank was not served: %s", error)
            rank.transport.abort()
            return
        rank.join(service, said)

    def _watch_end(self, transport: asyncio.Transport) -> Callable[[], None]:
        """Note a new connection; returns the function to call when it ends."""
        self._open.add(transport)
        self._newcomers[transport] = None
        if len(self._newcomers) > MOST_NEWCOMERS:
            oldest = next(iter(self._newcomers))
            del self._newcomers[oldest]
            oldest.abort()
        descriptor = transport.get_extra_info("socket").fileno()
        fork.hide(descriptor)

        def ended() -> None:
            fork.unhide(descriptor)
            self._open.discard(transport)
            self._newcomers.pop(transport, None)

        return ended


class _Newcomer(asyncio.Protocol):
    """A connection whose kind is not known yet."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        watch_end: Callable[[asyncio.Transport], Callable[[], None]],
        greet: Callable[[asyncio.Transport, bytes, Callable[[], None]], bool],
    ) -> None:
        self._loop, self._watch_end, self._greet, self._said = loop, watch_end, greet, b""
        self._on_end: Callable[[], None] = lambda: None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._on_end = transport, self._watch_end(transport)
        self._timer = self._loop.call_later(GREETING_TIMEOUT, transport.abort)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._said += data
        if self._greet(self._transport, self._said, self._on_end):
            self._stop_timer()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        self._on_end()

    def _stop_timer(self) -> None:
        assert self._timer is not None
        self._timer.cancel()


async def _let_transports_end() -> None:
    """Give transports the next turns of the loop to report that they end, and to close; connections in progress are
    given up."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for _ in range(2):  # one that is lost closes the one that it is joined to
        await asyncio.sleep(0)


class _ErrorLog:
    """Logs an error of one connection, which asyncio has closed; the others continue.

    If the process has no file descriptor left, asyncio reports that a hundred times a second; this logs it once a
    minute. Errors of the system explain themselves, so they are logged without a traceback.
    """

    def __init__(self) -> None:
        self._said: dict[str, float] = {}  # when each text was logged last; they are few, and asyncio's

    def __call__(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error, text = context.get("exception"), str(context.get("message"))
        if not isinstance(error, OSError):
            log.error("a connection of a rank failed: %s", text, exc_info=error)
            return
        now = concurrency.now()
        if now - self._said.get(text, -math.inf) >= REPEAT_INTERVAL:
            self._said[text] = now
            log.error("a connection of a rank failed: %s: %s. The manager goes on without it", text, error)
