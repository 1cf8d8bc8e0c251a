"""What Linux reports about other processes: the one reader of /proc, and pidfds.

A pidfd stands for one process forever, even if its pid is reused, and reports its end without polling
(https://man7.org/linux/man-pages/man2/pidfd_open.2.html). These work also for a Python that was built without them.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import select
import signal
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from ftcoord import concurrency

P_PIDFD: Final = 3
"""For `os.waitid`, which accepts it even if `os` does not define it (<linux/wait.h>)."""
LONGEST_POLL: Final = 24 * 3600
"""Seconds: `poll` takes about 24 days at most, and a lease may have a longer TTL."""
RECENT: Final = 5.0
"""Seconds: a process that the kernel kills for lack of memory ends within this time, if it has reported nothing
meanwhile."""
NO_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""The errors of anything that opens a file while this process, or the machine, has too many open."""
_NO_PIDFDS: Final = frozenset({errno.ENOSYS, errno.EPERM, errno.EACCES})
"""The errors of `pidfd_open` if the kernel has no pidfds, or forbids them (a seccomp filter)."""
_OPEN, _SEND = 434, 424
"""The numbers of both system calls, which all kinds of processors share."""
_GET_INFO: Final = 0xC040FF0B
"""PIDFD_GET_INFO, the request of `ioctl` for a `struct pidfd_info` of 64 bytes (Linux 6.13, <linux/pidfd.h>)."""
_INFO: Final = struct.Struct("=Q52xi")
"""The fields of it: the mask of what is asked for, or was answered, and the exit status."""
_WITH_EXIT: Final = 1 << 3
"""PIDFD_INFO_EXIT in that mask (Linux 6.15). It is answered once the process has been reaped."""
_LOWEST: Final = 3
"""The lowest descriptor that is no standard stream, even if this process has closed those."""
_STATE, _FLAGS, _STARTED, _ENVIRONMENT, _EXIT_STATUS = 0, 6, 19, 47, 49
"""Fields of /proc/PID/stat, after the name of the program."""
_IS_DEAD: Final = frozenset("ZXx")
_EXITING: Final = 0x4
"""PF_EXITING in the flags there (<linux/sched.h>)."""
_KILLED: Final = 1 << signal.SIGKILL - 1
"""SIGKILL among the pending signals of /proc/PID/status: nobody can block, ignore or take back that one."""
PROC: Final = "/proc"
_GROUPS: Final = "/sys/fs/cgroup"
_V1, _V2 = ("memory", "memory.oom_control"), ("", "memory.events")
"""The controller that /proc/PID/cgroup names, and the file that counts kills there, with either version."""


# -- pidfds -----------------------------------------------------------------------------------------------------------


def open_pidfd(pid: int) -> int:
    """A pidfd, which no other program inherits. It is readable when the process has ended.

    Raises ProcessLookupError if no process has this pid, and OSError if there are no pidfds (Linux before 5.3, gVisor)
    or they are forbidden (a seccomp filter).
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _call(_OPEN, pid, 0)


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


def send(pidfd: int, number: int) -> None:
    """Send a signal. Raises ProcessLookupError if the process has ended, and OSError."""
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(pidfd, number)
    else:
        _call(_SEND, pidfd, number, 0, 0)


def send_if(pid: int, number: int, is_it: Callable[[], bool]) -> bool:
    """Send a signal to a process if `is_it()`, which is asked once the pid cannot mean another process any more; 0
    sends nothing. Returns what `is_it` answered. Without pidfds (see `open_pidfd`) the pid may be reused between the
    two.

    Raises OSError: ProcessLookupError if the process has ended, PermissionError if it is another user's.
    """
    try:
        descriptor = open_pidfd(pid)
    except OSError as error:
        if error.errno not in _NO_PIDFDS:
            raise
        if found := is_it():
            os.kill(pid, number)
        return found
    try:
        if (found := is_it()) and number:
            send(descriptor, number)
        return found
    finally:
        os.close(descriptor)


def has_ended(pidfd: int, timeout: float = 0) -> bool:
    """Whether its process has ended, or does within `timeout` seconds."""
    waits = select.poll()  # `select.select` takes no number from 1024 on, and a process may have more files than that
    waits.register(pidfd, select.POLLIN)
    while timeout > LONGEST_POLL:
        if waits.poll(1000 * LONGEST_POLL):
            return True
        timeout -= LONGEST_POLL
    return bool(waits.poll(math.ceil(1000 * timeout)))


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


def _call(number: int, *arguments: int) -> int:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    import ctypes  # takes memory, and nearly nobody needs it

    library = ctypes.CDLL(None, use_errno=True)
    result = int(library.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


# -- /proc ------------------------------------------------------------------------------------------------------------


class Stat(NamedTuple):
    """What /proc/PID/stat says of a process or thread.

    Args:
        state: one letter: `R` runs, `T` and `t` are stopped and traced, `Z`, `X` and `x` have ended.
        is_over: whether it never returns to its program.
        started: when it started, in clock ticks since boot.
        has_environment: whether its program has been set up.
        exit_status: as `os.wait` returns it; 0 while it runs, and where another user's process hides it.
    """

    state: str
    is_over: bool
    started: int
    has_environment: bool
    exit_status: int


def stat_of(pid: int) -> Stat | None:
    """None if there is no such process, or no /proc."""
    return _stat_in(Path(PROC, str(pid)))


def started(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none, or it has ended."""
    found = stat_of(pid)
    return None if found is None or found.state in _IS_DEAD else found.started


