"""Threads and time: every lock, wait, thread and clock of ftcoord is made here.

In a user's process these are Python's own. `tests/virtual` replaces them with a scheduler and a virtual clock, so
that the same code runs deterministically, and a test can check the order in which locks are taken.

An object keeps the runtime that it was made with: install another one before.
"""

from __future__ import annotations

import atexit
import enum
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sized
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, Protocol, TypeVar

from ftcoord.errors import ThreadNotStarted
from ftcoord.python_queue import LONGEST_WAIT as LONGEST_WAIT
from ftcoord.python_queue import Empty as Empty
from ftcoord.python_queue import PythonQueue

T = TypeVar("T")


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
    def start(self) -> None:
        """Raises ThreadNotStarted."""

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
    def is_main_thread(self) -> bool: ...
    def of_process(self, make: Callable[[], T]) -> T: ...


class _PythonThread(threading.Thread):
    def start(self) -> None:
        try:
            super().start()
        except RuntimeError as error:
            if self.ident is not None:  # it was started before
                raise
            raise ThreadNotStarted(self.name, error) from None


class Python:
    """Python's own threads and clocks."""

    def __init__(self) -> None:
        # Guards `_own`. Reentrant: what is made may need another of these. A child gets a new one, since a thread that
        # it does not have may hold the parent's; what the parent made stays where it is, and is not finalized there.
        self._own_lock = threading.RLock()
        self._own: dict[tuple[int, Callable[[], Any]], Any] = {}
        os.register_at_fork(after_in_child=self._renew_lock)

    now = staticmethod(time.monotonic)  # not wrapped: every wait and every request asks for it

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
        return PythonQueue()

    def thread(self, target: Callable[..., object], name: str, args: tuple[object, ...] = ()) -> Thread:
        return _PythonThread(target=target, args=args, name=name, daemon=True)

    def current_thread(self) -> Thread:
        return threading.current_thread()

    def is_main_thread(self) -> bool:
        return threading.current_thread() is threading.main_thread()

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
        _cancel_all_of(runtime)


def now() -> float:
    """Monotonic seconds."""
    return _runtime.now()


def wall() -> float:
    """Seconds since 1970, for people only: no decision may depend on it."""
    return _runtime.wall()


def lock(name: str) -> Lock:
    """A mutex. `name` is `Class.attribute`, as in the table of locks in docs/architecture.md."""
    return _runtime.lock(name)


def rlock(name: str) -> Lock:
    """A reentrant mutex."""
    return _runtime.rlock(name)


def condition(name: str) -> Condition:
    """A condition with its own reentrant lock, which gets this name."""
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


def is_main_thread() -> bool:
    """Whether this is the thread on which Python runs signal handlers."""
    return _runtime.is_main_thread()


def of_process(make: Callable[[], T]) -> T:
    """The object that `make` made in this process: a process has one of these, and a forked child gets its own."""
    return _runtime.of_process(make)


def sleep(seconds: float) -> None:
    """Wait, when there is no event to wait for."""
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


# -- what is closed when nobody refers to it any longer, or when the process ends -------------------------------------

CLOSERS: Final = 4
"""The most threads that close forgotten objects. One that waits for an unreachable etcd must not delay all."""
EXIT_TIMEOUT: Final = 2.0
"""Seconds that all requests to etcd together may take when the process ends."""


class Stage(enum.IntEnum):
    """The order in which open objects are closed when the process ends; within a stage, the newest first."""

    MEMBERS = 0
    """Objects that write something when they leave, and need their leases for that."""
    LEASES = 1
    CLIENTS = 2
    """What the first two stages need to reach etcd."""
    SERVERS = 3


class DetachedThreads:
    """A few threads that do work found by finalizers. They use no locks, because a finalizer may run in any line that
    allocates, whatever locks are held there: a step of a deque is atomic.

    Args:
        work: does all the work that there is, on any of the threads.
        waiting: true as long as there is work.
        limit: the most threads.
    """

    def __init__(self, work: Callable[[], None], waiting: Sized, limit: int) -> None:
        self._runtime, self._work, self._waiting = _runtime, work, waiting  # never change
        self._permits = deque([None] * limit)  # one for each thread that may be started
        self._ends: set[Event] = set()  # one for each thread: to join a thread that is not started yet is an error

    def start(self) -> None:
        """Call this when there is new work. If no thread can be started, the work waits for the next call."""
        try:
            self._permits.pop()
        except IndexError:  # all are at work, and look at what waits once more after they gave their permits back
            return
        end = self._runtime.event()
        thread = self._runtime.thread(self._run, "ftcoord-forget", (end,))
        self._ends.add(end)
        try:
            thread.start()
        except ThreadNotStarted:
            self._end(end)

    def join(self, deadline: float) -> None:
        """Wait until all work that was begun is done, but not beyond the monotonic deadline."""
        for end in self._ends.copy():
            end.wait(max(deadline - now(), 0))

    def _run(self, end: Event) -> None:
        try:
            self._work()
        finally:
            self._end(end)
            if self._waiting:
                self.start()

    def _end(self, end: Event) -> None:
        end.set()
        self._ends.discard(end)
        self._permits.append(None)


