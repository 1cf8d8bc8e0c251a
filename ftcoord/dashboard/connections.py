"""How many connections the page's server keeps, and how long it waits for a request, or for its answer to be read.

uvicorn limits neither: whoever connects and says nothing would take descriptors of this process until none are left. In
a gateway they are also those by which it serves its managers.
"""

from __future__ import annotations

import asyncio
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol

from ftcoord.dashboard.board import MOST_VIEWERS, SHARE

MOST_CONNECTIONS: Final = MOST_VIEWERS + 100
"""At a time. One that comes when there are as many is closed unheard."""
MOST_OF_ADDRESS: Final = MOST_CONNECTIONS // SHARE
"""Of them from one address: behind a proxy all viewers have one."""
UNREAD_TIMEOUT: Final = 30.0
"""Seconds that a peer may read so little that nothing more can be written to it."""
HEADERS_TIMEOUT: Final = 20.0
"""Seconds that a connection has for the headers of its next request, from its beginning or from the last answer."""


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
