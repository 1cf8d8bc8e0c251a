"""A child process that never outlives its parent, with its scratch directory. See `ftcoord.embedded.supervisor`."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from typing import IO, Any

from ftcoord import concurrency
from ftcoord.errors import ForkedProcessError, ServerError
from ftcoord.fork import OwnerProcess

_SUPERVISOR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "supervisor.py")
_SUPERVISOR_QUIT_TIMEOUT = 30.0


class SupervisedProcess:
    """Runs `command` under a supervisor that ends it when this process ends, for whatever reason.

    Signals go through the supervisor, which is the command's parent, so they can never hit another process with the
    same pid. Thread-safe. In a forked child `close()` does nothing, and everything else raises `ForkedProcessError`.

    Args:
        command: an absolute path and its arguments.
        output: where the command's standard output and error go: a file or descriptor.
        environment: its environment variables.
        scratch: a directory that is removed when the command is ended for good, or None.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        output: int | IO[Any],
        environment: Mapping[str, str],
        scratch: str | None = None,
    ) -> None:
        if not sys.executable:
            raise ServerError("cannot start etcd without a Python interpreter: set sys.executable to the path of one")
        self._owner = OwnerProcess("this etcd belongs to the parent process")
        self._binary = command[0]
        self._scratch = scratch
        # Held during a request and its answer: the supervisor answers one at a time.
        self._lock = concurrency.lock("SupervisedProcess._lock")
        self._numbers = count(1)
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", _SUPERVISOR, str(self._owner.pid), scratch or "", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            cwd="/",
            env=dict(environment),
            start_new_session=True,  # Ctrl-C in a terminal is for the parent, which then ends this in its own time
        )

    def is_owner(self) -> bool:
        """False in a forked child of the process that made this object."""
        return self._owner.is_current

    def start(self) -> None:
        """Start the command; a running one is ended first.

        Raises:
            ServerError: it cannot be executed.
        """
        self._request("start")

    def exit_code(self) -> int | None:
        """None while the command runs (or is paused), else its exit code; negative for a signal."""
        state, value = self._request("state")
        return None if state == "running" else int(value)

    def pid(self) -> int | None:
        """The command's own pid; None if it does not run."""
        state, value = self._request("state")
        return int(value) if state == "running" else None

    def kill(self) -> None:
        """End the command with SIGKILL, and wait until it is gone. The scratch directory stays."""
        self._request("kill")

    def terminate(self) -> None:
        """End the command with SIGTERM, then SIGKILL, and wait until it is gone. The scratch directory stays."""
        self._request("terminate")

    def pause(self) -> None:
        """Stop the command with SIGSTOP, and wait until it has stopped. No effect if it has ended."""
        self._request("pause")

    def resume(self) -> None:
        """Let a paused command run again."""
        self._request("resume")

    def close(self) -> None:
        """End the command and the supervisor, and remove the scratch directory. Idempotent."""
        if not self.is_owner():
            return
        with self._lock:
            if self._supervisor.poll() is None:
                self._quit()
            for pipe in (self._supervisor.stdin, self._supervisor.stdout):
                if pipe is not None:
                    pipe.close()
            if self._scratch:
                shutil.rmtree(self._scratch, ignore_errors=True)  # there still if the supervisor was killed

    def _quit(self) -> None:
        # Said in words: closing the pipe is not enough while a forked child holds a copy of it.
        with contextlib.suppress(BrokenPipeError):
            self._send("quit")
        try:
            self._supervisor.wait(_SUPERVISOR_QUIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()

    def _request(self, verb: str) -> tuple[str, str]:
        if not self.is_owner():
            raise ForkedProcessError("an etcd belongs to the process that started it: here, use its endpoint only")
        with self._lock:
            try:
                state, value = self._answer_to(self._send(verb))
            except (BrokenPipeError, EOFError):
                raise ServerError("etcd's supervisor was ended from outside: call stop() and start() again") from None
        if state == "failed":
            raise ServerError(f"cannot execute {self._binary!r}: {value}")
        return state, value

    def _send(self, verb: str) -> str:
        assert self._supervisor.stdin is not None
        number = str(next(self._numbers))
        os.write(self._supervisor.stdin.fileno(), f"{number} {verb}\n".encode())
        return number

    def _answer_to(self, number: str) -> tuple[str, str]:
        assert self._supervisor.stdout is not None
        while line := self._supervisor.stdout.readline():
            answered, state, value = line.decode().rstrip("\n").split(" ", 2)
            # A smaller number answers a request whose caller was interrupted (Ctrl-C) before it could read.
            if answered == number:
                return state, value
        raise EOFError
