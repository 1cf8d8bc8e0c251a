"""Marks an agent's workers, so that the sentinel can find them and end them when the agent has ended: torchrun starts
them in sessions of their own."""

from __future__ import annotations

import os
import uuid

from ftcoord import concurrency
from ftcoord.primitives.orphans import MARK
from ftcoord.primitives.sentinel import Sentinel


class ProcessMark:
    """The mark of this process, and who needs it; use `ProcessMark.of_process()`. Thread-safe.

    A process has one environment, so it has one mark, however many handlers it has.
    """

    def __init__(self) -> None:
        self.text = f"{os.getpid()}-{uuid.uuid4().hex}"  # never changes
        # Guards all below, and the variable in the environment.
        self._lock = concurrency.lock("ProcessMark._lock")
        self._holders = 0
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


class MarkedChildren:
    """While this is open, all processes that this process starts carry a mark, in an environment variable that they
    inherit.

    So no other process is ever touched: neither a worker of another run, nor a process that a user starts by hand.
    """

    def __init__(self) -> None:
        self._process, self._pid = ProcessMark.of_process(), os.getpid()
        self._is_open = True
        self.mark = self._process.text
        self._process.hold()

    def end_with_this_process(self) -> None:
        """Have the sentinel end the marked processes when this process has ended, however it ends.

        `close()` does not take that back. A signal's handler may raise while this process starts a worker: the worker
        is then nobody's, though this process ends in an orderly way.
        """
        if (sentinel := Sentinel.of_process()) is not None:
            sentinel.end_orphans(self.mark)

    def close(self) -> None:
        """Processes started from now on carry no mark, unless other handlers need it. Idempotent; does nothing in a
        forked child."""
        if os.getpid() != self._pid or not self._is_open:
            return
        self._is_open = False
        self._process.let_go()