def is_being_started(pid: int) -> bool:
    """Whether a process has no environment yet: the kernel lets its parent continue before it has set that up. Also
    true for another user's process."""
    found = stat_of(pid)
    return found is not None and not found.is_over and not found.has_environment


def environment_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty once it has ended. Raises OSError if it is gone, or
    another user's."""
    memory = Path(PROC, str(pid), "environ").read_bytes()
    return dict(os.fsdecode(one).partition("=")[::2] for one in memory.split(b"\0"))


def processes() -> list[int]:
    """The pids of all processes. Raises OSError if no descriptor can be opened."""
    return [int(name) for name in os.listdir(PROC) if name.isdecimal()]


def own_thread() -> Path:
    """This thread in /proc, for `children_of`. Raises OSError without /proc."""
    return Path(PROC, os.readlink(Path(PROC, "thread-self")))


def children_of(thread: Path) -> list[int]:
    """The children that a thread of this process has started. Linux lists children by thread, and a process may have
    hundreds of threads. Raises OSError if the kernel has no such list."""
    return [*map(int, (thread / "children").read_text(encoding="ascii").split())]


def host_name() -> str:
    """Names this boot of the machine, and the namespaces of its pids and its monotonic clock: pids and times mean the
    same to all processes for which this is the same. Raises OSError without /proc."""
    boot = Path(PROC, "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return " ".join([boot, *(_namespace(kind) for kind in ("pid", "time"))])


def status_of(pid: int, stat: Stat) -> int | None:
    """The status of a process with this `stat`, as `os.wait` returns it; None if it is unknown, or the process is
    alive.

    For a process that is only about to end, kernels before 5.17 have 0 there.
    """
    if stat.is_over or (stat.exit_status and is_doomed(pid)):
        return stat.exit_status
    with suppress(OSError):
        if _is_killed(_fields_in(Path(PROC, str(pid))), "ShdPnd"):
            return signal.SIGKILL
    return None


def is_doomed(pid: int) -> bool:
    """Whether no thread of a process returns to its program.

    Its first thread alone does not show it: it may end while others run, or while another one starts a program.
    """
    try:
        fields = _fields_in(Path(PROC, str(pid)))
        if fields.get("CoreDumping") == "1" or _is_killed(fields, "ShdPnd"):
            return True
        threads = [*Path(PROC, str(pid), "task").iterdir()]
        return bool(threads) and all(map(_is_thread_doomed, threads))
    except OSError:  # it has ended just now, which its pidfd says
        return False


def _is_thread_doomed(directory: Path) -> bool:
    """Whether a thread never returns to its program. Raises OSError if it is gone."""
    found = _stat_in(directory)
    return (found is not None and found.is_over) or _is_killed(_fields_in(directory), "SigPnd")


def _stat_in(directory: Path) -> Stat | None:
    """That of a process or thread; None if it is gone."""
    try:
        text = (directory / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    if len(fields) <= _EXIT_STATUS:
        return None
    is_over = fields[_STATE] in _IS_DEAD or bool(int(fields[_FLAGS]) & _EXITING)
    return Stat(fields[_STATE], is_over, int(fields[_STARTED]), fields[_ENVIRONMENT] != "0", int(fields[_EXIT_STATUS]))


def _is_killed(fields: Mapping[str, str], pending: str) -> bool:
    return bool(int(fields.get(pending, "0"), 16) & _KILLED)


def _fields_in(directory: Path) -> dict[str, str]:
    """The fields of its `status`, by name. Raises OSError if it is gone."""
    lines = (directory / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    return {name: text.strip() for name, _, text in (line.partition(":") for line in lines)}


def _namespace(kind: str) -> str:
    try:
        return os.readlink(Path(PROC, "self/ns", kind))
    except FileNotFoundError:  # a kernel that does not know this kind has but one of it
        return ""


# -- how a process ended ----------------------------------------------------------------------------------------------


def fate_of(status: int | None, was_oom: bool) -> str:
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
        groups = Path(PROC, str(pid), "cgroup").read_text(encoding="utf-8")
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
