"""Shows at once, without etcd, which timers a worker holds, and which process that is. Linux only.

etcd has a release only after a network, which may be down. So the worker also notes its timers in memory that other
processes of its host can read, an anonymous file (memfd): for each slot, the token of the timer in it, 0 for none. The
kernel frees it when the process ends. A timer ends a process only if that memory shows the timer: whatever somebody
writes into etcd, no process is killed that does not hold that very timer.
"""

from __future__ import annotations

import functools
import hashlib
import mmap
import os
import socket
import sys

from ftcoord import proc
from ftcoord.core.timers import MOST_TIMERS, Timer, Worker
from ftcoord.errors import ConfigError

_WIDTH = 8


class Ledger:
    """This process's own ledger of a run's timers, until it ends or `close()`. Written through a mapping: fast, and
    never into another file that got its descriptor."""

    def __init__(self, prefix: str) -> None:
        self.fd = os.memfd_create(_name(prefix))
        os.ftruncate(self.fd, MOST_TIMERS * _WIDTH)
        self._memory = mmap.mmap(self.fd, MOST_TIMERS * _WIDTH)

    def note(self, slot: int, token: int) -> None:
        """Note that the timer `token`, 1 to 2**63 - 1, is held; 0: none is."""
        self._memory[slot * _WIDTH : (slot + 1) * _WIDTH] = token.to_bytes(_WIDTH, "little")

    def close(self) -> None:
        """Release all timers, and free the memory."""
        self._memory.close()
        os.close(self.fd)


def holds(prefix: str, worker: Worker, timer: Timer) -> bool:
    """Whether that very process runs, and holds this timer of this run.

    Raises PermissionError if its memory may not be read: that takes the same user, or the right to trace the process.
    """
    path = f"{proc.PROC}/{worker.pid}/fd/{worker.ledger}"
    try:
        if proc.started(worker.pid) != worker.start or not os.readlink(path).startswith(f"/memfd:{_name(prefix)}"):
            return False
        with open(path, "rb", buffering=0) as file:
            return os.pread(file.fileno(), _WIDTH, timer.slot * _WIDTH) == timer.token.to_bytes(_WIDTH, "little")
    except (FileNotFoundError, ProcessLookupError):
        return False


@functools.cache
def host_id() -> str:
    """Identifies this boot of the machine, and the namespaces of its pids and its monotonic clock.

    Raises ConfigError without /proc.
    """
    try:
        return hashlib.blake2b(proc.host_name().encode(), digest_size=8).hexdigest()
    except OSError as error:
        raise ConfigError(
            "platform", sys.platform, "timers tell processes apart by Linux's /proc: use Linux"
        ) from error


def this_process(ledger: int) -> Worker:
    """This process as a worker. Raises ConfigError without /proc."""
    pid, rank = os.getpid(), os.environ.get("RANK", "")
    return Worker(
        host=host_id(),
        pid=pid,
        start=proc.started(pid) or 0,
        node=socket.gethostname(),
        rank=int(rank) if rank.isascii() and rank.isdigit() else -1,
        ledger=ledger,
    )


@functools.cache
def _name(prefix: str) -> str:
    """The name of a run's ledgers."""
    return f"ftcoord-timers-{hashlib.blake2b(prefix.encode(), digest_size=8).hexdigest()}"
