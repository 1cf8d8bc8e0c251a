"""Identifies a process beyond its pid, and kills that process and no other. Linux only: it reads /proc."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import socket
import sys

from ftcoord.core.timer_records import Worker
from ftcoord.errors import ConfigError
from ftcoord.primitives.sentinel import Sentinel
from ftcoord.proc import host_name, send_if, started


@functools.cache
def host_id() -> str:
    """Identifies this boot of the machine, and the namespaces of its pids and its monotonic clock.

    Raises ConfigError without /proc.
    """
    try:
        return hashlib.blake2b(host_name().encode(), digest_size=8).hexdigest()
    except OSError as error:
        raise ConfigError(
            "platform", sys.platform, "timers tell processes apart by Linux's /proc: use Linux"
        ) from error


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


def lives(worker: Worker) -> bool:
    """Whether that very process is running."""
    return started(worker.pid) == worker.start


def is_untouchable(worker: Worker) -> bool:
    """Whether it is this process, its parent, its sentinel, or pid 1: no timer ends those."""
    sentinel = Sentinel.of_process()
    return worker.pid in (1, os.getpid(), os.getppid(), sentinel and sentinel.pid)


def kill(worker: Worker) -> bool:
    """Send SIGKILL to that very process; returns whether it was running. Raises OSError when that is not allowed."""
    try:
        return send_if(worker.pid, signal.SIGKILL, lambda: lives(worker))
    except ProcessLookupError:
        return False
