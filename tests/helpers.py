"""What the tests share: waiting for a condition, what a watch delivered, processes that are forked or killed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ftcoord.embedded.server import LOOPBACK, reserved
from ftcoord.etcd.api import Batch, Began, Event, WatchItem
from ftcoord.rendezvous.settings import RendezvousSettings

DEADLINE = 90.0
"""Seconds; for a machine that is busy with other things. Nothing that works comes near it."""

NEEDS_TORCHFT = pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None, reason="torchft has no wheel for this Python"
)
"""For tests whose processes load torchft. `pytest.importorskip` would load it into the process of the tests, too."""

T = TypeVar("T")


def eventually(condition: Callable[[], T], what: str | Callable[[], str], timeout: float = DEADLINE) -> T:
    """Wait until `condition` returns something true, and return that; `what` is said if it never does."""
    interval = threading.Event()
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout:g} s: {what if isinstance(what, str) else what()}")
        interval.wait(0.02)
    return found


def rdzv_settings(
    nnodes: tuple[int, int], run_id: str = "run", local_addr: str | None = None, **conf: object
) -> RendezvousSettings:
    """A handler's settings, from keys of `rdzv_conf`; for tests with a client of their own."""
    least, most = nnodes
    return RendezvousSettings.parse(
        backend="etcd-v3",
        endpoint="etcd:1",
        run_id=run_id,
        min_nodes=least,
        max_nodes=most,
        local_addr=local_addr,
        conf=conf,
        env={},
    )


def freeze(pid: int) -> None:
    """SIGSTOP; no thread of it runs any more on return. kill() alone returns before a busy machine has stopped it."""
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: _states(pid) == {"T"}, f"process {pid} is stopped")


def _states(pid: int) -> set[str]:
    states = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            states.add(task.joinpath("stat").read_text().rpartition(")")[2].split()[0])
    return states


def ask_etcd(endpoint: str, method: str, request: bytes = b"") -> bytes:
    """The answer of a gRPC method of etcd that ftcoord itself does not use; both are protobuf messages."""
    from ftcoord.etcd.quiet_grpc import grpc, quiet_grpc

    with quiet_grpc(), grpc.insecure_channel(endpoint) as channel:
        return bytes(channel.unary_unary(f"/etcdserverpb.{method}")(request, timeout=DEADLINE))


def set_alarm(endpoint: str, on: bool, member_id: int = 1) -> None:
    """Raise the alarm NOSPACE, as a member does that has no space left, or disarm it."""
    from ftcoord.etcd.messages import declare

    alarm = declare("tests", {"AlarmRequest": "action 1 int32, member_id 2 uint64, alarm 3 int32"})["AlarmRequest"]
    request = alarm(action=1 if on else 2, member_id=member_id, alarm=1)
    ask_etcd(endpoint, "Maintenance/Alarm", request.SerializeToString())


class Seen:
    """Collects what a watch delivers; use it as `deliver`."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[WatchItem] = queue.SimpleQueue()
        self.batches: list[Batch] = []

    def __call__(self, item: WatchItem) -> None:
        self._items.put(item)

    def next(self, timeout: float = DEADLINE) -> WatchItem:
        return self._items.get(timeout=timeout)

    def events(self, count: int, timeout: float = DEADLINE) -> list[Event]:
        """Wait until `count` events came in all, and return them; fails when there are more, or an error."""
        while sum(len(batch.events) for batch in self.batches) < count:
            item = self.next(timeout)
            assert isinstance(item, (Batch, Began)), item
            if isinstance(item, Batch):
                self.batches.append(item)
        events = [event for batch in self.batches for event in batch.events]
        assert len(events) == count, events
        return events

    def error(self, timeout: float = DEADLINE) -> Exception:
        """Wait for the exception that ends the watch."""
        while not isinstance(item := self.next(timeout), Exception):
            if isinstance(item, Batch):
                self.batches.append(item)
        return item

    def is_quiet(self) -> bool:
        """Whether nothing came that was not asked for, but that the watch stands."""
        items = [self._items.get_nowait() for _ in range(self._items.qsize())]
        return all(isinstance(item, Began) for item in items)


def open_files() -> set[tuple[str, str]]:
    """The files that this process has open, by number and name.

    Compare what is new: what earlier tests left open may be closed at any time.
    """
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of this list
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


_own_ports: list[socket.socket] = []


def own_port() -> int:
    """A port that nobody else is given while these tests run, also while its server is down. A server that sets
    SO_REUSEADDR, as Python's and etcd do, may listen there."""
    _own_ports.append(reserved(LOOPBACK))
    return int(_own_ports[-1].getsockname()[1])


def pem(kind: str) -> str:
    """A PEM file that looks whole, with nothing in it."""
    return f"-----BEGIN {kind}-----\n-----END {kind}-----\n"


def in_fork(action: Callable[[], object], timeout: float = DEADLINE) -> str:
    """Run `action` in a forked child, which then ends like a Python program; what it returned or raised, as text."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reader)
            answer = _outcome(action)
            os.write(writer, answer.encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    alarm = threading.Timer(timeout, os.kill, (pid, 9))
    alarm.start()
    try:
        with os.fdopen(reader) as pipe:
            answer = pipe.read()
        _, status = os.waitpid(pid, 0)
    finally:
        alarm.cancel()
    assert status == 0, f"the child ended with status {status}, said {answer!r}"
    return answer


def _outcome(action: Callable[[], object]) -> str:
    try:
        return repr(action())
    except Exception as error:  # the parent is told of it
        return type(error).__name__


@contextlib.contextmanager
def python(*arguments: str, env: dict[str, str] | None = None, **how: Any) -> Iterator[subprocess.Popen[str]]:
    """A Python process with `arguments`, its standard input and output as pipes; it is killed in the end. `how` are
    more arguments of Popen's."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=None if env is None else {**os.environ, **env},
        **how,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