class _Closers:
    """The threads of this process that close forgotten objects."""

    def __init__(self) -> None:
        self._waiting: deque[Ending] = deque()
        self._threads = DetachedThreads(self._close_all, self._waiting, CLOSERS)
        self.join = self._threads.join

    def put(self, ending: Ending) -> None:
        self._waiting.append(ending)
        self._threads.start()

    def _close_all(self) -> None:
        while self._waiting:
            with suppress(IndexError):  # another thread was faster
                self._waiting.popleft().close()


class Ending:
    """Closes an object's resources once: when the object is forgotten, or when the process ends.

    Args:
        close: must not refer to the object, must not start a thread, and must end soon even if etcd is unreachable.
        stage: when it is called at the end of the process.
        late: called there instead of `close` when no time is left; it follows the same rules, and makes no request.
    """

    def __init__(
        self, close: Callable[[], None], stage: Stage = Stage.MEMBERS, late: Callable[[], None] | None = None
    ) -> None:
        self._late = late  # never changes
        self.stage, self._pid, self._runtime = stage, os.getpid(), _runtime  # never change
        self._closers = of_process(_Closers)  # here, for it takes a lock
        self._close = deque([close])  # whoever takes it out closes, or cancels
        self.finalizer: weakref.finalize[..., Any] | None = None
        _endings[self] = None

    @property
    def is_ours(self) -> bool:
        """False in a forked child, and after the end of the simulation in which the object lived."""
        return self._pid == os.getpid() and (self._runtime is _runtime or isinstance(self._runtime, Python))

    def is_of(self, runtime: Runtime) -> bool:
        return self._runtime is runtime

    def close_soon(self) -> None:
        """Close on a thread, for a finalizer. Does nothing in a forked child."""
        if self.is_ours:
            self._closers.put(self)
        else:
            self.cancel()

    def close(self) -> None:
        """Close on this thread, now."""
        close = self._take()
        if close is not None:
            close()

    def close_at_exit(self) -> None:
        """Late requests would only fail, each after a moment of its own, so the leases expire instead."""
        if self.stage >= Stage.LEASES:  # what a thread is closing at this moment needs its lease and its client
            self._closers.join(_exit_deadline)
        if self.stage >= Stage.CLIENTS or now() < _exit_deadline:
            self.close()
        elif self._take() is not None and self._late is not None:
            self._late()

    def cancel(self) -> None:
        """Never close. Idempotent."""
        if self.finalizer is not None:
            self.finalizer.detach()
        self._take()

    def _take(self) -> Callable[[], None] | None:
        _endings.pop(self, None)
        try:
            return self._close.pop()
        except IndexError:
            return None


_endings: dict[Ending, None] = {}
"""All that are not closed, the oldest first. Any thread, one step at a time."""
_exit_deadline = math.inf


def when_forgotten(
    owner: object,
    close: Callable[..., None],
    *arguments: object,
    stage: Stage = Stage.MEMBERS,
    late: Callable[[], None] | None = None,
) -> Callable[[], None]:
    """Call `close(*arguments)` once: when nobody refers to `owner`, or when the process ends.

    The former happens on a thread of ftcoord. The latter happens on the main thread, by `atexit`: other threads still
    run then. Anything that takes longer than `EXIT_TIMEOUT` is given up. In a forked child nothing is called for
    objects of its parent.

    Neither the arguments nor a thread may refer to `owner`; see `Ending` for `close` and `late`. Returns a function
    that cancels this: call it when `owner` is closed.
    """
    ending = Ending(partial(close, *arguments), stage, late)
    ending.finalizer = weakref.finalize(owner, ending.close_soon)
    ending.finalizer.atexit = False
    return ending.cancel


def _cancel_all_of(runtime: Runtime) -> None:
    """For a simulation that has ended: nothing closes its objects any more. What they would have closed refers to all
    of the simulation, which would otherwise stay in memory for as long as the process lives."""
    if not isinstance(runtime, Python):
        for ending in [one for one in _endings.copy() if one.is_of(runtime)]:
            ending.cancel()


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The same bound method, for a thread that must not keep its object alive: does nothing once the object is gone."""
    reference = weakref.WeakMethod(method)

    def call_if_there(*arguments: object) -> None:
        bound = reference()
        if bound is not None:
            bound(*arguments)

    return call_if_there


def exit_deadline() -> float:
    """The monotonic time at which all requests to etcd must have ended; infinity until the process ends."""
    return _exit_deadline


def join(thread: Thread) -> None:
    """Wait until a thread has ended, but not beyond `exit_deadline()`: it may be in a user's callback."""
    thread.join(None if math.isinf(_exit_deadline) else max(_exit_deadline - now(), 0))


@atexit.register
def _close_all() -> None:
    """Registered before any object of ftcoord exists, so users' exit handlers run earlier, and may use everything."""
    global _exit_deadline
    left = [ending for ending in reversed(_endings.copy()) if ending.is_ours]
    _exit_deadline = now() + EXIT_TIMEOUT
    with ExitStack() as stack:  # which calls all, the last one first, though one of them fails
        for ending in sorted(left, key=lambda one: one.stage)[::-1]:
            stack.callback(ending.close_at_exit)
