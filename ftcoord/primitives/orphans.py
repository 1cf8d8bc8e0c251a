"""The processes that an agent leaves behind: it marks those that it starts, and its sentinel ends them when the agent
has ended, whatever its exit. torchrun starts workers in sessions of their own, so nothing else ends them.

The mark is a variable of the environment, which processes inherit. No other process is ever touched: neither a worker
of another agent, nor a process that a user starts by hand.
"""

from __future__ import annotations

import os
import signal
import uuid
from typing import Final

from ftcoord import concurrency
from ftcoord.proc import NO_DESCRIPTORS, environment_of, processes, send_if

MARK: Final = "FTCOORD_ORPHAN_OF"
"""The variable that holds the mark. To let a process live on, start it without: `env -u FTCOORD_ORPHAN_OF ...`."""
GRACE: Final = 5.0
"""Seconds between SIGTERM and SIGKILL."""


class _OwnMark:
    """The mark of this process. A process has one environment, so it has one mark, however many handlers it has; a
    forked child gets another one. Thread-safe."""

    def __init__(self) -> None:
        self.text = f"{os.getpid()}-{uuid.uuid4().hex}"  # never changes
        self._lock = concurrency.lock("_OwnMark._lock")  # guards all below, and the variable in the environment
        self._holders = 0
        self._outer: str | None = None  # of the agent that this process is a worker of

    def hold(self) -> None:
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self._outer = os.environ.get(MARK)
                os.environ[MARK] = self.text

    def let_go(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders:
                os.environ.pop(MARK, None)
                if self._outer is not None:
                    os.environ[MARK] = self._outer


class MarkedChildren:
    """While this is open, all processes that this process starts carry `mark`."""

    def __init__(self) -> None:
        self._own, self._pid = concurrency.of_process(_OwnMark), os.getpid()
        self._is_open = True
        self.mark = self._own.text
        self._own.hold()

    def close(self) -> None:
        """Processes started from now on carry no mark, unless other handlers need it. Idempotent; does nothing in a
        forked child."""
        if os.getpid() == self._pid and self._is_open:
            self._is_open = False
            self._own.let_go()


def bears(pid: int, mark: str) -> bool:
    """Whether a process has this mark. Raises OSError if it has ended, or is another user's."""
    return environment_of(pid).get(MARK) == mark


class Orphans:
    """All processes of this machine with a mark, which `look` ends: SIGTERM, then SIGKILL for those that still run
    after `grace` seconds. None if the mark is empty. Not thread-safe.

    A reused pid is never mistaken (`send_if`), and one free descriptor is enough for any number of processes. A process
    whose environment this user may not read is left alone, and so is this process.
    """

    def __init__(self, mark: str, grace: float = GRACE) -> None:
        self._mark, self._deadline = mark, concurrency.now() + grace  # never change
        self._signalled: dict[int, set[int]] = {signal.SIGTERM: set(), signal.SIGKILL: set()}  # pids, by signal
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
        before, were_none = self._signalled[number], self._were_none
        try:
            found = {pid for pid in processes() if self._end(pid, 0 if pid in before else number)}
        except OSError as error:
            if error.errno not in NO_DESCRIPTORS:
                raise
            return not is_late
        self._were_none = not found
        if is_late and found <= before:  # who does not end by SIGKILL hangs in the kernel
            return False
        self._signalled[number] = before | found
        return bool(found) or not were_none

    def _end(self, pid: int, number: int) -> bool:
        """Whether a process has the mark; it gets the signal then. Raises OSError if no descriptor can be opened."""
        try:
            return pid != os.getpid() and send_if(pid, number, lambda: bears(pid, self._mark))
        except OSError as error:  # it has ended, or is another user's
            if error.errno in NO_DESCRIPTORS:
                raise
            return False
