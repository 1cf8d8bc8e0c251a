"""Records which locks are taken while others are held, and compares that with the table in docs/architecture.md."""

from __future__ import annotations

import ast
import inspect
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar

import ftcoord
from ftcoord import concurrency

T = TypeVar("T")

SOURCES: Final = Path(ftcoord.__file__).parent
VIRTUAL: Final = Path(__file__).parent / "virtual"
TABLE: Final = SOURCES.parent / "docs" / "architecture.md"


HANDED_OVER: Final = frozenset({"MemberKey._writing"})
"""Locks whose taker may go on while somebody else's answer releases them: what it takes says nothing any more when it
has left the function that took them."""


OF_THE_TESTS: Final = frozenset({"Node._heard"})
"""Locks of the tests' doubles."""


@dataclass(frozen=True)
class Taken:
    """One lock was waited for while another one was held."""

    held: str
    taken: str


class Recorder(concurrency.Python):
    """Python's threads, whose named locks note what is held when they are taken. Only waiting counts: whoever just
    tries a lock cannot be part of a deadlock."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()  # guards all below; a leaf: nothing is taken while it is held
        self._held: dict[int, list[Recorded]] = defaultdict(list)
        self.seen: dict[Taken, str] = {}
        """What was taken, and in which thread."""
        self.names: set[str] = set()
        """The locks that were taken at all."""

    def lock(self, name: str) -> concurrency.Lock:
        return Recorded(self, name, threading.Lock())

    def rlock(self, name: str) -> concurrency.Lock:
        return Recorded(self, name, threading.RLock())

    def condition(self, name: str) -> concurrency.Condition:
        return RecordedCondition(self, name)

    def waits_for(self, lock: Recorded) -> None:
        with self._lock:
            self.names.add(lock.name)
            for other in self._held[threading.get_ident()]:
                if other is not lock and not other.is_handed_over():  # the same one is reentrant
                    self.seen.setdefault(Taken(other.name, lock.name), threading.current_thread().name)

    def got(self, lock: Recorded) -> None:
        with self._lock:
            self._held[threading.get_ident()].append(lock)

    def gave(self, lock: Recorded) -> None:
        """Any thread may release a plain lock."""
        with self._lock:
            mine = self._held[threading.get_ident()]
            for locks in [mine, *self._held.values()]:
                if lock in locks:
                    locks.remove(lock)
                    return

    def forget(self, lock: Recorded) -> int:
        """It is given up for a wait; how often it was held."""
        with self._lock:
            mine = self._held[threading.get_ident()]
            count = mine.count(lock)
            self._held[threading.get_ident()] = [one for one in mine if one is not lock]
            return count


def _frames() -> Iterator[FrameType]:
    """What this thread is in, the innermost call first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


class Recorded:
    """A lock with a name."""

    def __init__(self, recorder: Recorder, name: str, inner: Any) -> None:
        self.name = name
        self._recorder, self._inner = recorder, inner
        self._taker: FrameType | None = None  # the holder sets it, before others see that it holds the lock

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if blocking:
            self._recorder.waits_for(self)
        taken = bool(self._inner.acquire(blocking, timeout))
        if taken:
            if self.name in HANDED_OVER:
                self._taker = next(frame for frame in _frames() if frame.f_code.co_filename != __file__)
            self._recorder.got(self)
        return taken

    def is_handed_over(self) -> bool:
        """Asked on the thread that took it. A generator that took it is a `with` block's, and releases it itself."""
        taker = self._taker
        return taker is not None and not taker.f_code.co_flags & inspect.CO_GENERATOR and taker not in _frames()

    def release(self) -> None:
        self._recorder.gave(self)
        self._taker = None  # only now: nobody asks for it any longer
        self._inner.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_error: object) -> None:
        self.release()


class RecordedCondition(Recorded):
    """A condition with a name."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._condition = threading.Condition()
        super().__init__(recorder, name, self._condition)

    def __getattr__(self, name: str) -> Any:
        """What tests look at: Python's own condition."""
        return getattr(self._condition, name)

    def wait(self, timeout: float | None = None) -> bool:
        count = self._recorder.forget(self)
        try:
            return self._condition.wait(timeout)
        finally:
            for _ in range(count):
                self._recorder.got(self)

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        count = self._recorder.forget(self)

        def judge() -> T:  # runs with the lock held
            self._recorder.got(self)
            try:
                return predicate()
            finally:
                self._recorder.forget(self)

        try:
            return self._condition.wait_for(judge, timeout)
        finally:
            for _ in range(count):
                self._recorder.got(self)

    def notify(self, n: int = 1) -> None:
        self._condition.notify(n)

    def notify_all(self) -> None:
        self._condition.notify_all()


@contextmanager
def recorded() -> Iterator[Recorder]:
    """Record what is made meanwhile; in the end it must be as the table says."""
    recorder = Recorder()
    with concurrency.use(recorder):
        yield recorder
    check(recorder)


def check(recorder: Recorder) -> None:
    allowed = table()
    ours = {taken: thread for taken, thread in recorder.seen.items() if taken.taken not in OF_THE_TESTS}
    wrong = {taken: thread for taken, thread in ours.items() if taken.taken not in allowed.get(taken.held, ())}
    assert not wrong, f"not in the table of locks in docs/architecture.md: {wrong}"


def table() -> dict[str, frozenset[str]]:
    """Which locks may be taken while one is held, by its name: the table "Locks" in docs/architecture.md."""
    text = TABLE.read_text(encoding="utf-8").partition("\n## Locks\n")[2].partition("\n## ")[0]
    groups = {word: _names(meaning) for word, meaning in re.findall(r"^- \*([^*]+)\*: (.*?)[;.]$", text, re.M | re.S)}
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| `")]
    found: dict[str, frozenset[str]] = {}
    for names, _guards, taken, _callbacks in rows:
        after = _names(taken).union(*(meant for word, meant in groups.items() if word in taken))
        for name in _names(names):
            assert name not in found, f"{name} stands in the table twice"
            found[name] = after
    return found


def _names(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"`([^`]+)`", text))


def order(allowed: dict[str, frozenset[str]]) -> list[str]:
    """The locks, so that each is taken before those behind it. Raises CycleError where there is no such order."""
    return [*TopologicalSorter({name: set(after) for name, after in allowed.items()}).static_order()][::-1]


def in_source() -> set[str]:
    """The names of all locks of ftcoord, and of the etcd in memory."""
    names = set[str]()
    for path in [*SOURCES.rglob("*.py"), *VIRTUAL.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                made = isinstance(node.func.value, ast.Name) and node.func.value.id == "concurrency"
                if made and node.func.attr in ("lock", "rlock", "condition") and isinstance(node.args[0], ast.Constant):
                    names.add(str(node.args[0].value))
    return names
