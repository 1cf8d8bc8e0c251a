"""A child process that does not outlive this one."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final

from ftcoord import concurrency
from ftcoord.errors import ServerError
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
        keeps: descriptors that it keeps open.

    Raises OSError and ThreadNotStarted. A command that cannot be executed ends with exit code 1, and says so in its
    output.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        output: int | IO[Any],
        environment: Mapping[str, str],
        keeps: Sequence[int] = (),
    ) -> None:
        if not sys.executable:
            raise ServerError("cannot start etcd without a Python interpreter: set sys.executable to the path of one")
        self.owner = OwnerProcess("this etcd belongs to the parent process")
        self._command = [sys.executable, "-I", "-S", "-c", _EXEC, str(self.owner.pid), *command]
        self._output, self._environment, self._keeps = output, environment, keeps
        self._process: subprocess.Popen[bytes] | None = None
        self._problem: OSError | None = None
        self._started, self._ended = concurrency.event(), concurrency.event()
        self._thread = concurrency.thread(self._run, "ftcoord-etcd")
        self._thread.start()
        self._started.wait()
        if self._problem is not None:
            raise self._problem

    @property
    def pid(self) -> int | None:
        """Its pid; None if it has ended."""
        return self._process.pid if self._process is not None and self.exit_code is None else None

    @property
    def exit_code(self) -> int | None:
        """None while it runs (or is stopped by a signal), else its exit code; negative for a signal."""
        return self._process.returncode if self._process is not None and self._ended.is_set() else None

    def close(self, *, kill: bool = False) -> None:
        """End it with SIGTERM and then SIGKILL, or with SIGKILL at once, and wait until it is gone. Idempotent; does
        nothing in a forked child."""
        if not self.owner.is_current or self._process is None:
            return
        if not kill:
            self._process.terminate()
            self._process.send_signal(signal.SIGCONT)
            self._ended.wait(TERM_GRACE)
        self._process.kill()  # does nothing if it has ended
        self._ended.wait()

    def _run(self) -> None:
        try:
            # In a session of its own: Ctrl-C in a terminal is for this process, which then ends its children.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=self._environment,
                pass_fds=self._keeps,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            self._problem = error
            return
        finally:
            self._started.set()
        self._process.wait()
        self._ended.set()
