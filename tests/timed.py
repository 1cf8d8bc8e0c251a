"""Workers that hold expiration timers, as processes of their own, and servers that can be killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

from grpc import _channel
from helpers import DEADLINE, eventually, freeze
from torch.distributed.elastic import timer
from torch.distributed.elastic.timer import TimerClient

from ftcoord.timer.etcd_timer import EtcdTimerClient, EtcdTimerServer

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch.distributed.elastic.timer", "ftcoord.timer.etcd_timer", "ftcoord.timer.etcd_timer", "pytest"]
)
"""Loads torch once for all of them. Not by the name of this module: until Python 3.13 the server does not look where
pytest finds the tests, and leaves out without a word what it does not find."""


@dataclass(frozen=True)
class EtcdTimers:
    """Makes a client of ours; in the process that is to hold the timers."""

    run: str
    endpoint: str
    timeout: float = 30.0
    ttl: int = 2

    def __call__(self) -> TimerClient:
        return EtcdTimerClient(self.run, self.endpoint, timeout=self.timeout, ttl=self.ttl)


class Worker:
    """A process with a timer client, which does as it is told. A context manager: it is killed in the end.

    Args:
        make: makes the client, in that process.
        clock_offset: seconds that its wall clock (`time.time`) is ahead.
    """

    def __init__(self, make: Callable[[], TimerClient], clock_offset: float = 0.0) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_work, args=(theirs, make, clock_offset), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def tell(self, command: str, *arguments: Any) -> None:
        """Have a method of `_Hands` called; see `answer`."""
        self._pipe.send((command, arguments))

    def answer(self) -> Any:
        """What the oldest command that is not answered yet returned."""
        if not self._pipe.poll(DEADLINE):
            raise TimeoutError("the worker does not answer")
        return self._pipe.recv()

    def do(self, command: str, *arguments: Any) -> Any:
        self.tell(command, *arguments)
        return self.answer()

    def runs(self) -> bool:
        return self._process.exitcode is None

    def stop(self) -> None:
        """SIGSTOP: nothing in it runs, no thread either; as if C code held the interpreter."""
        freeze(self.pid)

    def killed(self) -> float:
        """Wait until it was killed; the monotonic time at which that was seen."""
        eventually(lambda: not self.runs(), "the worker is killed")
        seen = time.monotonic()
        assert self._process.exitcode == -signal.SIGKILL
        return seen

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


@contextlib.contextmanager
def workers(make: Callable[[], TimerClient], count: int) -> Iterator[list[Worker]]:
    """Some of them, ready to work."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(Worker(make)) for _ in range(count)]
        for one in made:
            one.tell("ready")
        for one in made:
            one.answer()
        yield made


class ServerProcess:
    """An EtcdTimerServer in a process of its own, that can be killed."""

    def __init__(self, run: str, endpoint: str) -> None:
        self._process = CONTEXT.Process(target=_serve, args=(run, endpoint), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class _Hands:
    """What a worker can do."""

    def __init__(self, client: TimerClient) -> None:
        self._client = client

    def ready(self) -> None:
        """Nothing; answered when the process is up."""

    def acquire(self, after: float, *scopes: str) -> float:
        """Seconds that it took."""
        begun = time.monotonic()
        for scope in scopes:
            self._client.acquire(scope, time.time() + after)
        return time.monotonic() - begun

    def release(self, *scopes: str) -> float:
        begun = time.monotonic()
        for scope in scopes:
            self._client.release(scope)
        return time.monotonic() - begun

    def work(self, after: float, times: int) -> float:
        """Enter and leave a scope so often."""
        begun = time.monotonic()
        for _ in range(times):
            with timer.expires(after, "work", self._client):
                pass
        return time.monotonic() - begun

    def hang(self, after: float) -> None:
        """Never come back."""
        with timer.expires(after, client=self._client):
            threading.Event().wait()

    def recurse(self, depth: int, after: float, wait: float) -> None:
        """Enter the same scope again and again; each of them stays for `wait` seconds after the inner ones are over."""
        if depth:
            with timer.expires(after, client=self._client):
                self.recurse(depth - 1, after, wait)
                threading.Event().wait(wait)

    def fail(self, after: float) -> str:
        """Raise in a scope."""
        try:
            with timer.expires(after, client=self._client):
                raise ValueError("a bug")
        except ValueError as error:
            return str(error)

    def without_a_client(self) -> str:
        try:
            with timer.expires(1.0):
                return "it works"
        except RuntimeError as error:
            return type(error).__name__


def _work(pipe: Connection, make: Callable[[], TimerClient], clock_offset: float) -> None:
    if clock_offset:
        _set_the_clock(clock_offset)
    hands = _Hands(make())
    with contextlib.suppress(EOFError):
        while True:
            command, arguments = pipe.recv()
            pipe.send(getattr(hands, command)(*arguments))


def _set_the_clock(offset: float) -> None:
    true_time = time.time
    _channel.time = ModuleType("time")  # it reckons deadlines by a clock that its C half must agree with
    _channel.time.__dict__.update(vars(time))
    time.time = lambda: true_time() + offset


def _serve(run: str, endpoint: str) -> None:
    server = EtcdTimerServer(run, endpoint)
    server.start()
    threading.Event().wait()
