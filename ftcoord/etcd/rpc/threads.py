"""The threads that are inside gRPC, for which a process must wait when it ends.

gRPC gives each stream a daemon thread that sends, and one that receives. When Python exits it stops daemon threads
wherever they are, even while they hold their stream's lock. The stream's finalizer then waits for the lock forever, and
so does the process. Our own threads in a call would be stopped inside gRPC's native code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from ftcoord import concurrency

T = TypeVar("T")


class GrpcThreads:
    """The threads that are inside gRPC for one client. gRPC's own threads register when they run our code."""

    def __init__(self) -> None:
        # Guards all below. gRPC's threads take it too, with locks of gRPC's held: so no call is made under it.
        self._changed = concurrency.condition("GrpcThreads._changed")
        self._calls = 0  # calls that wait for their answers
        self._unknown = 0  # threads of gRPC's that were started and have not registered yet
        self._known: set[concurrency.Thread] = set()  # those that have

    def enter(self) -> None:
        """Call this before each call that waits for its answer, and `leave()` after it."""
        with self._changed:
            self._calls += 1

    def leave(self) -> None:
        with self._changed:
            self._calls -= 1
            self._changed.notify_all()

    def noted(self, requests: Iterator[T]) -> Iterator[T]:
        """The same requests, for a stream that is `expect()`ed: registers the thread that sends them."""
        self._note()
        yield from requests

    def expect(self, call: Any) -> None:
        """Expect the threads of a stream that was just opened to register."""
        with self._changed:
            self._unknown += 1
        if call.add_callback(self._note):  # called on the receiving thread; False when it is done already
            with self._changed:
                self._unknown += 1

    def join(self, timeout: float) -> None:
        """Wait until no thread is inside gRPC, at most `timeout` seconds. All calls must have been cancelled."""
        deadline = concurrency.now() + timeout
        with self._changed:
            self._changed.wait_for(lambda: self._unknown <= 0 and not self._calls, timeout)
            known = self._known - {concurrency.current_thread()}
        for thread in known:
            thread.join(max(deadline - concurrency.now(), 0))

    def _note(self) -> None:
        with self._changed:
            self._known = {thread for thread in self._known if thread.is_alive()}
            self._known.add(concurrency.current_thread())
            self._unknown -= 1
            self._changed.notify_all()
