"""A process that watches etcd and forks all the time: what does it miss? forks.py [MINUTES] tells, for each way of use.

Another process writes; the watcher forks children that do nothing, as DataLoader's workers, and end in turn at once,
like a program, and after the collector found the parent's client. With gRPC's fork handlers, which are its default,
events get lost; as ftcoord loads gRPC none may be. Fails when an event was missed there, or anything else went wrong.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

if sys.argv[-1] == "on":  # as grpc is on its own: loaded, and used once, before ftcoord could say anything
    import grpc

    _first = grpc.insecure_channel("127.0.0.1:1")

from ftcoord.config import EtcdConfig
from ftcoord.embedded.server import EtcdServer
from ftcoord.errors import EtcdError
from ftcoord.etcd.api import Batch, Get, Span, WatchItem
from ftcoord.etcd.client import EtcdClient

KEYS: Final = 50
AT_ONCE: Final = 8
"""Children that live at the same time."""
HANG: Final = 30.0
"""Seconds after which a child counts as hung."""
LATE: Final = 30.0
"""Seconds after the last write in which events may come."""


def write(endpoint: str) -> None:
    """Write each key in turn until standard input ends, about 2000 times a second at the most."""
    client = EtcdClient(EtcdConfig.load(endpoint, env={}))
    done = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), done.set()), daemon=True).start()
    number = 0
    while not done.wait(0.0005):
        number += 1
        client.put(f"/forks/{number % KEYS}", b"")
    client.close()


class Watching:
    """Counts the events of each key, and those that were missed: an event tells how often its key was written."""

    def __init__(self, client: EtcdClient) -> None:
        self.versions: dict[str, int] = {}
        self.missed = 0
        self._noted = threading.Condition()  # guards both
        client.watch(Span("/forks/", is_prefix=True), 1, self._note)

    def _note(self, item: WatchItem) -> None:
        with self._noted:
            for event in item.events if isinstance(item, Batch) else ():
                before = self.versions.get(event.kv.key, 0)
                self.missed += event.kv.version - before - 1
                self.versions[event.kv.key] = event.kv.version
            self._noted.notify()

    def await_all(self, versions: dict[str, int], timeout: float) -> None:
        """Until it has heard of these versions, or the time is over."""
        with self._noted:
            self._noted.wait_for(lambda: self.versions == versions, timeout)


def sleep_and_go() -> None:
    time.sleep(0.05)  # as long as a child of DataLoader's that has nothing to do
    os._exit(0)


def end_like_a_program() -> None:
    sys.exit(0)


def collect_and_go() -> None:
    client.close()
    globals().pop("client")
    gc.collect()
    os._exit(0)


class Children:
    """Some at a time; counts those that hung, or ended otherwise than with 0."""

    def __init__(self) -> None:
        self.forks = self.failed = 0
        self._ends: dict[int, tuple[float, int]] = {}
        """When each counts as hung, and its pidfd."""

    def fork(self, how: Callable[[], None]) -> None:
        pid = os.fork()
        if pid == 0:
            how()
        self.forks += 1
        self._ends[pid] = time.monotonic() + HANG, os.pidfd_open(pid)
        while self._reap() >= AT_ONCE:
            self._await_one()

    def wait(self) -> None:
        while self._reap():
            self._await_one()

    def _await_one(self) -> None:
        """Until one has ended, or counts as hung."""
        hangs_at = min(end for end, _ in self._ends.values())
        select.select([pidfd for _, pidfd in self._ends.values()], [], [], max(hangs_at - time.monotonic(), 0))

    def _reap(self) -> int:
        for pid, (end, pidfd) in list(self._ends.items()):
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                os.close(pidfd)
                del self._ends[pid]
                self.failed += status != 0
        return len(self._ends)


def read_all_the_time(client: EtcdClient, done: threading.Event, failures: list[EtcdError]) -> None:
    """Calls under way at every fork."""
    while not done.wait(0.001):
        try:
            client.range(Get(Span("/forks/0")))
        except EtcdError as error:
            failures.append(error)


def fork_all_the_time(endpoint: str, minutes: float) -> None:
    global client
    client = EtcdClient(EtcdConfig.load(endpoint, env={}))
    watching, done = Watching(client), threading.Event()
    failures: list[EtcdError] = []
    thread = threading.Thread(target=read_all_the_time, args=(client, done, failures))
    thread.start()
    children, ways = Children(), (sleep_and_go, sleep_and_go, end_like_a_program, collect_and_go)
    with subprocess.Popen([sys.executable, __file__, "write", endpoint], stdin=subprocess.PIPE) as writer:
        until = time.monotonic() + 60 * minutes
        while time.monotonic() < until:
            children.fork(ways[children.forks % len(ways)])
        children.wait()
    done.set()
    thread.join()
    told = {kv.key: kv.version for kv in client.range(Get(Span("/forks/", is_prefix=True))).kvs}
    watching.await_all(told, LATE)
    last = sum(version - watching.versions.get(key, 0) for key, version in told.items())
    client.close()
    figures = [watching.missed + last, sum(told.values()), children.forks, children.failed, len(failures)]
    print(json.dumps([*figures, writer.returncode]))


def main(minutes: float = 4.0) -> None:
    bad = False
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    environment["GRPC_VERBOSITY"] = "NONE"
    for handlers in ("on", "off"):
        with EtcdServer() as server:
            arguments = [sys.executable, __file__, "fork", server.get_endpoint(), str(minutes / 2), handlers]
            answer = subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        missed, events, forks, failed, refused, writer = json.loads(answer)
        print(f"handlers {handlers}: {missed} of {events} events missed in {forks} forks;", end=" ")
        print(f"{failed} children hung or crashed, {refused} reads of the parent failed")
        bad |= bool(writer) or (handlers == "off" and bool(missed or failed or refused))
    assert not bad, "a process that forks missed something, or its children did not end"


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        write(sys.argv[2])
    elif sys.argv[1:2] == ["fork"]:
        fork_all_the_time(sys.argv[2], float(sys.argv[3]))
    else:
        main(*map(float, sys.argv[1:]))
