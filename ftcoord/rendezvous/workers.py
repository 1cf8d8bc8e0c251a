"""How an agent's workers start, fail and end, noticed before the agent reports it.

torch's agent polls its workers in a loop, and calls the rendezvous only while all are healthy. When one has failed it
stops the others, which may hang (SIGTERM, SIGKILL after 30 s), and only then comes back for another round. The other
nodes need not wait for that. An agent that polls unhealthy workers first never calls: so the watch begins before it
starts them.

torch's agent gives each worker RANK and LOCAL_RANK, and in TORCHELASTIC_ERROR_FILE a file to which `record` writes the
exception of its main function (https://docs.pytorch.org/docs/stable/elastic/errors.html).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeAlias

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ftcoord import concurrency, proc
from ftcoord.concurrency import StepThread
from ftcoord.core.history import OBEYED, first_failure, follows
from ftcoord.core.rendezvous_records import WorkerFailure, clipped
from ftcoord.primitives.orphans import bears

_STOPS: Final = signal.SIGTERM
"""The signal with which torch's agent stops its workers, unless another signal stops the agent itself."""
_CORE_DUMPED: Final = 0x80
"""The flag in the status of `os.wait` of a process that a signal ended; `os.waitid` reports it elsewhere."""

_TORCHS_DEFAULT: Final = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
LARGEST_ERROR_FILE: Final = 1 << 20
"""Bytes. Larger error files are ignored."""
STARTS_WITHIN: Final = 0.25
"""Seconds that the kernel may take for a child that was just started; it takes less than a millisecond."""
LOOK_EVERY: Final = 0.005, 0.01
"""Seconds between two looks for workers that are being started, as nothing reports a start: the least, and the part of
the time since the watch began. A Python that does not find its script lives for longer than the least."""


class WorkerWatch:
    """Watches the workers of one round, on its own thread, until one fails or `end()`. Call it from one thread, which
    is the one that starts the workers.

    Args:
        mark: the mark in the workers' environment; see `ftcoord.primitives.orphans`.
        failed: called once, on the watch's thread, with the failure of the first worker that failed.
        timer_of: returns the expiration timer for which a worker was killed, by its pid; empty for none.
        broken: called on that thread with an unexpected error, which is also logged: the watch has then ended.
        starting: the workers are still to be started, until `all_started()`. One that ends before its environment could
            be read has no ranks.

    Raises ThreadNotStarted, and OSError if a process cannot be watched.
    """

    def __init__(
        self,
        mark: str,
        failed: Callable[[WorkerFailure], None],
        broken: Callable[[BaseException], object],
        timer_of: Callable[[int], str] = lambda pid: "",
        *,
        starting: bool = False,
    ) -> None:
        self._failed, self._timer_of, self._memory = failed, timer_of, proc.oom_kills(os.getpid())
        self._agents_own = _agents_own()
        self._first: tuple[WorkerFailure, float] | None = None  # set once, by the thread
        """The worker that failed first, and when that was seen, on this host's wall clock."""
        self._mark, self._agent, self._began = mark, proc.own_thread(), concurrency.now()  # never change
        self._before = frozenset(proc.children_of(self._agent)) if starting else frozenset[int]()  # never changes
        self._workers: dict[int, WorkerProcess] = {}  # by pidfds; replaced as a whole, so any thread may read it
        self._running: dict[int, WorkerProcess] = {}  # only the thread, once that runs
        self._sees_starts = starting  # never changes
        self._is_starting = starting  # only the thread, once that runs
        self._have_started = not starting  # any thread; becomes True once
        with ExitStack() as undo:
            self._reader, self._writer = os.pipe()
            undo.callback(os.close, self._reader)
            undo.callback(os.close, self._writer)
            undo.callback(self._close_workers)
            if not starting:
                self._look()
            self._thread = StepThread(self._step, "ftcoord-workers", self._wake, lambda: None, broken)
            if self._running or starting:
                self._thread.start()
            self._ends = undo.pop_all()

    def all_started(self) -> None:
        """Look for workers once more, and then no longer."""
        self._have_started = True
        self._wake()

    def end(self) -> None:
        """Stop watching. Call it once."""
        self._thread.close()
        self._ends.close()

    def _close_workers(self) -> None:
        for pidfd in self._workers:
            os.close(pidfd)

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
        if first is not None and (stopped_at is None or first[1] <= stopped_at):
            return self._judge(first[0])
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
        others = (one for one in self._workers.values() if one.pid != first.pid and one.raised()[0])
        return first_failure([first, *(one.failure(None) for one in others)]) or first

    def _wake(self) -> None:
        os.write(self._writer, b".")

    def _step(self) -> None:
        """Wait until workers end, and check how."""
        waits = select.poll()
        for descriptor in (self._reader, *self._running):
            waits.register(descriptor, select.POLLIN)
        ended = {descriptor for descriptor, _ in waits.poll(self._longest_wait())}
        if self._is_starting:
            self._is_starting = not self._have_started  # before the look, which is the last one then
            self._look()
        if self._memory is not None and not ended:  # or an old OOM kill would explain a SIGKILL hours later
            self._memory.note()
        if self._reader in ended and not self._thread.closed:
            os.read(self._reader, 1)
        for pidfd in () if self._thread.closed else ended - {self._reader}:
            if self._tells(self._running.pop(pidfd), _status(pidfd)):
                self._running.clear()
                self._is_starting = False
                break
        # Who was told may have ended this, and closed the pipe.
        if not self._running and not self._is_starting and not self._thread.closed:
            self._thread.close()

    def _longest_wait(self) -> float | None:
        """Milliseconds; None for any time."""
        if self._is_starting:
            least, part = LOOK_EVERY
            return 1000 * max(least, part * (concurrency.now() - self._began))
        return None if self._memory is None else 1000 * proc.RECENT

    def _look(self) -> None:
        """Find the workers that were started since the last look."""
        known = self._before | {one.pid for one in self._workers.values()}
        new = dict(_workers(self._mark, self._agent, known, or_ended=self._sees_starts))
        self._running |= new
        self._workers = {**self._workers, **new}

    def _tells(self, worker: WorkerProcess, status: int | None) -> bool:
        """Report a worker that ended with this status, if it failed; returns whether it did."""
        if not self._has_failed(status):
            return False
        first = self._failure_of(worker, status)
        self._first = first, concurrency.wall()
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


