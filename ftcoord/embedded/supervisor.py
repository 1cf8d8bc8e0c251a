"""Stands between an embedded etcd and the process that asked for it. Run as a script, never imported:

    python -I -S supervisor.py PARENT_PID SCRATCH COMMAND...

It starts COMMAND when told to. When the parent is gone, also by ``kill -9``, it ends COMMAND, removes the directory
SCRATCH ('' for none) and exits. It sees that in two ways: its standard input ends, which is immediate, and once a
second it looks at its parent's pid, because a forked child of the parent holds a copy of that pipe. A parent-death
signal from the kernel would not do: it fires when the *thread* that started the process ends.

Requests are lines ``ID VERB`` on standard input, each answered by ``ID STATE VALUE`` on standard output, where STATE is
``running`` (a pid), ``exited`` (an exit code, negative for a signal) or ``failed`` (why it could not be started).
Only the standard library, and little of it, so that it is up within milliseconds.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable

TERM_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL. etcd waits longer for open streams to end, and loses nothing when killed."""

SUPERVISOR_PARENT_CHECK_INTERVAL = 1.0
"""Seconds between two checks of the parent's pid."""


class Child:
    """The supervised command."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._paused = False
        self._error = "not started"
        self._before_exec = _death_signal()

    def start(self) -> None:
        self.terminate()
        self._process = None
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=2, preexec_fn=self._before_exec
            )
        except OSError as error:
            self._error = error.strerror or str(error)

    def terminate(self) -> None:
        """End it with SIGTERM, then SIGKILL."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        self.resume()
        try:
            self._process.wait(TERM_GRACE)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._paused = False

    def pause(self) -> None:
        """Stop it with SIGSTOP, and wait until it has stopped."""
        if self._process is None or self._process.poll() is not None or self._paused:
            return
        self._process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self._process.pid, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            self._paused = True
        else:
            self._process.returncode = os.waitstatus_to_exitcode(status)

    def resume(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
        self._paused = False

    def state(self) -> str:
        if self._process is None:
            return f"failed {self._error}"
        code = self._process.poll()
        return f"running {self._process.pid}" if code is None else f"exited {code}"


def _death_signal() -> Callable[[], None] | None:
    """On Linux, have the kernel end the command with this process. This process has one thread, so that is safe
    here."""
    if sys.platform != "linux":
        return None
    try:
        import ctypes
    except ImportError:  # a Python built without libffi
        return None
    prctl = ctypes.CDLL(None).prctl
    pr_set_pdeathsig = 1
    return lambda: prctl(pr_set_pdeathsig, signal.SIGKILL)


def serve(child: Child, parent: int) -> None:
    """Answer requests until told to quit, or until the parent is gone."""
    verbs: dict[str, Callable[[], object]] = {
        "start": child.start,
        "terminate": child.terminate,
        "kill": child.kill,
        "pause": child.pause,
        "resume": child.resume,
        "state": lambda: None,
    }
    received = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], SUPERVISOR_PARENT_CHECK_INTERVAL)[0]:
            continue
        data = os.read(0, 4096)
        if not data:
            return
        *lines, received = (received + data).split(b"\n")
        for line in lines:
            number, verb = line.decode().split()
            if verb == "quit":
                return
            verbs[verb]()
            os.write(1, f"{number} {child.state()}\n".encode())


def main() -> None:
    parent, scratch, *command = sys.argv[1:]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent that ignores it hands that down, and waiting would fail
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    child = Child(command)
    try:
        serve(child, int(parent))
    except BrokenPipeError:
        pass  # the parent went away before it read its answer
    finally:
        if scratch:
            import shutil

            child.kill()  # nobody will read this data again: no need to be polite
            shutil.rmtree(scratch, ignore_errors=True)
        else:
            child.terminate()


if __name__ == "__main__":
    main()
