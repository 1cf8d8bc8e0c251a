"""Threads that ask for a quorum on behalf of a group whose last rank is in another process."""

from __future__ import annotations

from collections.abc import Callable

from ftcoord import concurrency


class Askers:
    """Mostly one thread, which waits for the next quorum: to start one for each would take as long as the ranks' calls.
    There are more only while several requests of the group are under way. `ask` and `close` are for one thread.

    Args:
        call_soon: has a function called on that thread.
    """

    def __init__(self, call_soon: Callable[[Callable[[], None]], None]) -> None:
        self._call_soon = call_soon
        self._inbox: concurrency.Queue[Callable[[], None] | None] = concurrency.inbox()
        self._idle = self._started = 0  # only the thread that owns this

    def ask(self, ask_for_all: Callable[[], None]) -> None:
        """Call it on a thread at once."""
        if self._idle:
            self._idle -= 1
        else:
            self._started += 1
            concurrency.thread(self._run, "ftcoord-ask").start()
        self._inbox.put(ask_for_all)

    def close(self) -> None:
        """End the threads, each after the request that it has under way."""
        for _ in range(self._started):
            self._inbox.put(None)

    def _run(self) -> None:
        while (ask_for_all := self._inbox.get()) is not None:
            ask_for_all()
            self._call_soon(self._note_idle)

    def _note_idle(self) -> None:
        self._idle += 1
