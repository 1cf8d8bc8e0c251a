"""Threads and time: every lock, wait, thread and clock of ftcoord is made here.

In a user's process these are Python's own. `tests/virtual` replaces them with a scheduler and a virtual clock, so
that the same code runs deterministically, and a test can check the order in which locks are taken.

An object stays in the world that it was made in: `use` another one before.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Final, Generic, TypeAlias, TypeVar

from ftcoord.closing import Closing
from ftcoord.errors import ClientClosed, EtcdError, StateError, ThreadNotStarted
from ftcoord.log_once import LogOnce

T = TypeVar("T")

LONGEST_WAIT: Final = threading.TIMEOUT_MAX
"""Seconds: a lock refuses longer waits."""

Empty = queue.Empty
"""The error of `Queue.get` after its timeout."""


Event: TypeAlias = threading.Event
Condition: TypeAlias = threading.Condition
Lock: TypeAlias = "threading.Lock | threading.RLock"
Thread: TypeAlias = threading.Thread
"""What the functions below make. In virtual time these are objects of the same form."""


class _Thread(threading.Thread):
    def start(self) -> None:
        """Raises ThreadNotStarted."""
        try:
            super().start()
        except RuntimeError as error:
            if self.ident is not None:  # it was started before
                raise
            raise ThreadNotStarted(self.name, error) from None


class Queue(Generic[T]):
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
            left = deadline - time.monotonic()
            if not block or not self._nothing_new.acquire(timeout=-1 if left > LONGEST_WAIT else max(left, 0)):
                raise Empty

    def empty(self) -> bool:
        return not self._items

    def _wake_one(self) -> None:
        if self._nothing_new.locked():
            with suppress(RuntimeError):  # another thread has just released it
                self._nothing_new.release()


_world: Any = None
"""A simulation with a method for each of the functions below; None for Python's own threads and clocks."""


@contextmanager
def use(world: object) -> Iterator[None]:
    """Have everything that is made meanwhile, in the whole process, made by this simulation. For tests."""
    global _world
    before, _world = _world, world
    try:
        yield
    finally:
        _world = before
        # Nothing closes its objects any more. What they would have closed refers to all of the simulation, which would
        # otherwise stay in memory for as long as the process lives.
        for end in [end for end in _ends.copy() if end.world is world]:
            end.cancel()


def now() -> float:
    """Monotonic seconds."""
    return time.monotonic() if _world is None else float(_world.now())


def wall() -> float:
    """Seconds since 1970, for people only: no decision may depend on it."""
    return time.time() if _world is None else float(_world.wall())


def lock(name: str) -> Lock:
    """A mutex. `name` is `Class.attribute`, by which a deadlock in virtual time is reported."""
    return _world.lock(name) if _world else threading.Lock()


def rlock(name: str) -> Lock:
    """A reentrant mutex."""
    return _world.rlock(name) if _world else threading.RLock()


def condition(name: str) -> Condition:
    """A condition with its own reentrant lock, which gets this name."""
    return _world.condition(name) if _world else threading.Condition()


def event() -> Event:
    return _world.event() if _world else threading.Event()


def inbox() -> Queue[Any]:
    """A queue without a bound."""
    return _world.queue() if _world else Queue()


def thread(target: Callable[..., object], name: str, *args: object) -> Thread:
    """A daemon thread, not yet started."""
    return _thread_in(_world, target, name, *args)


def _thread_in(world: Any, target: Callable[..., object], name: str, *args: object) -> Thread:
    made: Thread = (
        world.thread(target, name, args) if world else _Thread(target=target, args=args, name=name, daemon=True)
    )
    return made


def current_thread() -> Thread:
    """The thread that runs this."""
    return _world.current_thread() if _world else threading.current_thread()


def is_main_thread() -> bool:
    """Whether this is the thread on which Python runs signal handlers."""
    return _world.is_main_thread() if _world else threading.current_thread() is threading.main_thread()


_own: dict[tuple[int, Callable[[], Any]], Any] = {}
"""What `of_process` returned, by the pid. What a parent made stays here in its child, and is not finalized there."""
_own_lock = threading.RLock()
"""Guards `_own`. Reentrant: what is made may need another of these."""


def _renew_lock() -> None:
    global _own_lock
    _own_lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)  # a thread that the child does not have may hold its parent's


def of_process(make: Callable[[], T]) -> T:
    """The object that `make` made in this process: a process has one of these, and a forked child gets its own."""
    found: T
    if _world:
        found = _world.of_process(make)
        return found
    with _own_lock:
        key = (os.getpid(), make)
        if key not in _own:
            _own[key] = make()
        found = _own[key]
        return found


def sleep(seconds: float) -> None:
    """Wait, when there is no event to wait for."""
    event().wait(seconds)


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

EXIT_TIMEOUT: Final = 2.0
"""Seconds that all requests to etcd together may take when the process ends."""
_exit_deadline = math.inf


