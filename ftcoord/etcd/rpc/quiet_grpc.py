"""Loads gRPC so that it writes no log lines to the user's terminal and installs no handlers around `fork()`.

Import `grpc` from here, and nowhere else.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from ftcoord.errors import ForkedProcessError

__all__ = ["grpc", "quiet_grpc"]

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
