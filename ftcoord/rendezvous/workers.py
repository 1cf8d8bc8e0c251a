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

    Raises ThreadNotStarted, and OSError where a process cannot be watched.
    """

    def __init__(self, mark: str, failed: Callable[[str], None]) -> None:
        self._failed = failed
        with ExitStack() as undo:
            self._reader, self._writer = os.pipe()
            undo.callback(os.close, self._reader)
            undo.callback(os.close, self._writer)
            self._agents_own = {0, _STOPS, *handled_signals()}  # ways to end of workers that are done, or stopped
            self._workers = dict(_workers(mark))
            for pidfd in self._workers:
                undo.callback(os.close, pidfd)
            self._thread = concurrency.thread(self._run, "ftcoord-workers") if self._workers else None
            if self._thread is not None:
                self._thread.start()
            self._ends = undo.pop_all()

    def end(self) -> None:
        """Stop watching."""
        os.write(self._writer, b".")
        if self._thread not in (None, concurrency.current_thread()):
            self._thread.join()
        self._ends.close()

    def _run(self) -> None:
        waits = select.poll()
        for descriptor in (self._reader, *self._workers):
            waits.register(descriptor, select.POLLIN)
        running = set(self._workers)
        while running:
            ended = {descriptor for descriptor, _ in waits.poll()}
            if self._reader in ended:
                return
            for pidfd in ended:
                running.discard(pidfd)
                waits.unregister(pidfd)
                status = _status(pidfd)
                if status is not None and status not in self._agents_own:
                    self._failed(f"worker {self._workers[pidfd]} {fate_of(status)}")
                    return


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
