"""What Linux reports about another process: that it ended and how, whether it runs, and whether memory ran out.

A pidfd reports the end without polling (https://man7.org/linux/man-pages/man2/pidfd_open.2.html). It stands for one
process forever, even if its pid is reused.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from ftcoord import concurrency
from ftcoord.pidfd import has_ended as pidfd_has_ended
from ftcoord.pidfd import open_pidfd

_GET_INFO: Final = 0xC040FF0B
"""PIDFD_GET_INFO, the request of `ioctl` for a `struct pidfd_info` of 64 bytes (Linux 6.13, <linux/pidfd.h>)."""
_INFO: Final = struct.Struct("=Q52xi")
"""The fields of it: the mask of what is asked for, or was answered, and the exit status."""
_WITH_EXIT: Final = 1 << 3
"""PIDFD_INFO_EXIT in that mask (Linux 6.15). It is answered once the process has been reaped."""
_STATE, _PARENT, _FLAGS, _STARTED, _STACK, _ENVIRONMENT, _EXIT_STATUS = 0, 1, 6, 19, 25, 47, 49
"""Fields of /proc/PID/stat, after the name of the program."""
_DOES_NOT_RUN: Final = frozenset("TtZXx")
"""States in it: stopped, traced, zombie, dead."""
_IS_DEAD: Final = frozenset("ZXx")
_EXITING: Final = 0x4
"""PF_EXITING in the flags there (<linux/sched.h>)."""
_KILLED: Final = 1 << signal.SIGKILL - 1
"""SIGKILL among the pending signals of /proc/PID/status: nobody can block, ignore or take back that one."""
_PROC: Final = "/proc"
_GROUPS: Final = "/sys/fs/cgroup"
RECENT: Final = 5.0
"""Seconds: a process that the kernel kills for lack of memory ends within this time, if it has reported nothing
meanwhile."""
_LOOK_AGAIN: Final = 0.01
"""Seconds between two checks without a pidfd."""
_LOWEST: Final = 3
"""The lowest descriptor that is no standard stream, even if this process has closed those."""
_V1, _V2 = ("memory", "memory.oom_control"), ("", "memory.events")
"""The controller that /proc/PID/cgroup names, and the file that counts kills there, with either version."""


class WatchedProcess:
    """This process's parent, which may have ended already.

    Args:
        pid: its pid.
        pidfd: a pidfd of it, which this process has inherited: readable when it has ended. None without pidfds.
    """

    def __init__(self, pid: int, pidfd: int | None) -> None:
        self.pid, self.pidfd = pid, pidfd
        mine = _stat(os.getpid())
        self._born = int(mine[_STARTED]) if mine is not None else None
        self._stack = self._stack_now()
        self._oom_kills = oom_kills(pid)

    def runs(self) -> bool:
        """Whether it exists and is not stopped. Without /proc, only whether it exists."""
        if os.getppid() != self.pid:  # somebody else may have its number
            return False
        fields = self._own_stat()
        return fields is None or fields[_STATE] not in _DOES_NOT_RUN

    def has_ended(self, timeout: float = 0) -> bool:
        """Whether it has ended, or does within `timeout` seconds."""
        if self.pidfd is not None:
            return pidfd_has_ended(self.pidfd, timeout)
        deadline = concurrency.now() + timeout
        while os.getppid() == self.pid:
            if concurrency.now() >= deadline:
                return False
            concurrency.sleep(_LOOK_AGAIN)
        return True

    def is_ending(self) -> bool:
        """Whether it never returns to its program, though it has not ended yet: it dumps core, frees gigabytes, or was
        killed while it hangs in a driver. That may take minutes. False without /proc."""
        return self._own_stat() is not None and _is_doomed(self.pid)

    def know_program(self, stack: int) -> None:
        """Its program is the one whose stack begins there: the stack that this has found may be the next program's."""
        self._stack = stack or self._stack

    def is_another_program(self) -> bool:
        """Whether it has become another program by `exec` since this was made.

        Each program has its stack at a random address. False if addresses are not random, or another user's process
        hides it.
        """
        now = self._stack_now()
        return bool(self._stack and now) and now != self._stack

    def status(self) -> int | None:
        """Its status, as `os.wait` returns it; None if it is unknown. For a process that has ended, or is ending.

        /proc has it until the parent has reaped it; afterwards its pidfd does, on a kernel of 2025 or later.
        """
        told = self._told_by_pidfd()
        if told is None and (fields := self._own_stat()) is not None:
            told = _status_in(self.pid, fields)
        return self._told_by_pidfd() if told is None else told  # it may have been waited for in between

    def told(self) -> None:
        """Note that it has just reported something: an earlier OOM kill was not of this process."""
        if self._oom_kills is not None:
            self._oom_kills.note()

    def was_oom(self) -> bool:
        """Whether the kernel has killed a process of its control group for lack of memory, shortly before this one's
        last report, or since. For a process that was killed."""
        return self._oom_kills is not None and self._oom_kills.grew()

    def cause(self, fate: str = "") -> str:
        """One line: which process it was, and how it ended, unless `fate` says it. For a process that has ended."""
        return f"{socket.gethostname()} (pid {self.pid}) {fate or fate_of(self.status(), self.was_oom())}"

    def _own_stat(self) -> list[str] | None:
        """The process in /proc; None if there is none, or it is another process with the same pid: that one is younger
        than this process, and a parent is not."""
        fields = _stat(self.pid)
        is_older = fields is not None and self._born is not None and int(fields[_STARTED]) <= self._born
        return fields if is_older else None

    def _stack_now(self) -> int:
        return _stack_in(self._own_stat())

    def _told_by_pidfd(self) -> int | None:
        return None if self.pidfd is None else status_after_wait(self.pidfd)


