"""Ends the processes that a dead one has left behind: all that inherited its mark in their environment."""

from __future__ import annotations

import errno
import os
import select
import signal
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from ftcoord import concurrency, pidfd

MARK: Final = "FTCOORD_ORPHAN_OF"
"""The variable that holds the mark. Whoever runs on on purpose starts without it: `env -u FTCOORD_ORPHAN_OF ...`."""
GRACE: Final = 5.0
"""Seconds between SIGTERM and SIGKILL."""
_LOOK_INTERVAL: Final = 0.5
"""Seconds between two looks for more: those that are ended may have started others meanwhile."""
_NO_PIDFDS: Final = frozenset({errno.ENOSYS, errno.EPERM, errno.EACCES})
"""What `pidfd_open` fails with where the kernel has none, or nobody may use it (a seccomp filter)."""


def end_all_with(mark: str, grace: float = GRACE) -> int:
    """SIGTERM for all processes of this machine with that mark, and SIGKILL for those that run on after `grace`
    seconds; how many there were.

    A pidfd stands for each before its mark is read, so a number that was given again means nobody else. Where there are
    none the mark is read again before each signal. A process whose environment this user may not read is left alone,
    and so is this one.
    """
    deadline, killed = concurrency.now() + grace, False
    with ExitStack() as descriptors:
        told: dict[int, _Orphan] = {}  # by pid
        while True:
            new = list(_marked(mark, told.keys()))
            for orphan in new:
                descriptors.callback(orphan.close)
                told[orphan.pid] = orphan
                orphan.send(signal.SIGTERM)
            running = [orphan for orphan in told.values() if orphan.runs()]
            if not running or (killed and not new):  # who does not end though it was killed hangs in the kernel
                return len(told)
            killed = concurrency.now() >= deadline
            if killed:
                for orphan in running:
                    orphan.send(signal.SIGKILL)
            _await_one(running)


def bears(pid: int, mark: str) -> bool:
    """Whether a process has this mark. Raises OSError if it has ended, or is another user's."""
    return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


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
    """Those with the mark that are not known yet."""
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        if pid in known or pid == os.getpid():
            continue
        with suppress(OSError):
            orphan = _Orphan(pid, mark)
            if orphan.bears_it():
                yield orphan
            else:
                orphan.close()


def _await_one(running: Sequence[_Orphan]) -> None:
    """Until one of them has ended, but not for long."""
    waits = select.poll()
    for orphan in running:
        if orphan.pidfd is not None:
            waits.register(orphan.pidfd, select.POLLIN)
    waits.poll(1000 * _LOOK_INTERVAL)
