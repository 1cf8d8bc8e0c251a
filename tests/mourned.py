"""A process with leases, for the tests of its sentinel: `python mourned.py ENDPOINT DEATHS TTL`.

It says its lease and its sentinel's pid, and then does what comes in, a line each: a method, and its arguments.
MOURNED_CLOSED names standard streams that it closes first, by their numbers, and MOURNED_GROUP a control group that it
goes into; with MOURNED_NO_PIDFD there are no pidfds. MOURNED_WAS names the members that it was, with blanks between.
"""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from helpers import eventually

import ftcoord
from ftcoord.primitives.sentinel import Sentinel

FOREVER = 600.0


class Mourned:
    """What the process has, and does when it is told."""

    def __init__(self, endpoint: str, deaths: str, ttl: str) -> None:
        self._given = endpoint, deaths, ttl
        self._client = ftcoord.EtcdClient(endpoint)
        self._session = self._open()
        self._sentinel = Sentinel.of_process()

    def _open(self) -> ftcoord.Session:
        _, deaths, ttl = self._given
        return ftcoord.Session(self._client, int(ttl), deaths=deaths, was=os.environ.get("MOURNED_WAS", "").split())

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

    def storm(self, count: str) -> None:
        """Many children, of which some end what is not theirs."""
        children = []
        for number in range(int(count)):
            pid = os.fork()
            if pid == 0:
                if number % 3 == 0:
                    self._session.close()
                os._exit(0)
            children.append(pid)
        for pid in children:
            os.waitpid(pid, 0)

    def child(self) -> None:
        subprocess.run(["true"], check=True)

    def start(self, method: str) -> str:
        """A process of multiprocessing's, with a session of its own."""
        context: Any = multiprocessing.get_context(method)
        mine, theirs = context.Pipe()
        context.Process(target=_serve, args=(theirs, *self._given)).start()
        return str(mine.recv())

    def churn(self) -> None:
        """Open and close sessions, for ever."""
        while True:
            session = self._open()
            self._client.put(f"{self._given[1]}/churn-{session.lease_id}", b"", session.lease_id)
            time.sleep(random.uniform(0, 1))
            session.close()

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


def _serve(pipe: Any, *given: str) -> None:
    mourned = Mourned(*given)  # whose session ends when nobody refers to it
    pipe.send(mourned.told())
    time.sleep(FOREVER)


def main() -> None:
    with open(os.dup(0)) as commands, open(os.dup(1), "w") as answers:
        for number in os.environ.get("MOURNED_CLOSED", ""):
            os.close(int(number))
        if os.environ.get("MOURNED_NO_PIDFD"):
            os.pidfd_open = _no_pidfd
        if group := os.environ.get("MOURNED_GROUP"):
            Path(group, "cgroup.procs").write_text(str(os.getpid()))
        mourned = Mourned(*sys.argv[1:])
        print(mourned.told(), file=answers, flush=True)
        for line in commands:
            verb, *arguments = line.split()
            print(getattr(mourned, verb)(*arguments) or "done", file=answers, flush=True)


if __name__ == "__main__":
    main()
