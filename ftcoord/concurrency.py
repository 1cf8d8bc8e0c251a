"""The seam to threads and time: every lock, wait, thread and clock of ftcoord comes from here.

In a user's process these are Python's own. `ftcoord.testing` puts a scheduler with a virtual clock in their place, so
that the same code runs deterministically, and a test can watch in which order locks are taken.

Objects keep what they were made with: install another runtime before they are made.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Protocol, TypeVar

T = TypeVar("T")

LONGEST_WAIT: Final = threading.TIMEOUT_MAX
"""Seconds: a lock refuses to wait longer."""

Empty = queue.Empty
"""What `Queue.get` raises after its time-out, in every runtime."""


class Lock(Protocol):
    """A mutex, as `threading.Lock`."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
    def release(self) -> None: ...
    def __enter__(self) -> bool: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> object: ...


class Condition(Lock, Protocol):
    """As `threading.Condition` on a reentrant lock of its own."""

    def wait(self, timeout: float | None = None) -> bool: ...
    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T: ...
    def notify(self, n: int = 1) -> None: ...
    def notify_all(self) -> None: ...


class Event(Protocol):
    """As `threading.Event`."""

    def is_set(self) -> bool: ...
    def set(self) -> None: ...
    def clear(self) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...


class Queue(Protocol[T]):
    """As `queue.SimpleQueue`."""

    def put(self, item: T) -> None: ...
    def get(self, block: bool = True, timeout: float | None = None) -> T: ...
    def empty(self) -> bool: ...


class Thread(Protocol):
    """As `threading.Thread`; `ident` is None before it was started."""

    name: str

    @property
    def ident(self) -> int | None: ...
    def start(self) -> None: ...
    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...


class Runtime(Protocol):
    """Makes all of the above. Locks get a name, `Class.attribute`, by which docs/architecture.md lists them."""

    def now(self) -> float: ...
    def wall(self) -> float: ...
    def lock(self, name: str) -> Lock: ...
    def rlock(self, name: str) -> Lock: ...
    def condition(self, name: str) -> Condition: ...
    def event(self) -> Event: ...
    def queue(self) -> Queue[Any]: ...
    def thread(self, target: Callable[..., object], name: str, args: tuple[object, ...] = ()) -> Thread: ...
    def current_thread(self) -> Thread: ...
    def of_process(self, make: Callable[[], T]) -> T: ...


class Python:
    """Python's own threads and clocks."""

    def __init__(self) -> None:
        # Guards `_own`. Reentrant: what is made may need another of these. A child gets a new one, since a thread that
        # it does not have may hold the parent's; what the parent made stays where it is, and is not finalized there.
        self._own_lock = threading.RLock()
        self._own: dict[tuple[int, Callable[[], Any]], Any] = {}
        os.register_at_fork(after_in_child=self._renew_lock)

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def lock(self, name: str) -> Lock:
        return threading.Lock()

    def rlock(self, name: str) -> Lock:
        return threading.RLock()

    def condition(self, name: str) -> Condition:
        return threading.Condition()

    def event(self) -> Event:
        return threading.Event()

    def queue(self) -> Queue[Any]:
        return queue.SimpleQueue()

    def thread(self, target: Callable[..., object], name: str, args: tuple[object, ...] = ()) -> Thread:
        return threading.Thread(target=target, args=args, name=name, daemon=True)

    def current_thread(self) -> Thread:
        return threading.current_thread()

    def of_process(self, make: Callable[[], T]) -> T:
        with self._own_lock:
            key = (os.getpid(), make)
            if key not in self._own:
                self._own[key] = make()
            found: T = self._own[key]
            return found

    def _renew_lock(self) -> None:
        self._own_lock = threading.RLock()


_runtime: Runtime = Python()


@contextmanager
def use(runtime: Runtime) -> Iterator[None]:
    """Have everything that is made meanwhile, in the whole process, made by this runtime. For tests."""
    global _runtime
    before, _runtime = _runtime, runtime
    try:
        yield
    finally:
        _runtime = before


def now() -> float:
    """Monotonic seconds."""
    return _runtime.now()


def wall() -> float:
    """Seconds since 1970, for people only: no decision may rest on it."""
    return _runtime.wall()


def lock(name: str) -> Lock:
    """A mutex. `name` is `Class.attribute`, as in the table of locks in docs/architecture.md."""
    return _runtime.lock(name)


def rlock(name: str) -> Lock:
    """A reentrant mutex."""
    return _runtime.rlock(name)


def condition(name: str) -> Condition:
    """A condition with a reentrant lock of its own, which `name` names."""
    return _runtime.condition(name)


def event() -> Event:
    return _runtime.event()


def inbox() -> Queue[Any]:
    """A queue without a bound."""
    return _runtime.queue()


def thread(target: Callable[..., object], name: str, *args: object) -> Thread:
    """A daemon thread, not yet started."""
    return _runtime.thread(target, name, args)


def current_thread() -> Thread:
    """The thread that runs this."""
    return _runtime.current_thread()


def of_process(make: Callable[[], T]) -> T:
    """What `make` made in this process: a process has one of these, and a forked child gets its own."""
    return _runtime.of_process(make)


def sleep(seconds: float) -> None:
    """Wait, where there is nothing to be woken by."""
    _runtime.event().wait(seconds)


@contextmanager
def held(lock: Lock, deadline: float, late: Exception) -> Iterator[None]:
    """Hold `lock` meanwhile. Raises `late` if it was not free before the monotonic `deadline`."""
    if not lock.acquire(timeout=min(max(deadline - now(), 0), LONGEST_WAIT)):
        raise late
    try:
        yield
    finally:
        lock.release()


def detached(work: Callable[..., None], *arguments: object) -> None:
    """Call `work(*arguments)` on a thread of its own, without waiting for it: the way out of a finalizer.

    A finalizer may run in any line that allocates, whatever locks are held there, so it must take none itself. Raises
    RuntimeError when no thread can be started.
    """
    thread(work, "ftcoord-forget", *arguments).start()


def when_forgotten(owner: object, close: Callable[..., None], *arguments: object) -> Callable[[], object]:
    """Call `close(*arguments)` when nobody refers to `owner` any longer; not at the end of the process.

    On a thread of its own, see `detached`. The arguments must not refer to `owner`. Returns what cancels this: call it
    when `owner` is closed, or a thread is started later for nothing.
    """
    finalizer = weakref.finalize(owner, detached, close, *arguments)
    finalizer.atexit = False
    return finalizer.detach