def own_stack() -> int:
    """Where the stack of this process's program begins; 0 if that is unknown."""
    return _stack_in(_stat(os.getpid()))


def own_pidfd() -> int | None:
    """A pidfd of this process, to be inherited; None without pidfds (Linux before 5.3, gVisor)."""
    try:
        descriptor = open_pidfd(os.getpid())
        if descriptor >= _LOWEST:
            return descriptor
        try:  # where a child's standard streams will be
            return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _LOWEST)
        finally:
            os.close(descriptor)
    except OSError:
        return None


def status_after_wait(pidfd: int) -> int | None:
    """The status of a process that was reaped, as `os.wait` returns it. None before, and on older kernels."""
    info = bytearray(64)
    _INFO.pack_into(info, 0, _WITH_EXIT, 0)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:  # the kernel is older
        return None
    mask, status = _INFO.unpack_from(info)
    return int(status) if mask & _WITH_EXIT else None


def fate_of(status: int | None, was_oom: bool = False) -> str:
    """How a process ended, in words.

    Args:
        status: its status, as `os.wait` returns it; None if it is unknown.
        was_oom: the kernel killed a process of its control group for lack of memory while it lived.
    """
    if status is None:
        return "ended, and nobody could tell how"
    number = status & 0x7F
    if number == signal.SIGKILL and was_oom:
        return "was killed by the kernel, since its control group had no memory left (OOM)"
    if number:
        return f"was killed by signal {number} ({_name(number)})"
    return f"exited with code {status >> 8 & 0xFF}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"


def own_thread() -> Path:
    """This thread in /proc, for `children_of`. Raises OSError without /proc."""
    return Path(_PROC, os.readlink(Path(_PROC, "thread-self")))


def children_of(thread: Path) -> list[int]:
    """The children that a thread of this process has started. Linux lists children by thread, and a process may have
    hundreds of threads. Raises OSError if the kernel has no such list."""
    return [*map(int, (thread / "children").read_text(encoding="ascii").split())]


def parent_of(pid: int) -> int:
    """The parent of a process; 0 if there is none, or the process is gone."""
    fields = _stat(pid)
    return 0 if fields is None else int(fields[_PARENT])


