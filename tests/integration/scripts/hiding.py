"""Programs that write over their environment, as `setproctitle` does. Each tells the number of the one that hides, and
waits.

With no argument it is one; with `child` it forks one; with `exec` it becomes a program without a mark at SIGUSR1.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path


def hide_environment() -> None:
    """`/proc` shows nothing of it from now on. Python has copied what it knows of it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    ctypes.memset(start, 0, end - start)


def become_another() -> None:
    os.execve("/bin/sleep", ["sleep", "600"], {"WHERE": "elsewhere"})


def main(kind: str) -> None:
    signal.signal(signal.SIGUSR1, lambda *_: become_another())
    child = os.fork() if kind == "child" else 0
    if not child:
        hide_environment()
        print(os.getpid(), flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
