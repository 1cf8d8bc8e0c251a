"""Forks a worker, as an agent of torch's does with start_method=fork, and another child.

Tells the numbers of the worker, of a process that this has forked, of a program that this has started with an
environment of its own, and of the other child.
"""

from __future__ import annotations

import os
import signal
import subprocess


def fork() -> int:
    """A process that waits, with this one's program."""
    pid = os.fork()
    if not pid:
        signal.pause()
    return pid


def work(other: int) -> None:
    program = subprocess.Popen(["/bin/sleep", "600"], env={})
    print(os.getpid(), fork(), program.pid, other, flush=True)


if __name__ == "__main__":
    child = fork()
    if not os.fork():
        work(child)
    signal.pause()
