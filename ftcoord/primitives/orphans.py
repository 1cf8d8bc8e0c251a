"""Ends the processes that a dead one has left behind: all that inherited its mark in their environment.

A program may overwrite the memory that `/proc` shows as its environment, as `setproctitle` does. And a process that is
forked from another one, and starts no program, shows the environment of that one. Both are ended if the dead process
had told of them, as its workers, or if their parent is one to end.
"""

from __future__ import annotations

import errno
import os
import select
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from ftcoord import concurrency, pidfd
from ftcoord.primitives.watched_process import kin_of

MARK: Final = "FTCOORD_ORPHAN_OF"
"""The variable that holds the mark. To let a process live on, start it without, and so that it shows the others, also
if it calls `setproctitle`: `env -u FTCOORD_ORPHAN_OF SPT_NOENV=1 ...`."""
GRACE: Final = 5.0
"""Seconds between SIGTERM and SIGKILL."""
_LOOK_INTERVAL: Final = 0.5
"""The most seconds between two looks."""
_WRITTEN_OVER: Final = b"\0\0"
"""The end of an environment that its program has overwritten: no variable is empty. An empty environment has no memory
that could be overwritten."""
_NO_PIDFDS: Final = frozenset({errno.ENOSYS, errno.EPERM, errno.EACCES})
"""The errors of `pidfd_open` if the kernel has no pidfds, or forbids them (a seccomp filter)."""
_NO_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""The errors of anything that opens a file while this process, or the machine, has too many open."""


class ProcessId(NamedTuple):
    """A pid, when its process was started, and where the stack of its program begins: see `watched_process.Kin`."""

    pid: int
    born: int
    stack: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """None if there is no such process."""
        kin = kin_of(pid)
        return None if kin is None else cls(pid, kin.born, kin.stack)


class Orphans:
    """All processes of this machine with a mark, which `look` ends: SIGTERM, then SIGKILL for those that still run
    after `grace` seconds. None if the mark is empty. Not thread-safe; use it in a `with` statement.

    A pidfd is opened for each before its mark is read, so a reused pid is never mistaken. Without pidfds the mark is
    read again before each signal. A process whose environment this user may not read is left alone, and so is this
    process.

    Args:
        mark: of the processes to end.
        workers: processes to end though they may not show the mark, unless they have become other programs since.
        grace: seconds from SIGTERM to SIGKILL.
    """

    def __init__(self, mark: str, workers: Iterable[ProcessId] = (), grace: float = GRACE) -> None:
        self._mark, self._deadline = mark, concurrency.now() + grace  # never change
        self._known = {(one.pid, one.born): one.stack for one in workers}
        """Those to end though they may not show the mark, with the stack of each."""
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
        for pid, orphan in [*self._told.items()]:
            if not orphan.runs():
                orphan.close()
                del self._told[pid]

    def _tell_new(self) -> bool:
        """Send SIGTERM to new ones; False if there were too few descriptors to see all of them.

        Reads first who started whom: the kernel forgets that when a parent ends.
        """
        if not self._mark:
            return True
        try:
            seen = {pid: one for pid in _pids() if (one := _seen(pid, self._mark)) is not None}
            for pid in _to_end(seen, self._known):
                one = seen[pid]
                self._known[pid, one.born] = one.stack
                if pid not in self._told:
                    self._tell(pid, one)
        except OSError as error:
            if error.errno not in _NO_DESCRIPTORS:
                raise
            return False
        return True

    def _tell(self, pid: int, seen: _Seen) -> None:
        """Raises OSError if no descriptor can be opened."""
        try:
            orphan = _Orphan(pid, self._mark, seen)
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:
                raise
            return  # it has ended, or is another user's
        if orphan.is_it():  # its number was not given to another one before there was a pidfd
            self._told[pid] = orphan
            orphan.send(signal.SIGTERM)
        else:
            orphan.close()

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
    return _variables(_memory_of(pid))


class _Seen(NamedTuple):
    """A process: whether it shows the mark, or hides its environment; when it was started, and by which parent; and the
    stack of its program."""

    shows: bool
    hides: bool
    born: int
    parent: int
    stack: int

    def may_be(self, stack: int | None) -> bool:
        """Whether it may still run the program that had this stack; None for no program."""
        return stack is not None and (self.hides or (self.stack == stack and stack != 0))


def _seen(pid: int, mark: str) -> _Seen | None:
    """None if it has ended, or is another user's. Raises OSError if no descriptor can be opened."""
    try:
        memory = _memory_of(pid)
    except OSError as error:
        if error.errno in _NO_DESCRIPTORS:
            raise
        return None  # it has ended, or is another user's
    kin = kin_of(pid)
    if kin is None:
        return None
    return _Seen(_variables(memory).get(MARK) == mark, memory.endswith(_WRITTEN_OVER), *kin)


def _memory_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def _variables(memory: bytes) -> dict[str, str]:
    return dict(os.fsdecode(one).partition("=")[::2] for one in memory.split(b"\0"))


def _pids() -> Iterator[int]:
    """All but this process."""
    return (int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid())


def _to_end(seen: Mapping[int, _Seen], known: Mapping[tuple[int, int], int]) -> set[int]:
    """Those that show the mark or are known, and what they have forked that starts no program or hides its
    environment."""
    found = {pid for pid, one in seen.items() if one.shows or one.may_be(known.get((pid, one.born)))}
    left = {pid: one for pid, one in seen.items() if pid not in found}
    while new := {pid for pid, one in left.items() if one.parent in found and one.may_be(seen[one.parent].stack)}:
        found |= new
        left = {pid: one for pid, one in left.items() if pid not in new}
    return found


class _Orphan:
    """A process that may be one of those to end. Raises OSError if it has ended."""

    def __init__(self, pid: int, mark: str, seen: _Seen) -> None:
        self._pid, self._mark, self._seen = pid, mark, seen
        try:
            self.pidfd: int | None = pidfd.open_pidfd(pid)
        except OSError as error:
            if error.errno not in _NO_PIDFDS:
                raise
            self.pidfd = None

    def is_it(self) -> bool:
        """Whether it is still the one that was seen, and has become no program that was started without the mark."""
        now = _seen(self._pid, self._mark)
        return now is not None and now.born == self._seen.born and (now.shows or now.may_be(self._seen.stack))

    def runs(self) -> bool:
        if self.pidfd is None:
            return self.is_it()  # who has ended has no environment
        return not pidfd.has_ended(self.pidfd)

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):  # it has ended, or has become another user's
            if self.pidfd is not None:
                pidfd.send(self.pidfd, number)
            elif self.is_it():
                os.kill(self._pid, number)

    def close(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
