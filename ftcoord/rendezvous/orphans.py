"""Marks an agent's workers, so that the sentinel can find them and end them when the agent dies: torchrun starts them
in sessions of their own."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress

from ftcoord import concurrency
from ftcoord.primitives.orphans import MARK, ProcessId
from ftcoord.primitives.sentinel import Sentinel
from ftcoord.primitives.watched_process import children_of_process, children_of_thread, own_stack


class ProcessMark:
    """The mark of this process, and who needs it; use `ProcessMark.of_process()`. Thread-safe.

    A process has one environment, so it has one mark, however many handlers it has.
    """

    def __init__(self) -> None:
        self.text = f"{os.getpid()}-{uuid.uuid4().hex}"  # never changes
        # Guards all below, and that the environment and the sentinel are told in this order.
        self._lock = concurrency.lock("ProcessMark._lock")
        self._holders = self._enders = 0
        self._workers: dict[object, Sequence[ProcessId]] = {}  # by who has started them
        self._outer: str | None = None  # of the agent that this process is a worker of

    @classmethod
    def of_process(cls) -> ProcessMark:
        """This process's mark; a forked child gets another one."""
        return concurrency.of_process(cls)

    def hold(self) -> None:
        """Processes started from now on carry the mark, until every holder has called `let_go`."""
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self._outer = os.environ.get(MARK)
                os.environ[MARK] = self.text

    def let_go(self) -> None:
        """Call it once for each `hold`."""
        with self._lock:
            self._holders -= 1
            if self._holders or os.environ.get(MARK) != self.text:
                return
            if self._outer is None:
                del os.environ[MARK]
            else:
                os.environ[MARK] = self._outer

    def count_ender(self, change: int) -> None:
        """One more, or one fewer, handler wants all marked processes to end with this process."""
        with self._lock:
            before, self._enders = self._enders, self._enders + change
            if bool(before) != bool(self._enders):
                self._tell()

    def note_workers(self, starter: object, workers: Sequence[ProcessId]) -> None:
        """The workers that one of those who `hold` the mark has started, in place of what it said before."""
        with self._lock:
            before = self._workers.pop(starter, ())
            if workers:
                self._workers[starter] = workers
            if self._enders and workers != before:
                self._tell()

    def _tell(self) -> None:
        """With the lock held."""
        sentinel = Sentinel.of_process()
        if sentinel is not None:
            workers = [one for some in self._workers.values() for one in some]
            sentinel.end_orphans(self.text if self._enders else "", workers)


class MarkedChildren:
    """While this is open, all processes that this process starts carry a mark, in an environment variable that they
    inherit.

    So no other process is ever touched: neither a worker of another run, nor a process that a user starts by hand.
    """

    def __init__(self) -> None:
        self._process, self._pid = ProcessMark.of_process(), os.getpid()
        self._strangers = _children_before()
        """Children that are no workers: they were there before."""
        self._is_open, self._ends = True, False
        self.mark = self._process.text
        self._process.hold()

    def end_with_this_process(self) -> None:
        """Have the sentinel end the marked processes if this process dies while this is open. Call it once."""
        self._ends = True
        self._process.count_ender(1)

    def note_workers(self, pids: Iterable[int]) -> None:
        """Have the sentinel end these workers even if they hide the mark that they bear now, and the children that this
        thread has forked since this was opened, which cannot show it. For the thread that starts the workers, while
        nobody has waited for any of them. Raises OSError if the kernel does not list children."""
        mine = own_stack()
        forked = [one for one in _ids(children_of_thread()) if one.stack == mine != 0 and one not in self._strangers]
        self._process.note_workers(self, list(dict.fromkeys([*_ids(pids), *forked])))

    def close(self) -> None:
        """Processes started from now on carry no mark, unless other handlers need it. Idempotent; does nothing in a
        forked child."""
        if os.getpid() != self._pid or not self._is_open:
            return
        self._is_open = False
        self._process.let_go()
        self._process.note_workers(self, ())
        if self._ends:
            self._process.count_ender(-1)


def _children_before() -> Set[ProcessId]:
    """The children of this process; none without /proc."""
    with suppress(OSError):
        return {*_ids(children_of_process())}
    return frozenset()


def _ids(pids: Iterable[int]) -> list[ProcessId]:
    """Of those that are still there."""
    return [one for pid in pids if (one := ProcessId.of(pid)) is not None]
