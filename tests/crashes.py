"""Notices which processes of the tests crash, whatever their test looks at: one that is killed in the end, or whose
answer was complete, may have died of a segmentation fault before."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

SIGNALS: Final = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}
"""Those that no test sends."""
_crashed: list[str] = []
"""Since it was last asked for; any thread may append."""


class NoticedPopen(subprocess.Popen[Any]):
    """Every way to learn a process's end leads through one of these two."""

    def poll(self) -> int | None:
        known, code = self.returncode, super().poll()
        self._notice(known, code)
        return code

    def wait(self, timeout: float | None = None) -> int:
        known, code = self.returncode, super().wait(timeout)
        self._notice(known, code)
        return code

    def _notice(self, known: int | None, code: int | None) -> None:
        if known is None and code is not None and -code in SIGNALS:
            _crashed.append(f"{self.args!r} (process {self.pid}) ended by {signal.Signals(-code).name}")


@contextmanager
def noticed() -> Iterator[None]:
    """While this is open, every process that is started is looked at when it ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", NoticedPopen)
        yield


def crashed() -> list[str]:
    """The processes that crashed since this was last called."""
    said = _crashed.copy()
    del _crashed[: len(said)]
    return said
