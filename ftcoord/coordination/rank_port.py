"""The port of a manager: one TCP port for ftcoord's own ranks and torchft's native ones.

An event loop on one thread serves all connections, so a waiting call costs no thread. The first bytes of a connection
show its kind. Those of ftcoord's ranks have the manager's token in them; a connection without it is closed. torchft's
native ranks have none to show, so they are served only if the job's address says so (`native=1`): their bytes are
forwarded to a gRPC server, see `native_ranks`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
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
from ftcoord.coordination.crowd import Crowd, Unfinished
from ftcoord.coordination.native_ranks import NativeRanks
from ftcoord.coordination.rank_connection import RankConnection
from ftcoord.coordination.rank_frames import (
    GREETING_SIZE,
    HELLO,
    LARGEST_MESSAGE,
    WELCOME,
    WRONG_TOKEN,
    greeting,
)
from ftcoord.coordination.rank_group import RankGroup
from ftcoord.coordination.splice import SpliceEnd
from ftcoord.coordination.tcp import keep_alive

log = logging.getLogger(__name__)

HTTP2: Final = b"PRI * HTTP/2.0"
"""The first bytes of a gRPC connection."""
GREETING_TIMEOUT: Final = 20.0
"""Seconds that a connection may stay open without a greeting."""
FRAME_TIMEOUT: Final = 20.0
"""Seconds that a call may take from its first byte to its last."""
# The most connections of each kind, and bytes of unfinished calls: so many, and so many for each rank. See `crowd`.
MOST_NEWCOMERS: Final = (128, 2)
"""Without a greeting. More than are accepted in some turns of the loop: their greetings were not looked for yet."""
MOST_IDLE: Final = (256, 4)
"""With a greeting, but without a call in progress: of ranks, and of peers that heal from this group."""
MOST_NATIVE: Final = (64, 4)
"""Of native ranks and peers. Each of them takes two file descriptors or three."""
MOST_UNFINISHED: Final = (8 * LARGEST_MESSAGE, 64 * 1024)
ACCEPTED_AT_ONCE: Final = 32
"""Connections that are accepted in one turn of the loop."""
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
        token: what ftcoord's own ranks and peers must show.
        native: whether torchft's own are served; they show nothing.
        failed: called when its thread fails.
    """

    def __init__(
        self,
        listener: socket.socket,
        group: RankGroup,
        token: str,
        native: bool,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._group, self._failed, self._greeting, self._serves_native = group, failed, greeting(token), native
        self._has_refused_native = False  # only the loop's thread
        self._refusals: set[str] = set()  # the kinds that were logged; only the loop's thread
        self._native, self._askers = NativeRanks(group), Askers(self._call_soon)
        self._open: set[asyncio.Transport] = set()  # only the loop's thread, as all of asyncio's objects
        ranks = group.world_size
        self._newcomers, self._idle, self._natives = (
            Crowd(most + each * ranks) for most, each in (MOST_NEWCOMERS, MOST_IDLE, MOST_NATIVE)
        )
        self._unfinished = Unfinished(MOST_UNFINISHED[0] + MOST_UNFINISHED[1] * ranks, FRAME_TIMEOUT)
        self._listener, self._loop, self._errors = listener, asyncio.new_event_loop(), _ErrorLog()
        self._loop.set_exception_handler(self._errors)
        # Any thread adds, one step of a deque at a time; two that wake the loop at the same time do so once too often.
        self._due: deque[Callable[[], None]] = deque()
        self._is_woken = False
        with contextlib.ExitStack() as undo:
            undo.callback(self._loop.close)
            make = partial(_Newcomer, self._loop, self._watch_end, self._greet)
            made = self._loop.create_server(make, sock=listener, backlog=ACCEPTED_AT_ONCE)
            self._server = self._loop.run_until_complete(made)
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
            return len(said) >= GREETING_SIZE and self._welcome(transport, said, on_end)
        if said.startswith(HTTP2):
            if not self._serves_native:
                self._refuse_native(transport)
                return False
            self._newcomers.forget(transport)
            self._natives.note(transport)
            end = SpliceEnd(on_end, partial(self._natives.note, transport))
            transport.set_protocol(end)
            end.connection_made(transport)
            task = self._loop.create_task(self._join_native(end, said))
            end.tasks.add(task)
            task.add_done_callback(end.tasks.discard)
            return True
        if not (HELLO.startswith(said) or HTTP2.startswith(said)):
            self._note_refused("its protocol is neither torchft's nor ftcoord's")
            transport.abort()
        return False

    def _welcome(self, transport: asyncio.Transport, said: bytes, on_end: Callable[[], None]) -> bool:
        if not hmac.compare_digest(said[:GREETING_SIZE], self._greeting):
            self._note_refused("it did not show this manager's token")
            transport.write(WRONG_TOKEN)
            transport.close()
            return False
        self._newcomers.forget(transport)
        self._idle.note(transport)
        transport.write(WELCOME)
        rank = RankConnection(
            self._group, transport, self._call_soon, self._askers.ask, on_end, self._idle, self._unfinished
        )
        transport.set_protocol(rank)
        rank.data_received(said[GREETING_SIZE:])
        return True

    def _note_refused(self, why: str) -> None:
        """Log it; at DEBUG from the second time on, or a stranger could fill the log of a training process."""
        log.log(logging.DEBUG if why in self._refusals else logging.INFO, "a connection was closed: %s", why)
        self._refusals.add(why)

    def _refuse_native(self, transport: asyncio.Transport) -> None:
        transport.abort()
        if not self._has_refused_native:
            self._has_refused_native = True
            log.warning(
                "a connection of torchft's own classes was closed: a manager of ftcoord serves them only if the job's"
                " address has native=1, and then serves everyone who reaches its port"
            )

    async def _join_native(self, rank: SpliceEnd, said: bytes) -> None:
        """Connect a native rank to the gRPC server. Bytes that it sends meanwhile wait."""
        assert rank.transport is not None
        try:
            service = await self._native.connect(self._loop, lambda: SpliceEnd(lambda: None))
        except OSError as error:
            self._errors.note("a native rank was not served", error)
            rank.transport.abort()
            return
        rank.join(service, said)

    def _watch_end(self, transport: asyncio.Transport) -> Callable[[], None]:
        """Note a new connection; returns the function to call when it ends."""
        self._open.add(transport)
        self._newcomers.note(transport)
        descriptor = transport.get_extra_info("socket").fileno()
        fork.hide(descriptor)

        def ended() -> None:
            fork.unhide(descriptor)
            self._open.discard(transport)
            for crowd in (self._newcomers, self._idle, self._natives):
                crowd.forget(transport)

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
        self.note(f"a connection of a rank failed: {text}", error)

    def note(self, text: str, error: OSError) -> None:
        """Log an error of the system, unless the same was logged a short time ago."""
        now = concurrency.now()
        if now - self._said.get(text, -math.inf) >= REPEAT_INTERVAL:
            self._said[text] = now
            log.error("%s: %s. The manager goes on without it", text, error)
