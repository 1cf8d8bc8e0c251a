"""Processes with torch and ftcoord in them, at a tenth of the price: one process, the zygote, loads these and forks all
others.

To load torch takes a processor two seconds, and ftcoord with gRPC a third of one; the tests start hundreds of processes
that do. `Popen` starts a Python
program like subprocess's, but from the zygote. What comes of it is a process of its own session with its own pid,
environment (also for /proc) and end, which runs the program in `__main__` to the interpreter's own end: exit hooks,
signals and exit codes are those of any program. Its parent is the zygote, which waits for it when it is asked to: so a
pid stays its own until then, as with subprocess. multiprocessing's forkserver skips the exit hooks, and loads pytest.

A program that is to run with options of the interpreter's (`-X dev`) is forked from a zygote that runs with them.

In the end of a program the globals of torch's C++ libraries are not destroyed, which would cost it as much as to load
ftcoord. Tests of the end start it with `whole=True`, and programs that need no torch with `torch=False`: both end as
any other does.

The zygote has loaded gRPC, as ftcoord loads it, but has made no channel: what a process may do that ftcoord's users
fork. Start a program cold that is about what is loaded by whom, or that is to have other settings of gRPC's.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import crashes
from helpers import DEADLINE
from zygote import ROOM, WHOLE, WITHOUT_TORCH, Forked, Forks

from ftcoord.primitives.orphans import MARK

LOADED_WITH: Final = frozenset({"LOGLEVEL", "FTCOORD_REPLACE_LEGACY"})
"""Variables that torch, or what it loads, reads while it is loaded: who sets one of them starts the program cold."""
OPTIONS: Final = frozenset({"-W", "-X"})
"""Those of the interpreter's that a program may be started with, each before its value."""
_HERE: Final = Path(__file__).parent


class Zygote(Forks):
    """The process that forks for this one, and ends with it. Thread-safe.

    Args:
        options: with which the interpreter runs, its own and what it forks.
        torch, whole: see above.
    """

    def __init__(self, options: Sequence[str], torch: bool, whole: bool) -> None:
        self._lock = threading.Lock()
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Nor the mark of a handler's workers: the zygote is none, and must not be ended with them.
        inherited = {name: value for name, value in os.environ.items() if name not in {*LOADED_WITH, MARK}}
        how = [*([] if torch else [WITHOUT_TORCH]), *([WHOLE] if whole else [])]
        with its:
            self._process = subprocess.Popen(
                [sys.executable, *options, str(_HERE / "zygote.py"), str(its.fileno()), *how],
                pass_fds=[its.fileno()],
                env={**inherited, "PYTHONPATH": str(_HERE.parent), "OMP_NUM_THREADS": "1", "ROOM": "x" * ROOM},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        super().__init__(own)

    def _ask(self, order: dict[str, Any], descriptors: list[int]) -> int:
        with self._lock:
            return super()._ask(order, descriptors)


def zygote(*options: str, torch: bool = True, whole: bool = False) -> Zygote:
    """That of this process, for such programs."""
    return _zygote(options, torch, whole)


_zygote = functools.cache(Zygote)


class Popen(Forked, crashes.NoticedPopen):
    """subprocess's, for `[sys.executable, ...]` with "-m" and a module, "-c" and a program, or a script, and arguments;
    before these there may be OPTIONS. It has a session of its own, and OMP_NUM_THREADS is 1 there.

    Args:
        torch, whole: whether torch is loaded, and whether the end is whole; see above.
        how: as of subprocess's.
    """

    def __init__(self, args: Any, *, torch: bool = True, whole: bool = False, **how: Any) -> None:
        self._torch, self._whole = torch, whole
        super().__init__(args, **how)

    def fork(self, order: dict[str, Any], streams: list[int]) -> int:
        assert not LOADED_WITH & order["environment"].keys(), "start it cold: torch reads that while it is loaded"
        arguments = order["arguments"]
        first = next(place for place in range(0, len(arguments), 2) if arguments[place] not in OPTIONS)
        self._zygote = zygote(*arguments[:first], torch=self._torch, whole=self._whole)
        pid = self._zygote.fork({**order, "arguments": arguments[first:]}, streams)
        self._pidfd = os.pidfd_open(pid)
        return pid

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        waits = select.poll()
        waits.register(self._pidfd, select.POLLIN)
        if not waits.poll(0 if wait_flags & os.WNOHANG else None):
            return 0, 0
        os.close(self._pidfd)
        return self.pid, self._zygote.reap(self.pid)

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run(*arguments: str, timeout: float = DEADLINE, **how: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, **how)`."""
    with python(*arguments, stderr=subprocess.PIPE, **how) as process:
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextlib.contextmanager
def python(*arguments: str, **how: Any) -> Iterator[Popen]:
    """As `helpers.python`: with pipes, and killed in the end."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, **how}
    process = Popen([sys.executable, *arguments], text=True, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
