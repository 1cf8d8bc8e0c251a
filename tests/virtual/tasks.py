"""Threads, locks, conditions, events and queues of a `Scheduler`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, MutableSequence
from typing import TYPE_CHECKING, Any, TypeVar

from ftcoord.concurrency import Empty

if TYPE_CHECKING:
    from virtual.scheduler import Scheduler

T = TypeVar("T")


def forget(waiting: MutableSequence[Task], task: Task) -> None:
    """Take a task whose time-out is over out of those that wait, unless somebody did who meant to wake it."""
    if task in waiting:
        waiting.remove(task)


def wake_one(world: Scheduler, waiting: deque[Task]) -> None:
    """Wake who waits first; one whose time-out is over already does not count, or nobody would be woken."""
    while waiting and not world.wake(waiting.popleft()):
        pass


class Task:
    """One thread. See `ftcoord.concurrency.Thread`."""

    def __init__(self, world: Scheduler, target: Callable[[], object], name: str, process: str, number: int) -> None:
        self.name, self.process, self.target = name, process, target
        self.done = False
        self.greenlet: Any = None
        self.waits_for: object = None
        self.woken = False
        self.parked = 0
        self.abroad = 0
        """Locks it holds that another process made: it is in a server then, which its own pause must not stop."""
        self._world, self._number = world, number
        self._joining: list[Task] = []

    @property
    def ident(self) -> int | None:
        return self._number if self.greenlet is not None else None

    def start(self) -> None:
        if self.greenlet is not None:
            raise RuntimeError("threads can only be started once")
        self._world.start(self)

    def is_alive(self) -> bool:
        return self.greenlet is not None and not self.done

    def join(self, timeout: float | None = None) -> None:
        world = self._world
        world.preempt()
        if not self.is_alive():
            return
        if self is world.current:
            raise RuntimeError("cannot join current thread")
        self._joining.append(world.current)
        if not world.park(f"the end of {self.name}", timeout):
            forget(self._joining, world.current)

    def finish(self) -> None:
        """Tell those who wait for its end."""
        self.done = True
        for task in self._joining:
            self._world.wake(task)
        self._joining.clear()

    def __repr__(self) -> str:
        return f"Task({self.name!r} of {self.process!r})"


class TaskLock:
    """A lock, reentrant or not; whoever comes first may take it, also before those that wait."""

    def __init__(self, world: Scheduler, name: str, reentrant: bool = False) -> None:
        self.name = name
        self._world, self._reentrant = world, reentrant
        self._process, self._abroad = world.process_now, False
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = self._world
        if world.ending:
            world.go_on_at_the_end()
            return True  # nobody else goes on
        world.preempt()
        me = world.running
        assert me is not None  # or `preempt` would have raised
        if not (self._reentrant and self._owner is me):
            if self._owner is not None and not (blocking and self._await(me, timeout)):
                return False
            self._owner, self._abroad = me, me.process != self._process
            me.abroad += self._abroad
        self._depth += 1
        return True

    def release(self, *_error: object) -> None:
        world, owner = self._world, self._owner
        if world.ending:
            return  # who was ended in a wait() does not hold its lock
        if owner is None or (self._reentrant and owner is not world.running):
            raise RuntimeError(f"{self.name} is released by who does not hold it")
        self._depth -= 1
        if self._depth == 0:
            owner.abroad -= self._abroad
            self._owner = None
            if self._waiting:
                wake_one(world, self._waiting)
            world.preempt()

    __enter__, __exit__ = acquire, release

    def _await(self, me: Task, timeout: float) -> bool:
        """Wait until nobody holds it, which is not meant for its owner; False when the time-out was over before."""
        world = self._world
        deadline = None if timeout < 0 else world.time + timeout
        while self._owner is not None:
            left = None if deadline is None else deadline - world.time
            if left is not None and left <= 0:
                return False
            self._waiting.append(me)
            if not world.park(self, left):
                forget(self._waiting, me)
        return True

    def is_mine(self) -> bool:
        """Whether the running task holds it."""
        return self._world.ending or (self._owner is not None and self._owner is self._world.running)

    def let_go(self) -> int:
        """Release it however often it was taken; how often."""
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def take_again(self, depth: int) -> None:
        """The opposite of `let_go()`."""
        self.acquire()
        self._depth = depth

    def __repr__(self) -> str:
        return f"lock {self.name}" + (
            f", which {self._owner.name} of {self._owner.process} holds" if self._owner else ""
        )


class TaskCondition(TaskLock):
    """A condition with a reentrant lock of its own."""

    def __init__(self, world: Scheduler, name: str) -> None:
        super().__init__(world, name, reentrant=True)
        self._news = f"news of {name}"
        self._sleepers: list[Task] = []

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_mine():
            raise RuntimeError(f"{self.name} is waited for without its lock")
        me = self._world.current
        self._sleepers.append(me)
        depth = self.let_go()
        try:
            # A notification may have come while the lock was let go.
            woken = me not in self._sleepers or self._world.park(self._news, timeout)
        finally:
            forget(self._sleepers, me)
        self.take_again(depth)
        return woken

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        deadline = None if timeout is None else self._world.time + timeout
        while not (result := predicate()):
            left = None if deadline is None else deadline - self._world.time
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        if not self.is_mine():
            raise RuntimeError(f"{self.name} is notified without its lock")
        if self._sleepers:
            woken, self._sleepers = self._sleepers[:n], self._sleepers[n:]
            for task in woken:
                self._world.wake(task)

    def notify_all(self) -> None:
        self.notify(len(self._sleepers))


class TaskEvent:
    """An event."""

    def __init__(self, world: Scheduler) -> None:
        self._world = world
        self._set = False
        self._sleepers: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        sleepers, self._sleepers = self._sleepers, []
        for task in sleepers:
            self._world.wake(task)
        self._world.preempt()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        self._world.preempt()
        if not self._set:
            me = self._world.current
            self._sleepers.append(me)
            if not self._world.park("an event", timeout):
                forget(self._sleepers, me)
        return self._set


class TaskQueue:
    """A queue without a bound."""

    def __init__(self, world: Scheduler) -> None:
        self._world = world
        self._items: deque[Any] = deque()
        self._sleepers: deque[Task] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._sleepers:
            wake_one(self._world, self._sleepers)
        self._world.preempt()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        world = self._world
        world.preempt()
        deadline = None if timeout is None else world.time + timeout
        while not self._items:
            left = None if deadline is None else deadline - world.time
            if not block or (left is not None and left <= 0):
                raise Empty
            me = world.current
            self._sleepers.append(me)
            if not world.park("a queue", left):
                forget(self._sleepers, me)
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items
