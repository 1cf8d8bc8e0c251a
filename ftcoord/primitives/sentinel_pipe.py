"""What a process tells its sentinel through: without waiting, and without harm if nobody reads."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Final

from ftcoord import concurrency
from ftcoord.fork import hide, unhide

HANGS_AFTER: Final = 10.0
"""Seconds for which a process may read nothing of what it is told."""
LARGE: Final = 1 << 20
"""Bytes that may wait for the reader, as far as the system allows: what is told of some thousand leases."""
_NO_HARM: Final[int] = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)
"""Where nobody reads any longer a write sends SIGPIPE: that ends a program which does not ignore it, as Python does."""


class SentinelPipe:
    """Two sockets, of which the reader's is given away by `give_reader`. Raises OSError where there are none.

    A forked child loses its copy. For one thread at a time.
    """

    def __init__(self) -> None:
        ours, reader = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGE)
        # As plain numbers: an object would close its number also when that means a file of somebody else.
        self._ours, self._reader = ours.detach(), reader.detach()  # never change
        hide(self._ours)
        self._identity = _identity(self._ours)  # never changes
        self._unsent, self._sent_at = b"", concurrency.now()

    @property
    def reader(self) -> int:
        """The descriptor to read from, until `close_reader`."""
        return self._reader

    def close_reader(self) -> None:
        """In this process; once. Others that have it can read on."""
        os.close(self._reader)

    def tell(self, text: bytes) -> None:
        """Without waiting: what there is no room for goes with what is told next.

        Raises OSError when nobody can read any longer, or nothing was read for long, and when others have closed this.
        """
        if not self._is_ours():
            raise OSError("somebody has closed a file that is not his: the pipe to the sentinel")
        self._unsent += text
        with suppress(BlockingIOError):
            self._unsent = self._unsent[self._send(self._unsent) :]
            self._sent_at = concurrency.now()
        if self._unsent and concurrency.now() > self._sent_at + HANGS_AFTER:
            raise TimeoutError("it does not read what it is told")

    def close(self) -> None:
        """Once; this end of it. A file of somebody else that has its number now stays open."""
        unhide(self._ours)
        if self._is_ours():
            os.close(self._ours)

    def _is_ours(self) -> bool:
        return _identity(self._ours) == self._identity

    def _send(self, data: bytes) -> int:
        """How many bytes there was room for."""
        borrowed = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=self._ours)
        try:
            return borrowed.send(data, _NO_HARM)
        finally:
            borrowed.detach()


def _identity(descriptor: int) -> tuple[int, int] | None:
    """Which file it stands for; None for none."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino
