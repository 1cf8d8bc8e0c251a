"""Descriptors that stand for one process forever, even if its pid is reused
(https://man7.org/linux/man-pages/man2/pidfd_open.2.html); also for a Python that was built without them."""

from __future__ import annotations

import errno
import math
import os
import select
import signal
import sys
from typing import Final

P_PIDFD: Final = 3
"""For `os.waitid`, which accepts it even if `os` does not define it (<linux/wait.h>)."""
LONGEST_POLL: Final = 24 * 3600
"""Seconds: `poll` takes about 24 days at most, and a lease may have a longer TTL."""
_OPEN, _SEND = 434, 424
"""The numbers of both system calls, which all kinds of processors share."""


def open_pidfd(pid: int) -> int:
    """A pidfd, which no other program inherits. It is readable when the process has ended.

    Raises ProcessLookupError if no process has this pid, and OSError if there are no pidfds (Linux before 5.3, gVisor)
    or they are forbidden (a seccomp filter).
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _call(_OPEN, pid, 0)


def send(pidfd: int, number: int) -> None:
    """Send a signal. Raises ProcessLookupError if the process has ended, and OSError."""
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(pidfd, number)
    else:
        _call(_SEND, pidfd, number, 0, 0)


def has_ended(pidfd: int, timeout: float = 0) -> bool:
    """Whether its process has ended, or does within `timeout` seconds."""
    waits = select.poll()  # `select.select` takes no number from 1024 on, and a process may have more files than that
    waits.register(pidfd, select.POLLIN)
    while timeout > LONGEST_POLL:
        if waits.poll(1000 * LONGEST_POLL):
            return True
        timeout -= LONGEST_POLL
    return bool(waits.poll(math.ceil(1000 * timeout)))


def _call(number: int, *arguments: int) -> int:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    import ctypes  # takes memory, and nearly nobody needs it

    library = ctypes.CDLL(None, use_errno=True)
    result = int(library.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
