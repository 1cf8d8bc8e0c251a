"""Identifies a process beyond its pid, and kills that process and no other. Linux only: it reads /proc."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import socket
import sys
from pathlib import Path

from ftcoord import pidfd
from ftcoord.core.timer_records import Worker
from ftcoord.errors import ConfigError
from ftcoord.primitives.sentinel import Sentinel

_ENDED_STATES = frozenset("ZXx")
"""The states in /proc/PID/stat of a process that has ended."""


@functools.cache
def host_id() -> str:
    """Identifies this boot of the machine, and the namespaces of its pids and its monotonic clock.

    Raises ConfigError without /proc.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [_namespace(kind) for kind in ("pid", "time")]
    except OSError as error:
        raise ConfigError(
            "platform", sys.platform, "timers tell processes apart by Linux's /proc: use Linux"
        ) from error
    return hashlib.blake2b(" ".join([boot, *spaces]).encode(), digest_size=8).hexdigest()


def this_process(ledger: int, ttl: int) -> Worker:
    """This process as a worker. Raises ConfigError without /proc."""
    pid = os.getpid()
    rank = os.environ.get("RANK", "")
    return Worker(
        host=host_id(),
        pid=pid,
        start=started(pid) or 0,
        node=socket.gethostname(),
        rank=int(rank) if rank.isascii() and rank.isdigit() else -1,
        ledger=ledger,
        ttl=ttl,
    )


def started(pid: int) -> int | None:
    """When a process of this host started, in clock ticks since boot; None if there is none, or it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # from the third one on; the name before may hold anything
    return None if fields[0] in _ENDED_STATES else int(fields[19])


def lives(worker: Worker) -> bool:
    """Whether that very process is running."""
    return started(worker.pid) == worker.start


def is_untouchable(worker: Worker) -> bool:
    """Whether it is this process, its parent, its sentinel, or pid 1: no timer ends those."""
    sentinel = Sentinel.of_process()
    return worker.pid in (1, os.getpid(), os.getppid(), sentinel and sentinel.pid)


def kill(worker: Worker) -> bool:
    """Send SIGKILL to that very process; returns whether it was running.

    Raises OSError when that is not allowed. With pidfds (Linux 5.3) no other process can be hit.
    """
    try:
        handle = pidfd.open_pidfd(worker.pid)
    except ProcessLookupError:
        return False
    except OSError:  # an old kernel, or a sandbox
        return _kill_by_pid(worker)
    try:
        if not lives(worker):
            return False
        pidfd.send(handle, signal.SIGKILL)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def _kill_by_pid(worker: Worker) -> bool:
    try:
        if not lives(worker):
            return False
        os.kill(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except FileNotFoundError:  # a kernel that does not know this kind has but one of it
        return ""
