"""Threads that ask for a quorum on behalf of a group whose last rank is in another process."""

from __future__ import annotations

from collections.abc import Callable

from ftcoord import concurrency
from ftcoord.coordination.ranks import GroupAsk
from ftcoord.errors import ThreadNotStarted


class Askers:
    """Usually one thread, which waits for the next quorum: starting a thread for each would take as long as the ranks'
    calls. There are more only while several requests of the group are in progress. Call `ask` and `close` from one
    thread.

    Args:
        call_soon: calls a function on that thread.
    """

    def __init__(self, call_soon: Callable[[Callable[[], None]], None]) -> None:
        self._call_soon = call_soon
        self._inbox: concurrency.Queue[GroupAsk | None] = concurrency.inbox()
        self._idle = self._started = 0  # only the thread that owns this

    def ask(self, ask_for_all: GroupAsk) -> None:
        """Ask on a thread at once. If no thread can be started, all ranks of the group get the error."""
        if self._idle:
            self._idle -= 1
        else:
            try:
                concurrency.thread(self._run, "ftcoord-ask").start()
            except ThreadNotStarted as error:
                ask_for_all.fail(error)
                return
            self._started += 1
        self._inbox.put(ask_for_all)

    def close(self) -> None:
        """End the threads, each after its current request."""
        for _ in range(self._started):
            self._inbox.put(None)

    def _run(self) -> None:
        while (ask_for_all := self._inbox.get()) is not None:
            ask_for_all.run()
            self._call_soon(self._note_idle)

    def _note_idle(self) -> None:
        self._idle += 1
