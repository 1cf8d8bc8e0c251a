"""Connections of one kind at a manager's port, so many at the most."""

from __future__ import annotations

import asyncio


class Crowd:
    """The one that was quiet for longest goes first when there are too many: else anyone who reaches the port could
    use up the process's file descriptors, of which it often has 1,024. For the loop's thread.

    Args:
        most: how many there may be.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._there: dict[asyncio.Transport, None] = {}  # the one that was quiet for longest first

    def note(self, transport: asyncio.Transport) -> None:
        """A connection has come, or has just done something."""
        self._there.pop(transport, None)
        self._there[transport] = None
        if len(self._there) > self._most:
            quiet = next(iter(self._there))
            del self._there[quiet]
            quiet.abort()

    def forget(self, transport: asyncio.Transport) -> None:
        """A connection has ended, or does not count for now."""
        self._there.pop(transport, None)


class Unfinished:
    """The connections that have sent a part of a call, with one budget for all of these bytes. For the loop's thread.

    Args:
        most: how many bytes there may be. Beyond that the connection that began first is closed.
        timeout: seconds that a call may take from its first byte to its last.
    """

    def __init__(self, most: int, timeout: float) -> None:
        self._most, self._timeout, self._bytes = most, timeout, 0
        self._there: dict[asyncio.Transport, tuple[int, asyncio.TimerHandle]] = {}  # the one that began first first

    def note(self, transport: asyncio.Transport, size: int) -> None:
        """So many bytes of a connection's call are there; 0 when it is complete, or the connection has ended."""
        before, timer = self._there.get(transport, (0, None))
        self._bytes += size - before
        if not size:
            if timer is not None:
                del self._there[transport]
                timer.cancel()
            return
        if timer is None:
            timer = asyncio.get_running_loop().call_later(self._timeout, transport.abort)
        self._there[transport] = size, timer
        if self._bytes > self._most:
            first = next(iter(self._there))
            self.note(first, 0)
            first.abort()
