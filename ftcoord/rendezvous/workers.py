"""Notices that an agent's workers end before the agent reports it: the agent first stops its other workers, which may
hang.

torch's agent polls its workers in a loop, and calls the rendezvous only while all are healthy. When one has failed it
stops the others (SIGTERM, SIGKILL after 30 s), and only then comes back for another round. The other nodes need not
wait for that.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Final, NamedTuple

from ftcoord import concurrency
from ftcoord.core.causes import first_failure, follows
from ftcoord.core.event_records import WorkerFailure
from ftcoord.pidfd import P_PIDFD, open_pidfd
from ftcoord.primitives.orphans import bears
from ftcoord.primitives.step_thread import StepThread
from ftcoord.primitives.watched_process import (
    RECENT,
    children_of_thread,
    is_being_started,
    oom_kills,
    status_after_wait,
)
from ftcoord.rendezvous.signals import handled_signals
from ftcoord.rendezvous.worker_failures import WorkerProcess

_STOPS: Final = signal.SIGTERM
"""The signal with which torch's agent stops its workers, unless another signal stops the agent itself."""
_CORE_DUMPED: Final = 0x80
"""The flag in the status of `os.wait` of a process that a signal ended; `os.waitid` reports it elsewhere."""


class _Seen(NamedTuple):
    """How a worker ended, and when that was seen, on this host's wall clock."""

    failure: WorkerFailure
    at: float


STARTS_WITHIN: Final = 0.25
"""Seconds that the kernel may take for a child that was just started; it takes less than a millisecond."""


class WorkerWatch:
    """Watches the workers of one round, on its own thread, until one fails or `end()`. Call it from one thread.

    Args:
        mark: the mark in the workers' environment; see `ftcoord.primitives.orphans`.
        failed: called once, on the watch's thread, with the failure of the first worker that failed.
        timer_of: returns the expiration timer for which a worker was killed, by its pid; empty for none.
        broken: called on that thread with an unexpected error, which is also logged: the watch has then ended.

    Raises ThreadNotStarted, and OSError if a process cannot be watched.
    """

    def __init__(
        self,
        mark: str,
        failed: Callable[[WorkerFailure], None],
        broken: Callable[[BaseException], object],
        timer_of: Callable[[int], str] = lambda pid: "",
    ) -> None:
        self._failed, self._timer_of, self._memory = failed, timer_of, oom_kills(os.getpid())
        self._agents_own = _agents_own()
        self._first: _Seen | None = None  # set once, by the thread
        with ExitStack() as undo:
            self._reader, self._writer = os.pipe()
            undo.callback(os.close, self._reader)
            undo.callback(os.close, self._writer)
            self._workers = dict(_workers(mark))  # by pidfds; never changes
            self._running = dict(self._workers)  # only the thread, once that runs
            for pidfd in self._workers:
                undo.callback(os.close, pidfd)
            self._thread = StepThread(self._step, "ftcoord-workers", self._wake, lambda: None, broken)
            if self._running:
                self._thread.start()
            self._ends = undo.pop_all()

    @property
    def pids(self) -> list[int]:
        """Of the workers."""
        return [worker.pid for worker in self._workers.values()]

    def end(self) -> None:
        """Stop watching. Call it once."""
        self._thread.close()
        self._ends.close()

    def failure(self, stopped_at: float | None = None) -> WorkerFailure | None:
        """The failure of the worker that failed first, by everything that the workers have left by now; None if none
        failed.

        A worker that raised an exception may end later than workers that were connected to it, even on other nodes, and
        those may have made this agent stop its workers meanwhile.

        Args:
            stopped_at: when this agent was asked to stop its workers, on this host's wall clock, as files have it; None
                if it was not. An exception or exit after that is no failure of the worker: the agent kills those that
                do not stop.
        """
        first = self._first
        if first is not None and (stopped_at is None or first.at <= stopped_at):
            return self._judge(first.failure)
        if stopped_at is not None:
            raised = [one.failure(None) for one in self._workers.values() if one.has_raised_before(stopped_at)]
            return first_failure(raised)
        unseen = first_failure(self._unseen())
        return self._judge(unseen) if unseen is not None else None

    def _unseen(self) -> list[WorkerFailure]:
        """Workers that have ended, if the agent noticed it before the thread."""
        ended = ((worker, _status(pidfd)) for pidfd, worker in self._workers.items())
        return [self._failure_of(one, status) for one, status in ended if self._has_failed(status)]

    def _judge(self, first: WorkerFailure) -> WorkerFailure:
        """The failure of another worker, if the first one only followed it."""
        if not follows(first):
            return first
        others = (one for one in self._workers.values() if one.pid != first.pid and one.raised().exception)
        return first_failure([first, *(one.failure(None) for one in others)]) or first

    def _wake(self) -> None:
        os.write(self._writer, b".")

    def _step(self) -> None:
        """Wait until workers end, and check how."""
        waits = select.poll()
        for descriptor in (self._reader, *self._running):
            waits.register(descriptor, select.POLLIN)
        ended = {descriptor for descriptor, _ in waits.poll(None if self._memory is None else 1000 * RECENT)}
        if self._memory is not None and not ended:  # or an old OOM kill would explain a SIGKILL hours later
            self._memory.note()
        for pidfd in () if self._thread.closed else ended:
            if self._tells(self._running.pop(pidfd), _status(pidfd)):
                self._running.clear()
                break
        if not self._running and not self._thread.closed:  # who was told may have ended this, and closed the pipe
            self._thread.close()

    def _tells(self, worker: WorkerProcess, status: int | None) -> bool:
        """Report a worker that ended with this status, if it failed; returns whether it did."""
        if not self._has_failed(status):
            return False
        first = self._failure_of(worker, status)
        self._first = _Seen(first, concurrency.wall())
        self._failed(self._judge(first))
        return True

    def _has_failed(self, status: int | None) -> bool:
        """Whether a worker with this status has failed; not if it runs, or its status is unknown."""
        return status is not None and status not in self._agents_own

    def _failure_of(self, worker: WorkerProcess, status: int | None) -> WorkerFailure:
        was_killed = status == signal.SIGKILL
        was_oom = was_killed and self._memory is not None and self._memory.grew()
        return worker.failure(status, was_oom=was_oom, timer=self._timer_of(worker.pid) if was_killed else "")


def _agents_own() -> set[int]:
    """Statuses of workers that are done, or were stopped by their agent, including those that handle a signal
    themselves."""
    stops = {_STOPS, *handled_signals()}
    return {0, *stops, *((128 + number) << 8 for number in stops)}


def _workers(mark: str) -> Iterator[tuple[int, WorkerProcess]]:
    """The marked children that this thread started, by their pidfds: the agent starts its workers on the thread that
    calls the rendezvous."""
    for pid in children_of_thread():
        _await_start(pid)
        with suppress(OSError):  # it has ended
            if bears(pid, mark):
                worker = WorkerProcess.of(pid)
                yield open_pidfd(pid), worker


def _await_start(pid: int) -> None:
    deadline = concurrency.now() + STARTS_WITHIN
    while is_being_started(pid) and concurrency.now() < deadline:
        concurrency.sleep(0.001)  # nobody tells


def _status(pidfd: int) -> int | None:
    """A child's status, as `os.wait` returns it, without reaping the child.

    None if it was already reaped and the kernel no longer has its status: then the agent knows it, and reports it.
    """
    try:
        found = os.waitid(P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        status = status_after_wait(pidfd)
        return None if status is None else status & ~_CORE_DUMPED
    if found is None:
        return None
    return found.si_status << 8 if found.si_code == os.CLD_EXITED else found.si_status