def _workers(
    mark: str, agent: Path, known: Set[int] = frozenset(), *, or_ended: bool = False
) -> Iterator[tuple[int, WorkerProcess]]:
    """The marked children that the agent's thread has started, by their pidfds; with `or_ended` also those that have
    ended, and show nothing any longer."""
    for pid in proc.children_of(agent):
        if pid in known:
            continue
        _await_start(pid)
        with suppress(OSError), ExitStack() as undo:  # it was waited for, or is another user's
            pidfd = proc.open_pidfd(pid)
            undo.callback(os.close, pidfd)
            worker = _marked(pid, mark) or (WorkerProcess(pid) if or_ended and proc.has_ended(pidfd) else None)
            if worker is not None:
                undo.pop_all()
                yield pidfd, worker


def _marked(pid: int, mark: str) -> WorkerProcess | None:
    """None for a process that does not show the mark, or shows nothing, as it has ended."""
    with suppress(OSError):
        if bears(pid, mark):
            return WorkerProcess.of(pid)
    return None


def _await_start(pid: int) -> None:
    deadline = concurrency.now() + STARTS_WITHIN
    while proc.is_being_started(pid) and concurrency.now() < deadline:
        concurrency.sleep(0.001)  # nobody tells


def _status(pidfd: int) -> int | None:
    """A child's status, as `os.wait` returns it, without reaping the child.

    None if it was already reaped and the kernel no longer has its status: then the agent knows it, and reports it.
    """
    try:
        found = os.waitid(proc.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        status = proc.status_after_wait(pidfd)
        return None if status is None else status & ~_CORE_DUMPED
    if found is None:
        return None
    return found.si_status << 8 if found.si_code == os.CLD_EXITED else found.si_status


Raised: TypeAlias = tuple[str, str]
"""A worker's exception: its type and text, and the head of the traceback; empty if it left none."""


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A worker, as its agent started it. Ranks are -1 if its environment has none.

    Args:
        error_file: where it writes its exception; empty for nowhere.
    """

    pid: int
    rank: int = -1
    local_rank: int = -1
    error_file: str = ""

    @classmethod
    def of(cls, pid: int) -> WorkerProcess:
        """A running process. Raises OSError if it has ended."""
        given = proc.environment_of(pid)
        rank, local_rank = (_number(given.get(name, "")) for name in ("RANK", "LOCAL_RANK"))
        return cls(pid, rank, local_rank, given.get("TORCHELASTIC_ERROR_FILE", ""))

    def raised(self) -> Raised:
        """The exception that it has written so far."""
        return raised_in(self.error_file) if self.error_file else ("", "")

    def has_raised_before(self, time: float) -> bool:
        """Whether it had written an exception by then, on this host's wall clock."""
        try:
            return bool(self.error_file) and os.path.getmtime(self.error_file) <= time and bool(self.raised()[0])
        except OSError:
            return False

    def failure(
        self, status: int | None, raised: Raised | None = None, *, was_oom: bool = False, timer: str = ""
    ) -> WorkerFailure:
        """How it ended.

        Args:
            status: its status, as `os.wait` returns it; None if it has not ended, or the status is unknown.
            raised: its exception; None for what it has written so far.
            was_oom: whether the kernel killed a process of its control group for lack of memory.
            timer: the expiration timer for which it was killed.
        """
        exception, traceback = raised or self.raised()
        number = 0 if status is None else status & 0x7F
        failure = WorkerFailure(
            self.pid,
            self.rank,
            self.local_rank,
            exit_code=-1 if status is None or number else status >> 8 & 0xFF,
            signal=number,
            fate=proc.fate_of(status, was_oom),
            exception=exception,
            traceback=traceback,
            timer=timer,
        )
        return clipped(failure)


def raised_in(error_file: str) -> Raised:
    """The exception in torch's error file; none if that is no regular file, or too long.

    The worker may have made anything of it. A pipe, a device, or a link to one would hold up the agent, or never end.
    """

    def open_no_link(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)

    try:
        with open(error_file, "rb", opener=open_no_link) as file:
            text = file.read(LARGEST_ERROR_FILE + 1) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
        return _raised(json.loads(text.decode("utf-8", errors="replace")) if len(text) <= LARGEST_ERROR_FILE else None)
    except (OSError, ValueError, RecursionError):  # none, or not whole: nothing depends on it but a text
        return "", ""


def failure_in(error: ChildFailedError) -> WorkerFailure | None:
    """Why torch's agent has given up, in its own words: for an agent whose workers nobody else saw end."""
    failures = []
    for rank, one in error.failures.items():
        status = max(-one.exitcode, 0) or one.exitcode << 8
        worker = WorkerProcess(one.pid, rank, one.local_rank)
        failures.append(worker.failure(status, _raised(one.error_file_data)))
    return first_failure(failures)


def _raised(found: Any) -> Raised:
    message = found.get("message") if isinstance(found, Mapping) else None
    if not isinstance(message, Mapping):
        return "", ""
    extra = message.get("extraInfo")
    traceback = extra.get("py_callstack") if isinstance(extra, Mapping) else ""
    text = str(message.get("message") or "")
    return " ".join(text.split()), str(traceback or "")


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1


def handled_signals() -> list[signal.Signals]:
    """The signals that torch's agent handles: it forwards the signal to its workers, and ends."""
    names = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", _TORCHS_DEFAULT).split(",")
    return [signal.Signals[name.strip()] for name in names if name.strip() in signal.Signals.__members__]


@contextlib.contextmanager
def raised_as_exceptions() -> Iterator[None]:
    """Within this block, the signals that torchrun handles raise its SignalException, unless they have a handler.

    torch installs its handlers when it starts the first workers. Until then a SIGTERM would end the agent at once, and
    the others would wait for it until its lease expires. Does nothing outside the main thread, where Python sets no
    handlers.
    """
    if not concurrency.is_main_thread():
        yield
        return
    ours = [number for number in handled_signals() if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def reason_of(error: BaseException) -> str:
    """Why an agent that ends with this exception leaves, for the other nodes."""
    if isinstance(error, SignalException):
        number = signal.Signals(error.sigval)
    elif isinstance(error, KeyboardInterrupt):
        number = signal.SIGINT
    else:
        return type(error).__name__
    return f"{OBEYED}{'Ctrl-C (SIGINT)' if number == signal.SIGINT else number.name}"


def why_process_ends() -> str:
    """Why this process ends, for a node whose agent has not reported it.

    torch's agent turns a signal into an exception, and ends its process without a call to the rendezvous. Python keeps
    the exception with which the main thread ended.
    """
    last = getattr(sys, "last_value", None)
    return reason_of(last) if isinstance(last, SignalException | KeyboardInterrupt) else "its process ends"


def _raise(number: int, frame: FrameType | None) -> None:
    raise SignalException(f"Process {os.getpid()} got signal: {number}", sigval=signal.Signals(number))