class _End:
    """Closes an object's resources once: on a thread when the object is dropped, or when the process ends."""

    def __init__(self, owner: object, close: Callable[[], None], last: bool) -> None:
        self.last, self.pid, self.world, self.done = last, os.getpid(), _world, event()  # never change
        self._close = [close]  # who takes it out closes
        self._finalizer = weakref.finalize(owner, self.dropped)
        self._finalizer.atexit = False
        _ends[self] = None

    def dropped(self) -> None:
        """Python calls this in any line that allocates, whatever locks are held there: it only starts a thread. If none
        can be started, the end of the process closes the object. Does nothing in a forked child."""
        if self.pid == os.getpid():
            with suppress(ThreadNotStarted):
                _thread_in(self.world, self.close, "ftcoord-forget").start()

    def close(self) -> None:
        """Or wait, at the end of the process, for the thread that does."""
        try:
            close = self._close.pop()
        except IndexError:
            self.done.wait(max(_exit_deadline - now(), 0))
            return
        try:
            if self.last or now() < _exit_deadline:  # else each request would fail after a moment of its own
                close()
        finally:
            self.done.set()
            _ends.pop(self, None)

    def cancel(self) -> None:
        """Never close. Idempotent."""
        self._close.clear()
        self._finalizer.detach()
        _ends.pop(self, None)


_ends: dict[_End, None] = {}
"""Those of all open objects, the oldest first. Any thread, one step at a time."""


def when_forgotten(
    owner: object, close: Callable[..., None], *arguments: object, last: bool = False
) -> Callable[[], None]:
    """Call `close(*arguments)` once: when nobody refers to `owner`, or when the process ends.

    The former happens on a thread of ftcoord. The latter happens on the main thread, by `atexit`: other threads still
    run then. Objects that are `last` (leases, clients, servers) come after those that need them for their last writes;
    of each kind the newest comes first. Anything that takes longer than `EXIT_TIMEOUT` is given up. In a forked child
    nothing is called for objects of its parent.

    Neither the arguments nor a thread may refer to `owner`: it would stay open until the process ends. `close` must end
    soon even if etcd is unreachable. Returns a function that cancels this: call it when `owner` is closed.
    """
    return _End(owner, partial(close, *arguments), last).cancel


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
    _exit_deadline = now() + EXIT_TIMEOUT
    with ExitStack() as stack:  # which calls all, the last one first, though one of them fails
        for end in sorted(_ends.copy(), key=lambda one: not one.last):
            if end.pid == os.getpid():
                stack.callback(end.close)


# -- a thread that takes one step after another -----------------------------------------------------------------------

log = logging.getLogger(__name__)

STEP_RETRY_PAUSE: Final = 0.5
"""Seconds until a failed step is repeated."""


class StepThread(Closing):
    """Takes steps from `start()` to `close()`.

    Args:
        step: called on the thread again and again; it waits for events itself. After an EtcdError or a StateError,
            which is logged once, it is called again half a second later.
        name: the thread's name.
        wake: makes a waiting step, or else the next one, return. Called by `close()`, from any thread.
        end: called on the thread when it ends, for whatever reason.
        failed: called on the thread with the error that ended it: ClientClosed, or an unexpected error, which is
            logged. Not called after a `close()` that came first.
    """

    def __init__(
        self,
        step: Callable[[], None],
        name: str,
        wake: Callable[[], None],
        end: Callable[[], None],
        failed: Callable[[BaseException], object],
    ) -> None:
        self._step, self._wake, self._end, self._failed = step, wake, end, failed  # never change
        self._closed = event()
        self._problem = LogOnce(log)  # only the thread
        self._thread = thread(self._run, name)

    @property
    def closed(self) -> bool:
        """Whether `close()` was called: a step in progress must not report anything any more."""
        return self._closed.is_set()

    def start(self) -> None:
        """Start the thread; call it once. Raises ThreadNotStarted."""
        self._thread.start()

    def close(self) -> None:
        """Take no further step. Waits for one in progress, unless that calls this. Idempotent."""
        self._closed.set()
        self._wake()
        if self._thread.ident is not None and self._thread is not current_thread():
            join(self._thread)

    def _run(self) -> None:
        try:
            while not self.closed:
                self._try_step()
        except ClientClosed as error:
            log.debug("%s ends: %s", self._thread.name, error)
            if not self.closed:
                self._failed(error)
        finally:
            self._end()
            failure = sys.exc_info()[1]
            if failure is not None:
                if not self.closed:  # before the line: whoever has read that asks the owner
                    self._failed(failure)
                log.exception("%s failed, and does nothing more", self._thread.name)

    def _try_step(self) -> None:
        try:
            self._step()
        except ClientClosed:
            raise
        except (EtcdError, StateError) as error:
            self._problem.say(f"{self._thread.name} cannot go on for now: {error}")
            self._closed.wait(STEP_RETRY_PAUSE)
        else:
            self._problem.forget()
