"""Joins two connections of an event loop: bytes from one go to the other, no faster than the other takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class SpliceEnd(asyncio.Protocol):
    """One of the two connections. For the loop's thread.

    Args:
        on_lost: called when it has ended.
        on_data: called when bytes have come.
    """

    def __init__(self, on_lost: Callable[[], None], on_data: Callable[[], None] = lambda: None) -> None:
        self._on_lost, self._on_data = on_lost, on_data
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
        self._on_data()
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
