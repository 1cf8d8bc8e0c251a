"""The processes below another one, and the end of those that lost their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PR_SET_CHILD_SUBREAPER: Final = 36
"""Of Linux: processes that lose their parent become children of this one."""


@contextlib.contextmanager
def no_orphans() -> Iterator[None]:
    """On exit, kill the processes that were started below this one meanwhile, even those that lost their parent.

    A torchrun with another backend that gets SIGTERM just as it starts a worker ends without ending that worker.
    """
    before = descendants(os.getpid())
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        for pid in descendants(os.getpid()):
            if pid not in before:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """The processes below `pid`, parents first. On Linux only."""
    parents = _parents()
    found = [pid]
    for one in found:
        found.extend(child for child, parent in parents.items() if parent == one)
    return found[1:]


def _parents() -> dict[int, int]:
    """The parent of every process; empty where there is no /proc."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return parents
