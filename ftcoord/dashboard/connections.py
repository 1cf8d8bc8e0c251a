"""How many connections the page's server keeps, and how long it waits for a request on one.

uvicorn limits neither: whoever connects and says nothing would take descriptors of this process until none are left. In
a gateway they are also those by which it serves its managers.
"""

from __future__ import annotations

import asyncio
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol

from ftcoord.dashboard.board import MOST_VIEWERS

MOST_CONNECTIONS: Final = MOST_VIEWERS + 100
"""At a time. One that comes when there are as many is closed unheard."""
HEADERS_TIMEOUT: Final = 20.0
"""Seconds that a connection has for the headers of its next request, from its beginning or from the last answer."""


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP, on a connection that ends when nothing is asked on it. For the thread of the event loop."""

    _silence: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_request()

    def _await_request(self) -> None:
        self._stop_waiting()
        self._silence = self.loop.call_later(HEADERS_TIMEOUT, self._end_if_silent)

    def _stop_waiting(self) -> None:
        if self._silence is not None:
            self._silence.cancel()

    def _end_if_silent(self) -> None:
        """uvicorn's own timer of idle connections ends with the first byte, though no request may follow."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()
