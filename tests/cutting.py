"""What stands between two ends of a connection, and cuts it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from types import TracebackType


class SpliceEnd(asyncio.Protocol):
    """One of the two connections. For the loop's thread.

    Args:
        on_lost: called when it has ended.
    """

    def __init__(self, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost
        self.transport: asyncio.Transport | None = None
        self._other: asyncio.Transport | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        """Its running tasks: the loop refers to its tasks weakly."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.pause_reading()  # until it is joined

    def join(self, other: SpliceEnd, early: bytes) -> None:
        """Start to forward; `early` was received here before."""
        assert self.transport is not None
        assert other.transport is not None
        if self.transport.is_closing():
            other.transport.abort()
            return
        self._other, other._other = other.transport, self.transport
        other.transport.write(early)
        for transport in (self.transport, other.transport):
            transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._other is not None:
            self._other.write(data)

    def pause_writing(self) -> None:
        if self._other is not None and not self._other.is_closing():
            self._other.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None and not self._other.is_closing():
            self._other.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost()
        if self._other is not None:
            self._other.close()  # which first sends what is left


class Cutter:
    """Passes connections on to a port of 127.0.0.1; context manager.

    `taken` is how many there were so far.
    """

    def __init__(self, port: int) -> None:
        self._to, self.port, self.taken = port, 0, 0
        self._open: set[asyncio.Transport] = set()  # only the loop's thread
        self._loop = asyncio.new_event_loop()

    def cut(self) -> None:
        """All that are open."""
        self._loop.call_soon_threadsafe(self._abort_all)

    def freeze(self) -> None:
        """Pass nothing on of what the callers of now send; their connections stay open."""
        self._loop.call_soon_threadsafe(lambda: [transport.pause_reading() for transport in self._open])

    def __enter__(self) -> Cutter:
        server = self._loop.run_until_complete(self._loop.create_server(lambda: _Caller(self), "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._run, args=(server,), name="cutter")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self, server: asyncio.Server) -> None:
        self._loop.run_forever()
        server.close()
        self._abort_all()
        for _ in range(2):  # one that is lost closes the one that it is joined to
            self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def _abort_all(self) -> None:
        for transport in self._open.copy():
            transport.abort()

    # -- on the loop's thread -------------------------------------------------------------------------------------

    def took(self, caller: SpliceEnd) -> None:
        assert caller.transport is not None
        self.taken += 1
        self._open.add(caller.transport)
        task = self._loop.create_task(self._join(caller))
        caller.tasks.add(task)
        task.add_done_callback(caller.tasks.discard)

    async def _join(self, caller: SpliceEnd) -> None:
        assert caller.transport is not None
        with contextlib.suppress(OSError):
            _, there = await self._loop.create_connection(lambda: SpliceEnd(lambda: None), "127.0.0.1", self._to)
            caller.join(there, b"")
            return
        caller.transport.abort()


class _Caller(SpliceEnd):
    def __init__(self, cutter: Cutter) -> None:
        super().__init__(self._forget)
        self._cutter = cutter

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._cutter.took(self)

    def _forget(self) -> None:
        if self.transport is not None:
            self._cutter._open.discard(self.transport)
