"""The queue that ftcoord's threads wait at in a user's process. `ftcoord.concurrency` makes it."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Final, Generic, TypeVar

T = TypeVar("T")

LONGEST_WAIT: Final = threading.TIMEOUT_MAX
"""Seconds: a lock refuses longer waits."""

Empty = queue.Empty
"""The error of `Queue.get` after its timeout, in every runtime."""


class PythonQueue(Generic[T]):
    """As `queue.SimpleQueue`, except that `get` ends when its timeout does.

    Python 3.11's may wait for the next `put` instead: if the timeout runs out while the thread is not scheduled, or
    runs a signal handler, the time that is left is negative, and that stands for "no limit".

    A finalizer or a signal handler may call `put` in the middle of any call here: each step that changes something is
    one call into C. If a signal handler raises in the middle of a `put`, those who wait may sleep until the next one.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._nothing_new = threading.Lock()  # nearly always held; released to have one of those who wait look again
        self._nothing_new.acquire()

    def put(self, item: T) -> None:
        try:
            self._items.append(item)
        finally:  # also where a signal handler raises in between: nobody else would wake who waits for it
            self._wake_one()

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            with suppress(IndexError):
                item = self._items.popleft()
                if self._items:  # several were put, and the lock may have been released only once: others may wait
                    self._wake_one()
                return item
            if not block or not self._nothing_new.acquire(timeout=_lock_timeout(deadline - time.monotonic())):
                raise Empty

    def empty(self) -> bool:
        return not self._items

    def _wake_one(self) -> None:
        if self._nothing_new.locked():
            with suppress(RuntimeError):  # another thread has just released it
                self._nothing_new.release()


def _lock_timeout(left: float) -> float:
    return -1 if left > LONGEST_WAIT else max(left, 0)
