"""Sees an agent's workers end, before the agent says so: that first stops its other workers, which may hang for long.

torch's agent looks at its workers in a loop, and calls the rendezvous only while all are healthy. When one has failed
it stops the others (SIGTERM, SIGKILL after 30 s) and comes back for another round after that. The other nodes need not
wait for it.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from ftcoord import concurrency
from ftcoord.pidfd import P_PIDFD, open_pidfd
from ftcoord.primitives.orphans import bears
from ftcoord.primitives.step_thread import StepThread
from ftcoord.primitives.watched_process import fate_of, is_being_started, status_after_wait
from ftcoord.rendezvous.signals import handled_signals

_STOPS: Final = signal.SIGTERM
"""How torch's agent stops its workers, if it is not stopped by another signal itself."""
_CORE_DUMPED: Final = 0x80
"""In what `os.wait` says of one that a signal ended; `os.waitid` says it elsewhere."""


STARTS_WITHIN: Final = 0.25
"""Seconds that the kernel may take for a child that was started just now; it takes less than a millisecond."""


class WorkerWatch:
    """Watches the workers of one round, on a thread of its own, until one fails or `end()`. For one thread.

    Args:
        mark: what the workers inherit in their environment; see `ftcoord.primitives.orphans`.
        failed: called once, on the watch's thread, with what became of the first worker that failed.
        broken: called on that thread with an error that nobody foresaw, and that is logged: it watches nobody any more.

    Raises ThreadNotStarted, and OSError where a process cannot be watched.
    """

    def __init__(self, mark: str, failed: Callable[[str], None], broken: Callable[[BaseException], object]) -> None:
        self._failed = failed
        self._agents_own = {0, _STOPS, *handled_signals()}  # ways to end of workers that are done, or stopped
        with ExitStack() as undo:
            self._reader, self._writer = os.pipe()
            undo.callback(os.close, self._reader)
            undo.callback(os.close, self._writer)
            self._running = dict(_workers(mark))  # pids, by pidfds; only the thread, once that runs
            for pidfd in self._running:
                undo.callback(os.close, pidfd)
            self._thread = StepThread(self._step, "ftcoord-workers", self._wake, lambda: None, broken)
            if self._running:
                self._thread.start()
            self._ends = undo.pop_all()

    def end(self) -> None:
        """Stop watching; once."""
        self._thread.close()
        self._ends.close()

    def _wake(self) -> None:
        os.write(self._writer, b".")

    def _step(self) -> None:
        """Wait until some end, and look how."""
        waits = select.poll()
        for descriptor in (self._reader, *self._running):
            waits.register(descriptor, select.POLLIN)
        ended = {descriptor for descriptor, _ in waits.poll()}
        for pidfd in () if self._thread.closed else ended:
            pid, status = self._running.pop(pidfd), _status(pidfd)
            if status is not None and status not in self._agents_own:
                self._failed(f"worker {pid} {fate_of(status)}")
                self._running.clear()
                break
        if not self._running and not self._thread.closed:  # who was told may have ended this, and closed the pipe
            self._thread.close()


def _workers(mark: str) -> Iterator[tuple[int, int]]:
    """The pidfds and pids of the children with the mark, of those that this thread started.

    The agent starts its workers on the thread that calls the rendezvous. Linux lists children by threads, and a process
    may have hundreds of those.
    """
    for pid in map(int, Path("/proc/thread-self/children").read_text(encoding="ascii").split()):
        _await_start(pid)
        with suppress(OSError):  # it has ended
            if bears(pid, mark):
                yield open_pidfd(pid), pid


def _await_start(pid: int) -> None:
    deadline = concurrency.now() + STARTS_WITHIN
    while is_being_started(pid) and concurrency.now() < deadline:
        concurrency.sleep(0.001)  # nobody tells


def _status(pidfd: int) -> int | None:
    """How a child ended, as `os.wait` says it; it is left for its parent to be waited for.

    None if that was done and the kernel does not say it any longer: then the agent knows, and tells the others.
    """
    try:
        found = os.waitid(P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        status = status_after_wait(pidfd)
        return None if status is None else status & ~_CORE_DUMPED
    if found is None:
        return None
    return found.si_status << 8 if found.si_code == os.CLD_EXITED else found.si_status
