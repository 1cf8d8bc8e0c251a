"""torchrun agents as child processes: started, killed, and never left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ftcoord.config import without_etcd


class Agent:
    """One torchrun agent; its output, and that of its workers, goes to `<folder>/<name>.log`.

    `program` is the module that is run as torchrun; `variables` are added to its environment,
    which names no other etcd.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        torchrun: Sequence[str],
        script: Sequence[str],
        program: str = "torch.distributed.run",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.lost = False
        self.log = folder / f"{name}.log"
        command = [sys.executable, "-m", program, *torchrun, *script]
        ours = {"DEMO_AGENT": name, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment = {**without_etcd(os.environ), **ours, **(variables or {})}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def last_words(self, count: int) -> str:
        """The last `count` lines of its log, as a paragraph for a message."""
        lines = self.log.read_text(errors="replace").splitlines()[-count:] or ["(empty)"]
        return "\n  ".join([f"the end of {self.log}:", *lines])

    def kill(self) -> None:
        """SIGKILL the agent alone, as a user does it, or a kernel without memory: its worker is left behind."""
        self.lost = True
        self.process.kill()
        self.process.wait()

    def stop(self, timeout: float = 20) -> None:
        """SIGTERM, which torchrun passes on to its workers; after `timeout` seconds SIGKILL."""
        if self.process.poll() is not None:
            return
        workers = descendants(self.pid)
        self.process.terminate()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            _signal(workers, signal.SIGKILL)


@contextlib.contextmanager
def no_orphans() -> Iterator[None]:
    """On exit, kill the processes that were started below this one meanwhile, even those that lost their parent.

    On Linux only. A torchrun that gets SIGTERM just as it starts a worker ends without ending that worker.
    """
    before = descendants(os.getpid())
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(
            pr_set_child_subreaper, 1, 0, 0, 0
        )  # processes that lose their parent become children of this one
    try:
        yield
    finally:
        _signal([pid for pid in descendants(os.getpid()) if pid not in before], signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """The processes below `pid`, parents first."""
    parents = _parents()
    found = [pid]
    for one in found:
        found.extend(child for child, parent in parents.items() if parent == one)
    return found[1:]


def _parents() -> dict[int, int]:
    """The parent of every process: from /proc, or where there is none from ps."""
    if not Path("/proc/self/stat").exists():
        table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        return {int(child): int(parent) for child, parent in (line.split() for line in table.splitlines())}
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return parents


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
