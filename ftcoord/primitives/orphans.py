"""Ends the processes that a dead one has left behind: all that inherited its mark in their environment."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ftcoord import concurrency, pidfd

MARK: Final = "FTCOORD_ORPHAN_OF"
"""The variable that holds the mark. To let a process live on, start it without: `env -u FTCOORD_ORPHAN_OF ...`."""
GRACE: Final = 5.0
"""Seconds between SIGTERM and SIGKILL."""
_NO_PIDFDS: Final = frozenset({errno.ENOSYS, errno.EPERM, errno.EACCES})
"""The errors of `pidfd_open` if the kernel has no pidfds, or forbids them (a seccomp filter)."""
_NO_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""The errors of anything that opens a file while this process, or the machine, has too many open."""


class Orphans:
    """All processes of this machine with a mark, which `look` ends: SIGTERM, then SIGKILL for those that still run
    after `grace` seconds. None if the mark is empty. Not thread-safe.

    A pidfd is opened for each before its mark is read, and closed after the signal: a reused pid is never mistaken, and
    one free descriptor is enough for any number. A process whose environment this user may not read is left alone, and
    so is this process.
    """

    def __init__(self, mark: str, grace: float = GRACE) -> None:
        self._mark, self._deadline = mark, concurrency.now() + grace  # never change
        self._told: dict[signal.Signals, set[int]] = {signal.SIGTERM: set(), signal.SIGKILL: set()}  # pids, by signal
        self._were_none = False

    def look(self) -> bool:
        """Send the signals that are due; returns whether another look is needed, after a moment.

        Two looks in a row must find nobody: a child that the dead process was just starting shows the mark only once
        it runs its own program.
        """
        if not self._mark:
            return False
        is_late = concurrency.now() >= self._deadline
        number = signal.SIGKILL if is_late else signal.SIGTERM
        told, were_none = self._told[number], self._were_none
        try:
            found = set(self._end_marked(number, told))
        except OSError as error:
            if error.errno not in _NO_DESCRIPTORS:
                raise
            return not is_late
        self._were_none = not found
        if is_late and found <= told:  # who does not end by SIGKILL hangs in the kernel
            return False
        told |= found
        return bool(found) or not were_none

    def _end_marked(self, number: signal.Signals, told: set[int]) -> Iterator[int]:
        """Send the signal to the marked processes that have not got it; all marked ones that there are. Raises OSError
        if no descriptor can be opened."""
        for pid in [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]:
            try:
                if self._end(pid, None if pid in told else number):
                    yield pid
            except OSError as error:  # it has ended, or is another user's
                if error.errno in _NO_DESCRIPTORS:
                    raise

    def _end(self, pid: int, number: signal.Signals | None) -> bool:
        """Whether a process has the mark; it gets the signal then. Raises OSError if it has ended, or is another
        user's."""
        try:
            descriptor = pidfd.open_pidfd(pid)
        except OSError as error:
            if error.errno not in _NO_PIDFDS:
                raise
            if is_it := bears(pid, self._mark):
                os.kill(pid, number or 0)
            return is_it
        try:
            if (is_it := bears(pid, self._mark)) and number is not None:
                pidfd.send(descriptor, number)
            return is_it
        finally:
            os.close(descriptor)


def bears(pid: int, mark: str) -> bool:
    """Whether a process has this mark. Raises OSError if it has ended, or is another user's."""
    return environment_of(pid).get(MARK) == mark


def environment_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty once it has ended. Raises OSError if it is gone, or
    another user's."""
    memory = Path(f"/proc/{pid}/environ").read_bytes()
    return dict(os.fsdecode(one).partition("=")[::2] for one in memory.split(b"\0"))
