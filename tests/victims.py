"""Processes with leases that the tests of the sentinel kill in many ways.

`python victims.py ENDPOINT DEATHS TTL` is one of them. It writes its lease and its sentinel's pid, and then does what
it reads, a line each: a method, and its arguments. VICTIM_GROUP is a control group that it goes into; with
VICTIM_NO_PIDFD there are no pidfds.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from helpers import DEADLINE, eventually

import ftcoord
from ftcoord.etcd.client import EtcdClient
from ftcoord.primitives.deaths import cause_of_death
from ftcoord.primitives.sentinel import Sentinel

LONG_TTL = 600
"""Seconds: what ends before has not ended by time."""
SHORT_TTL = 2
KILLED = "was killed by signal 9 (SIGKILL)"
PROGRAM = str(Path(__file__))


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


FOREVER = 600.0


class Program:
    """What the process has, and does when it is told."""

    def __init__(self, endpoint: str, deaths: str, ttl: str) -> None:
        self._given = endpoint, deaths, ttl
        self._client = ftcoord.EtcdClient(endpoint)
        self._session = self._open()
        self._sentinel = Sentinel.of_process()

    def _open(self) -> ftcoord.Session:
        _, deaths, ttl = self._given
        return ftcoord.Session(self._client, int(ttl), deaths=deaths)

    def told(self) -> str:
        sentinel = self._sentinel
        pid = eventually(lambda: sentinel.pid, "the sentinel runs") if sentinel is not None else 0
        return f"{os.getpid()} {self._session.lease_id} {pid}"

    # -- the verbs ----------------------------------------------------------------------------------------------

    def pid(self) -> str:
        """The sentinel's."""
        return str(self._sentinel.pid if self._sentinel is not None else 0)

    def close(self) -> None:
        self._session.close()

    def exit(self, code: str) -> None:
        os._exit(int(code))

    def signal(self, name: str) -> None:
        os.kill(os.getpid(), getattr(signal, name))

    def group(self) -> None:
        """Kill this process's group."""
        os.killpg(0, signal.SIGKILL)

    def session(self) -> None:
        """Kill all processes of this one's session, this one last."""
        for path in Path("/proc").glob("[0-9]*"):
            pid = int(path.name)
            if pid != os.getpid() and _session_of(pid) == os.getsid(0):
                os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def exec(self) -> None:
        os.execvp("sleep", ["sleep", str(FOREVER)])

    def hang(self, seconds: str) -> None:
        """In C, with the interpreter's lock held."""
        ctypes.PyDLL(None).usleep(int(float(seconds) * 1e6))

    def fork(self) -> None:
        if os.fork() == 0:
            time.sleep(FOREVER)

    def fork_in_c(self) -> None:
        """As a library does it, of whose children Python knows nothing."""
        if ctypes.PyDLL(None).fork() == 0:
            time.sleep(FOREVER)

    def daemon(self) -> None:
        """Become another process, as a daemon does. It ends with the test, whose signals do not reach it."""
        if os.fork():
            os._exit(0)
        os.setsid()
        if os.fork():
            os._exit(0)
        while os.read(0, 1):
            pass
        os._exit(0)

    def child(self) -> None:
        subprocess.run(["true"], check=True)

    def eat(self) -> None:
        """Memory, for ever."""
        eaten = []
        while True:
            eaten.append(bytearray(b"x") * (1 << 24))


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def _no_pidfd(_pid: int) -> int:
    raise OSError(errno.ENOSYS, "there are none")


def main() -> None:
    with open(os.dup(0)) as commands, open(os.dup(1), "w") as answers:
        if os.environ.get("VICTIM_NO_PIDFD"):
            os.pidfd_open = _no_pidfd
        if group := os.environ.get("VICTIM_GROUP"):
            Path(group, "cgroup.procs").write_text(str(os.getpid()))
        program = Program(*sys.argv[1:])
        print(program.told(), file=answers, flush=True)
        for line in commands:
            verb, *arguments = line.split()
            print(getattr(program, verb)(*arguments) or "done", file=answers, flush=True)


if __name__ == "__main__":
    main()
