"""How an agent's workers ended, from what torch gave them and what they left: ranks, exit codes, error files.

torch's agent gives each worker RANK and LOCAL_RANK, and in TORCHELASTIC_ERROR_FILE a file to which `record` writes the
exception of its main function (https://docs.pytorch.org/docs/stable/elastic/errors.html).
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ftcoord.core.history import first_failure
from ftcoord.core.rendezvous_records import WorkerFailure, clipped
from ftcoord.proc import environment_of, fate_of

LARGEST_ERROR_FILE: Final = 1 << 20
"""Bytes. Larger error files are ignored."""


class Raised(NamedTuple):
    """A worker's exception: its type and text, and the head of the traceback; empty if it left none."""

    exception: str
    traceback: str


NOTHING_RAISED: Final = Raised("", "")


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A worker, as its agent started it. Ranks are -1 if its environment has none.

    Args:
        error_file: where it writes its exception; empty for nowhere.
    """

    pid: int
    rank: int = -1
    local_rank: int = -1
    error_file: str = ""

    @classmethod
    def of(cls, pid: int) -> WorkerProcess:
        """A running process. Raises OSError if it has ended."""
        given = environment_of(pid)
        rank, local_rank = (_number(given.get(name, "")) for name in ("RANK", "LOCAL_RANK"))
        return cls(pid, rank, local_rank, given.get("TORCHELASTIC_ERROR_FILE", ""))

    def raised(self) -> Raised:
        """The exception that it has written so far."""
        return raised_in(self.error_file) if self.error_file else NOTHING_RAISED

    def has_raised_before(self, time: float) -> bool:
        """Whether it had written an exception by then, on this host's wall clock."""
        try:
            return bool(self.error_file) and os.path.getmtime(self.error_file) <= time and bool(self.raised().exception)
        except OSError:
            return False

    def failure(self, status: int | None, *, was_oom: bool = False, timer: str = "") -> WorkerFailure:
        """How it ended.

        Args:
            status: its status, as `os.wait` returns it; None if it has not ended, or the status is unknown.
            was_oom: whether the kernel killed a process of its control group for lack of memory.
            timer: the expiration timer for which it was killed.
        """
        raised, number = self.raised(), 0 if status is None else status & 0x7F
        code = -1 if status is None or number else status >> 8 & 0xFF
        fate = fate_of(status, was_oom)
        return clipped(WorkerFailure(self.pid, self.rank, self.local_rank, code, number, fate, *raised, timer))


def raised_in(error_file: str) -> Raised:
    """The exception in torch's error file."""
    try:
        text = _text_in(error_file)
        found = json.loads(text.decode("utf-8", errors="replace")) if len(text) <= LARGEST_ERROR_FILE else None
    except (OSError, ValueError, RecursionError):  # none, or not whole: nothing depends on it but a text
        return NOTHING_RAISED
    return _raised(found)


def _text_in(error_file: str) -> bytes:
    """At most one byte more than `LARGEST_ERROR_FILE`. Raises OSError if it is no file.

    The worker may have made anything of it. A pipe, a device, or a link to one would hold up the agent, or never end.
    """
    with open(error_file, "rb", opener=_open_no_link) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is no regular file")
        return file.read(LARGEST_ERROR_FILE + 1)


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)


def failure_in(error: ChildFailedError) -> WorkerFailure | None:
    """Why torch's agent has given up, in its own words: for an agent whose workers nobody else saw end."""
    failures = []
    for rank, one in error.failures.items():
        number, code = max(-one.exitcode, 0), max(one.exitcode, -1)
        status = number or code << 8
        raised = _raised(one.error_file_data)
        fate = fate_of(status)
        failures.append(clipped(WorkerFailure(one.pid, rank, one.local_rank, code, number, fate, *raised)))
    return first_failure(failures)


def _raised(found: Any) -> Raised:
    message = found.get("message") if isinstance(found, Mapping) else None
    if not isinstance(message, Mapping):
        return NOTHING_RAISED
    extra = message.get("extraInfo")
    traceback = extra.get("py_callstack") if isinstance(extra, Mapping) else ""
    text = str(message.get("message") or "")
    return Raised(" ".join(text.split()), str(traceback or ""))


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
