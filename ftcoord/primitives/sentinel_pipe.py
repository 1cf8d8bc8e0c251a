"""The pipe from a process to its sentinel: writes neither wait, nor do harm if nobody reads."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
from contextlib import suppress
from typing import Final

from ftcoord import concurrency
from ftcoord.fork import hide, identity_of, unhide

HANGS_AFTER: Final = 30.0
"""Seconds without a read after which the reader counts as hung. Starting takes as long on an overloaded machine."""
LARGE: Final = 1 << 20
"""Bytes that may wait for the reader, if the system allows it: the orders for several thousand leases."""
_NO_HARM: Final[int] = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)
"""If nobody reads any more, a write would send SIGPIPE, which ends a program that does not ignore it; Python does."""
_INT: Final = struct.Struct("i")


class SentinelPipe:
    """Two sockets; another process reads one of them. Raises OSError if they cannot be made.

    A forked child loses its copy. Not thread-safe.
    """

    def __init__(self) -> None:
        ours, reader = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGE)
        # As plain numbers: an object would close its number also when that means a file of somebody else.
        self._ours, self._reader = ours.detach(), reader.detach()  # never change
        hide(self._ours)
        self._identity = identity_of(self._ours)  # never changes
        self._unsent, self._left = b"", 0  # what there was no room for, and what nobody had read when it was told last
        self._hangs_since: float | None = None  # when it was first seen that nothing was read

    @property
    def reader(self) -> int:
        """The descriptor to read from, until `close_reader`."""
        return self._reader

    def close_reader(self) -> None:
        """Close the reading end in this process. Call it once. Other processes that have it can still read."""
        os.close(self._reader)

    def tell(self, text: bytes) -> None:
        """Write without waiting; text for which there is no room goes with the next write.

        Raises OSError when nobody can read any more, and when others have closed this. Raises TimeoutError when nothing
        was read for `HANGS_AFTER` seconds, as seen by a write: a rare writer notices it late.
        """
        if not self._is_ours():
            raise OSError("somebody has closed a file that is not his: the pipe to the sentinel")
        self._see_what_was_read()
        self._unsent += text
        with suppress(BlockingIOError):
            self._unsent = self._unsent[self._send(self._unsent) :]
        self._left = self._unread()

    def _see_what_was_read(self) -> None:
        left = self._unread()
        if left == 0 or left < self._left:
            self._hangs_since = None
        elif self._hangs_since is None:  # it counts from here: this process may have been stopped, and the reader too
            self._hangs_since = concurrency.now()
        elif concurrency.now() > self._hangs_since + HANGS_AFTER:
            raise TimeoutError("it does not read what it is told")

    def _unread(self) -> int:
        """How many bytes were written and not read: at least as many, and 0 only for none. Where the kernel does not
        say, the bytes for which there was no room."""
        with suppress(OSError):
            (sent,) = _INT.unpack(fcntl.ioctl(self._ours, termios.TIOCOUTQ, bytes(_INT.size)))
            return int(sent) + len(self._unsent)
        return len(self._unsent)

    def close(self) -> None:
        """Close the writing end. Call it once. Another file that has got its descriptor stays open."""
        unhide(self._ours)
        if self._is_ours():
            os.close(self._ours)

    def _is_ours(self) -> bool:
        return identity_of(self._ours) == self._identity

    def _send(self, data: bytes) -> int:
        """How many bytes there was room for."""
        borrowed = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=self._ours)
        try:
            return borrowed.send(data, _NO_HARM)
        finally:
            borrowed.detach()
