"""Ends the processes that a dead one has left behind: all that inherited its mark in their environment."""

from __future__ import annotations

import errno
import os
import select
import signal
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path
from typing import Final

from ftcoord import concurrency, pidfd

MARK: Final = "FTCOORD_ORPHAN_OF"
"""The variable that holds the mark. To let a process live on, start it without: `env -u FTCOORD_ORPHAN_OF ...`."""
GRACE: Final = 5.0
"""Seconds between SIGTERM and SIGKILL."""
_LOOK_INTERVAL: Final = 0.5
"""The most seconds between two looks."""
_NO_PIDFDS: Final = frozenset({errno.ENOSYS, errno.EPERM, errno.EACCES})
"""The errors of `pidfd_open` if the kernel has no pidfds, or forbids them (a seccomp filter)."""
_NO_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""The errors of anything that opens a file while this process, or the machine, has too many open."""


class Orphans:
    """All processes of this machine with a mark, which `look` ends: SIGTERM, then SIGKILL for those that still run
    after `grace` seconds. None if the mark is empty. Not thread-safe; use it in a `with` statement.

    A pidfd is opened for each before its mark is read, so a reused pid is never mistaken. Without pidfds the mark is
    read again before each signal. A process whose environment this user may not read is left alone, and so is this
    process.
    """

    def __init__(self, mark: str, grace: float = GRACE) -> None:
        self._mark, self._deadline = mark, concurrency.now() + grace  # never change
        self._told: dict[int, _Orphan] = {}  # by pid
        self._running: list[_Orphan] = []
        self._were_killed = False

    def __enter__(self) -> Orphans:
        return self

    def __exit__(self, *_: object) -> None:
        for orphan in self._told.values():
            orphan.close()

    def look(self) -> bool:
        """Send the signals that are due; returns whether another look is needed."""
        is_late = concurrency.now() >= self._deadline
        self._forget_ended()
        before = {*self._told}
        has_seen_all = self._tell_new()
        new = self._told.keys() - before
        self._running = [orphan for orphan in self._told.values() if orphan.runs()]
        if not self._running and (has_seen_all or (is_late and not new)):
            return False
        if self._were_killed and not new:  # who does not end then hangs in the kernel
            return False
        if is_late:
            self._were_killed = True
            for orphan in self._running:
                orphan.send(signal.SIGKILL)
        return True

    def _forget_ended(self) -> None:
        """Their descriptors may be needed for others."""
        for orphan in [one for one in self._told.values() if not one.runs()]:
            orphan.close()
            del self._told[orphan.pid]

    def _tell_new(self) -> bool:
        """Send SIGTERM to new ones; False if there were too few descriptors to see all of them."""
        try:
            for orphan in _marked(self._mark, self._told.keys()) if self._mark else ():
                self._told[orphan.pid] = orphan
                orphan.send(signal.SIGTERM)
        except OSError as error:
            if error.errno not in _NO_DESCRIPTORS:
                raise
            return False
        return True

    def wait(self) -> None:
        """Wait until one of them has ended, but not for long: they may have started others meanwhile."""
        waits = select.poll()
        for orphan in self._running:
            if orphan.pidfd is not None:
                waits.register(orphan.pidfd, select.POLLIN)
        waits.poll(1000 * _LOOK_INTERVAL)


def bears(pid: int, mark: str) -> bool:
    """Whether a process has this mark. Raises OSError if it has ended, or is another user's."""
    return environment_of(pid).get(MARK) == mark


def environment_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty once it has ended. Raises OSError if it is gone, or
    another user's."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(os.fsdecode(one).partition("=")[::2] for one in variables)


class _Orphan:
    """A process that may have the mark. Raises OSError if it has ended."""

    def __init__(self, pid: int, mark: str) -> None:
        self.pid, self._mark = pid, mark
        try:
            self.pidfd: int | None = pidfd.open_pidfd(pid)
        except OSError as error:
            if error.errno not in _NO_PIDFDS:
                raise
            self.pidfd = None

    def bears_it(self) -> bool:
        try:
            return bears(self.pid, self._mark)
        except OSError:  # it has ended, or is another user's
            return False

    def runs(self) -> bool:
        if self.pidfd is None:
            return self.bears_it()  # who has ended has no environment
        return not pidfd.has_ended(self.pidfd)

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):  # it has ended, or has become another user's
            if self.pidfd is not None:
                pidfd.send(self.pidfd, number)
            elif self.bears_it():
                os.kill(self.pid, number)

    def close(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)


def _marked(mark: str, known: Set[int]) -> Iterator[_Orphan]:
    """Marked processes that are not known yet. Raises OSError if no descriptor can be opened."""
    for name in os.listdir("/proc"):
        if not name.isdecimal() or (pid := int(name)) in known or pid == os.getpid():
            continue
        try:
            if not bears(pid, mark):
                continue
            orphan = _Orphan(pid, mark)
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:
                raise
            continue  # it has ended, or is another user's
        if orphan.bears_it():  # its number was not given to another one before there was a pidfd
            yield orphan
        else:
            orphan.close()