def is_being_started(pid: int) -> bool:
    """Whether a process has no environment yet: the kernel lets its parent continue before it has set that up. Also
    true for another user's process."""
    fields = _stat(pid)
    return fields is not None and not _is_over(fields) and fields[_ENVIRONMENT] == "0"


def _stat(pid: int) -> list[str] | None:
    return _stat_in(Path(_PROC, str(pid)))


def _stat_in(directory: Path) -> list[str] | None:
    """The `stat` of a process or thread; None if it is gone."""
    try:
        text = (directory / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields if len(fields) > _EXIT_STATUS else None


def _stack_in(fields: list[str] | None) -> int:
    return 0 if fields is None else int(fields[_STACK])


def _is_over(fields: list[str] | None) -> bool:
    return fields is not None and (fields[_STATE] in _IS_DEAD or bool(int(fields[_FLAGS]) & _EXITING))


def _is_doomed(pid: int) -> bool:
    """Whether no thread of a process returns to its program.

    Its first thread alone does not show it: it may end while others run, or while another one starts a program.
    """
    try:
        told = _told_in(Path(_PROC, str(pid)))
        if told.get("CoreDumping") == "1" or _is_killed(told, "ShdPnd"):
            return True
        threads = [*Path(_PROC, str(pid), "task").iterdir()]
        return bool(threads) and all(map(_is_thread_doomed, threads))
    except OSError:  # it has ended just now, which its pidfd says
        return False


def _is_thread_doomed(directory: Path) -> bool:
    """Whether a thread never returns to its program. Raises OSError if it is gone."""
    return _is_over(_stat_in(directory)) or _is_killed(_told_in(directory), "SigPnd")


def _is_killed(told: Mapping[str, str], pending: str) -> bool:
    return bool(int(told.get(pending, "0"), 16) & _KILLED)


def _told_in(directory: Path) -> dict[str, str]:
    """The fields of its `status`, by name. Raises OSError if it is gone."""
    lines = (directory / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    return {name: text.strip() for name, _, text in (line.partition(":") for line in lines)}


def _status_in(pid: int, fields: list[str]) -> int | None:
    """The status of a process with this `stat`, as `os.wait` returns it; None if it is unknown, or the process is
    alive.

    For a process that is only about to end, kernels before 5.17 have 0 there.
    """
    status = int(fields[_EXIT_STATUS])
    if _is_over(fields) or (status and _is_doomed(pid)):
        return status
    with suppress(OSError):
        if _is_killed(_told_in(Path(_PROC, str(pid))), "ShdPnd"):
            return signal.SIGKILL
    return None


class OomKills:
    """How often the kernel has killed a process of a control group for lack of memory.

    Args:
        events: the file with the counter.
        count: the counter's value at the start.
    """

    def __init__(self, events: Path, count: int) -> None:
        self._events, self._before, self._last, self._noted_at = events, count, count, concurrency.now()

    def note(self) -> None:
        """Kills up to the last note but one no longer count, unless that is recent. A report that a process made just
        before it was killed may be read after the kill."""
        now = concurrency.now()
        if now >= self._noted_at + RECENT and (count := _count(self._events)) is not None:
            self._before, self._last, self._noted_at = self._last, count, now

    def grew(self) -> bool:
        """Whether there were any kills that count."""
        now = _count(self._events)
        return now is not None and now > self._before


def oom_kills(pid: int) -> OomKills | None:
    """The kills in the control group of a process; None if it has no counter."""
    for events in _groups(pid):
        if (count := _count(events)) is not None:
            return OomKills(events, count)
    return None


def _groups(pid: int) -> Iterator[Path]:
    """The files in which its control group may count them."""
    try:
        groups = Path(_PROC, str(pid), "cgroup").read_text(encoding="utf-8")
    except OSError:
        return
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller, file in (_V1, _V2):
            if controller in controllers.split(","):
                yield Path(_GROUPS, controller, path.lstrip("/"), file)
                yield Path(_GROUPS, controller, file)  # of a container: its path is the host's, its mount its own


def _count(events: Path) -> int | None:
    try:
        lines = events.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
