"""gRPC, so that it writes no log lines to the user's terminal, installs no handlers around `fork()`, and hangs no exit.

Import `grpc` from here, and nowhere else.

gRPC gives each stream a daemon thread that sends, and one that receives. When Python exits it stops daemon threads
wherever they are, even while they hold their stream's lock. The stream's finalizer then waits for the lock forever, and
so does the process. Our own threads in a call would be stopped inside gRPC's native code.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from ftcoord import concurrency
from ftcoord.errors import ForkedProcessError

__all__ = ["grpc", "quiet_grpc"]

T = TypeVar("T")

log = logging.getLogger(__name__)

_FORKING: Final = "GRPC_ENABLE_FORK_SUPPORT"
_OURS: Final[Mapping[str, str]] = {"GRPC_VERBOSITY": "NONE", _FORKING: "0"}
"""gRPC's defaults are log lines on the user's terminal, and handlers around `fork()` with which a parent loses messages
of its streams without notice: 6 of 22,265 watch events in 11,059 forks, and children crash in a
thread that the handlers start there: 5 of 5,400."""
_OFF: Final = frozenset({"0", "f", "false", "n", "no"})
_first_pid: int | None = None
"""The process that made the first channel: this one, or the one that it was forked from."""


@contextmanager
def quiet_grpc() -> Iterator[None]:
    """Enter this around the creation of channels and servers.

    Raises ForkedProcessError in a forked child of a process that ever made one, even if it was closed since: gRPC's
    threads and locks belong to the process, not to a channel. In the child the locks stay as they were at the `fork()`,
    and the threads are gone.
    """
    global _first_pid, _warning
    if _first_pid is None:
        _first_pid = os.getpid()
    elif _first_pid != os.getpid():
        raise ForkedProcessError.of("the parent process has used etcd before")
    if _warning:
        warning, _warning = _warning, ""
        log.warning("%s", warning)
    with _settings():
        yield


@contextmanager
def _settings() -> Iterator[None]:
    """Enter this around anything that makes gRPC read its settings. The user's own settings take precedence.

    gRPC reads them once per process: when it is loaded (1.76 and 1.85), or with the first channel or server (1.60 to
    1.70). Nothing else must find them in the environment.
    """
    before = {name: os.environ.get(name) for name in _OURS}
    os.environ.update({name: value for name, value in _OURS.items() if not before[name]})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _warning_of_handlers() -> str:
    """The warning for a user whose gRPC handlers around `fork()` are on, or may be."""
    setting = os.environ.get(_FORKING, "")
    if setting.lower() in _OFF or not (setting or "grpc" in sys.modules):
        return ""
    why = f"{_FORKING} is {setting!r}" if setting else "grpc was imported before ftcoord, which switches this off"
    return (
        f"{why}: this process may miss changes in etcd, without notice, when it forks, and its children may crash; set"
        f" {_FORKING}=0"
    )


_warning = _warning_of_handlers()
with _settings():
    import grpc


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
