"""The threads that are in gRPC, which a process must not outrun when it ends.

gRPC gives each stream a daemon thread that sends, and one that receives. At its end Python stops daemon threads
wherever they are, also while they hold the lock of their stream; the finalizer of that stream then waits for the lock
for ever, and the process with it. Threads of ours that are in a call are stopped within gRPC's native code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from ftcoord import concurrency

T = TypeVar("T")


class GrpcThreads:
    """Who is in gRPC for one client. gRPC's own threads make themselves known when they run something of ours."""

    def __init__(self) -> None:
        self._changed = concurrency.condition("GrpcThreads._changed")
        self._calls = self._unknown = 0
        self._known: set[concurrency.Thread] = set()

    def enter(self) -> None:
        """Before each call that waits for its answer; then `leave()`."""
        with self._changed:
            self._calls += 1

    def leave(self) -> None:
        with self._changed:
            self._calls -= 1
            self._changed.notify_all()

    def noted(self, requests: Iterator[T]) -> Iterator[T]:
        """`requests`, to be given to a stream that is `expect()`ed: noting the thread that sends them."""
        self._note()
        yield from requests

    def expect(self, call: Any) -> None:
        """Reckon with the threads of a stream that was just opened."""
        with self._changed:
            self._unknown += 1
        if call.add_callback(self._note):  # called on the receiving thread; False when it is done already
            with self._changed:
                self._unknown += 1

    def join(self, timeout: float) -> None:
        """Wait until nobody is in gRPC any more, all calls being cancelled; for `timeout` seconds at most."""
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
