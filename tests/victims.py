"""Processes with leases that the tests of the sentinel kill in many ways: see mourned.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import mourned
from helpers import DEADLINE, eventually

from ftcoord.etcd.client import EtcdClient
from ftcoord.primitives.deaths import cause_of_death

LONG_TTL = 600
"""Seconds: what ends before has not ended by time."""
SHORT_TTL = 2
KILLED = "was killed by signal 9 (SIGKILL)"
PROGRAM = str(Path(mourned.__file__))


class Holder:
    """A process with a lease and a sentinel, and a key under that lease.

    Args:
        told: what the process says of itself.
    """

    def __init__(self, told: str, client: EtcdClient, deaths: str) -> None:
        self._client, self._deaths = client, deaths
        self.pid, self.lease, self.sentinel = map(int, told.split())
        self.key = f"{deaths}/key-{self.pid}"
        client.put(self.key, b"", self.lease)

    def await_end(self) -> str:
        """Wait until the lease has ended; the cause."""
        eventually(lambda: not self.lives(), f"the lease of process {self.pid} has ended")
        return cause_of_death(self._client, self._deaths, self.lease)

    def lives(self) -> bool:
        return self._client.get(self.key).one is not None

    def await_end_of(self, pid: int) -> None:
        eventually(lambda: not runs(pid), f"process {pid} has ended")


class Victim(Holder):
    """One of its own session, that does what it is told."""

    def __init__(self, process: subprocess.Popen[str], client: EtcdClient, deaths: str) -> None:
        self._process = process
        super().__init__(self.answer(), client, deaths)

    def answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def does(self, line: str) -> str:
        self.tell(line)
        return self.answer().strip()

    def await_end_of_errors(self) -> None:
        """Nobody has its standard error open any longer."""
        errors = self._process.stderr
        assert errors is not None
        os.set_blocking(errors.fileno(), False)

        def is_at_end() -> bool:
            try:
                return not os.read(errors.fileno(), 65536)
            except BlockingIOError:
                return False

        eventually(is_at_end, "the end of what it says")

    def other_sentinel(self) -> int:
        """Wait until it has another one."""
        return int(eventually(lambda: {self.does("pid")} - {str(self.sentinel), "None"}, "another sentinel").pop())

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        self._process.kill()


def runs(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def sentinels_of(pid: int) -> list[int]:
    """The processes that stand, or stood, beside this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            if words[1:4] == [b"-m", b"ftcoord.primitives.sentinel_main", b"%d" % pid]:
                found.append(int(path.name))
    return found


@contextmanager
def a_process(
    endpoint: str, client: EtcdClient, deaths: str, ttl: int = LONG_TTL, stderr: Any = None, **env: str
) -> Iterator[Victim]:
    """One; with all that it has started it is killed in the end, and its sentinel has ended then."""
    process = subprocess.Popen(
        [sys.executable, PROGRAM, endpoint, deaths, str(ttl)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
        env={**os.environ, **env},
    )
    try:
        yield Victim(process, client, deaths)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the children that it has forked
        process.wait(DEADLINE)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        eventually(lambda: not any(map(runs, sentinels_of(process.pid))), "no sentinel is left")
