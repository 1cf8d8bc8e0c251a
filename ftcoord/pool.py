"""Threads that run calls, and for which a process need not wait when it ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final, ParamSpec, TypeVar

from ftcoord import concurrency

P = ParamSpec("P")
T = TypeVar("T")


IDLE_THREAD_TIMEOUT: Final = 10.0
"""Seconds."""


class DaemonPool:
    """Runs calls on daemon threads, as an executor for gRPC. Thread-safe. Its owner must `close()` it.

    Python joins the threads of its own executors before it runs exit handlers. So a call that waits for something that
    an exit handler closes would keep the process from ending.

    Args:
        limit: the most threads; further calls queue. A thread is started when it is needed, and ends when it had no
            call for IDLE_THREAD_TIMEOUT.
        name: the threads' name.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit, self._name = limit, name  # never change
        self._tasks: concurrency.Queue[Callable[[], None] | None] = concurrency.inbox()  # None ends a thread
        self._lock = concurrency.lock("DaemonPool._lock")  # guards all below
        self._threads: list[concurrency.Thread] = []
        self._free = 0  # threads, less the calls that they run or that queue
        self._closed = False

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call. Raises RuntimeError after `close()`, and ThreadNotStarted if a thread is needed but cannot be
        started."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("this pool was closed: it takes no more calls")
            if self._free <= 0 and len(self._threads) < self._limit:
                self._start()
            self._free -= 1
            self._tasks.put(partial(_run, future, partial(call, *args, **kwargs)))
        return future

    def close(self, *, wait: bool = True) -> None:
        """Take no more calls. Accepted calls are still run. Idempotent.

        Waits for them, but not beyond `concurrency.exit_deadline()`; without `wait`, not at all: for calls that end
        only when more than this has been closed.
        """
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
            for _ in threads:
                self._tasks.put(None)
        if wait:
            for thread in threads:
                concurrency.join(thread)

    def _start(self) -> None:
        thread = concurrency.thread(self._work, self._name)
        thread.start()
        self._threads.append(thread)
        self._free += 1

    def _work(self) -> None:
        while (task := self._next()) is not None:
            task()
            del task  # else it would be kept until the next one comes
            with self._lock:
                self._free += 1

    def _next(self) -> Callable[[], None] | None:
        """The next call; None if this thread is to end."""
        while True:
            try:
                return self._tasks.get(timeout=IDLE_THREAD_TIMEOUT)
            except concurrency.Empty:
                with self._lock:  # under which calls are queued: none has come meanwhile
                    if self._tasks.empty() and not self._closed:
                        self._threads.remove(concurrency.current_thread())
                        self._free -= 1
                        return None


def _run(future: Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # whatever it is, it is for whoever holds the future
        future.set_exception(error)
        del future  # or the error's traceback would keep it, and it the error, until the collector runs
    else:
        future.set_result(result)
