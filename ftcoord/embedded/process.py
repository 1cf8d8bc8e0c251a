"""A child process that does not outlive this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import IO, Any, Final

from ftcoord import concurrency
from ftcoord.fork import OwnerProcess

TERM_GRACE: Final = 2.0
"""Seconds between SIGTERM and SIGKILL. etcd waits longer for open streams to end, and loses nothing when killed."""

_EXEC: Final = """
import os, signal, sys
parent, *command = sys.argv[1:]
if sys.platform == "linux":
    try:
        import ctypes
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    except ImportError:  # a Python built without libffi
        pass
if os.getppid() != int(parent):  # it ended before the kernel was asked
    sys.exit("the process that starts this one has ended")
try:
    os.execv(command[0], command)
except OSError as error:
    sys.exit(f"cannot execute {command[0]!r}: {error.strerror or error}")
"""
"""Becomes the command, once the kernel is asked to kill it with its parent. Not a `preexec_fn`: that runs Python in the
fork of a process with threads, where a lock may be held forever."""


class ChildProcess:
    """Runs a command until it ends, `close` is called, or this process ends: on Linux also if that is killed with
    SIGKILL, and its forked children live on. Thread-safe.

    The kernel sends the signal when the *thread* ends that started the child. So a thread of its own starts it, and
    waits for its end.

    Args:
        command: an absolute path and its arguments.
        output: where its standard output and error go: a file or descriptor.
        environment: its environment variables.

    Raises OSError and ThreadNotStarted. A command that cannot be executed ends with exit code 1, and says so in its
    output.
    """

    def __init__(self, command: Sequence[str], *, output: int | IO[Any], environment: Mapping[str, str]) -> None:
        self.owner = OwnerProcess("this etcd belongs to the parent process")
        self._ended = concurrency.event()
        started: Future[subprocess.Popen[bytes]] = Future()
        concurrency.thread(self._run, "ftcoord-etcd", started, command, output, environment).start()
        self._process = started.result()

    @property
    def exit_code(self) -> int | None:
        """None while it runs (or is stopped by a signal), else its exit code; negative for a signal."""
        return self._process.returncode if self._ended.is_set() else None

    @property
    def pid(self) -> int | None:
        """Its pid; None if it has ended."""
        return None if self._ended.is_set() else self._process.pid

    def close(self, *, kill: bool = False) -> None:
        """End it with SIGTERM and then SIGKILL, or with SIGKILL at once, and wait until it is gone. Idempotent."""
        if not kill:
            self._process.terminate()
            self._process.send_signal(signal.SIGCONT)  # one that is stopped
            self._ended.wait(TERM_GRACE)
        self._process.kill()  # does nothing if it has ended
        self._ended.wait()

    def _run(
        self,
        started: Future[subprocess.Popen[bytes]],
        command: Sequence[str],
        output: int | IO[Any],
        environment: Mapping[str, str],
    ) -> None:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _EXEC, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env=environment,
                start_new_session=True,  # Ctrl-C in a terminal is for this process, which then ends its children
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:  # who waits gets it, whatever it is
            started.set_exception(error)
            return
        started.set_result(process)
        process.wait()
        self._ended.set()
