"""Processes with replicas of a quorum in them, for tests that kill and stop them."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import warm
from helpers import DEADLINE, eventually, freeze
from victims import runs, sentinels_of

import ftcoord

SCRIPT = Path(__file__).parent / "integration" / "scripts" / "replica.py"

Told: TypeAlias = "tuple[int, list[str]]"
"""A quorum's id and its replicas."""


class ReplicaProcess:
    """One process of scripts/replica.py. Orders return at once; their futures raise what the order raised there."""

    def __init__(self, job: str) -> None:
        self.job = job
        source = str(Path(str(ftcoord.__file__)).parent.parent)
        self._process = warm.Popen(
            [sys.executable, str(SCRIPT), job],
            torch=False,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": source},
        )
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, replica: str, timeout: float = DEADLINE, **request: Any) -> Future[Told]:
        """With a client of its own; see LighthouseClient.quorum."""
        return self._order("ask", replica=replica, timeout=timeout, **request)

    def manage(self, replica: str, world_size: int = 1, bind: str = "[::]:0") -> str:
        """Start a manager; its address."""
        return str(self._order("manage", replica=replica, world_size=world_size, bind=bind).result(DEADLINE))

    def quorum(
        self, manager: str, rank: int = 0, timeout: float = DEADLINE, step: int = 0, failures: int = 0
    ) -> Future[Told]:
        """Ask for a quorum as a rank of a manager, wherever that is."""
        return self._order("quorum", manager=manager, rank=rank, timeout=timeout, step=step, failures=failures)

    def commit(self, manager: str, rank: int, step: int, yes: bool = True, timeout: float = DEADLINE) -> Future[bool]:
        return self._order("commit", manager=manager, rank=rank, step=step, yes=yes, timeout=timeout)

    def metadata(self, manager: str, rank: int) -> str:
        return str(self._order("metadata", manager=manager, rank=rank).result(DEADLINE))

    def waiting(self, manager: str) -> int:
        """How many ranks of a manager in this process wait for the others."""
        return int(self._order("waiting", manager=manager).result(DEADLINE))

    def guarded(self) -> int:
        """Wait until a sentinel stands beside it and knows its leases; the sentinel's pid."""
        return int(self._order("guarded", timeout=DEADLINE).result(DEADLINE))

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        freeze(self._process.pid)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def code(self) -> int:
        """With what it ends by itself."""
        return self._process.wait(DEADLINE)

    def die(self) -> None:
        """SIGKILL, and be there for its sentinel, which reads how it ended: unlike `kill`, this does not reap it."""
        self._process.send_signal(signal.SIGKILL)

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        self._process.kill()
        self._process.communicate()
        self._reader.join()

    def _order(self, name: str, **order: Any) -> Future[Any]:
        number, future = next(self._numbers), Future[Any]()
        self._waiting[number] = future
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"number": number, "do": name, **order}) + "\n")
        self._process.stdin.flush()
        return future

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            future = self._waiting.pop(answer["number"])
            if "error" in answer:
                kind = {"TimeoutError": TimeoutError, "RuntimeError": RuntimeError}[answer["error"]]
                future.set_exception(kind(answer["text"]))
            else:
                future.set_result(tuple(answer["result"]) if type(answer["result"]) is list else answer["result"])
        for future in list(self._waiting.values()):
            future.set_exception(ConnectionError("the process has ended"))


@contextmanager
def replica_processes(job: str, count: int) -> Iterator[list[ReplicaProcess]]:
    """So many processes; they are killed in the end, and their sentinels have ended then: without an etcd these would
    stay for as long as the leases last."""
    processes = [ReplicaProcess(job) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
        eventually(lambda: not any(runs(one) for process in processes for one in sentinels_of(process.pid)), "all end")


def agreed(futures: Sequence[Future[Told]]) -> Told:
    """What all were told, which is the same."""
    told = [future.result(DEADLINE) for future in futures]
    assert all(one == told[0] for one in told), told
    return told[0]


def until_it_is_in(waiting: Future[Told], others: Sequence[tuple[ReplicaProcess, str]]) -> Told:
    """Let the others train on until a replica that came late is in; its quorum, which was also theirs."""
    seen = []
    while not waiting.done():
        seen.append(agreed([process.quorum(at, step=10) for process, at in others]))
        numbers = [number for number, _ in seen]
        assert numbers == sorted(numbers)
    told = waiting.result()
    assert told in seen or not seen or told[0] < seen[0][0]
    return told


def managed(processes: Sequence[ReplicaProcess]) -> list[tuple[ReplicaProcess, str]]:
    """The processes, and the addresses of their managers, which are called a, b, ...; the first one is the oldest."""
    return [(process, process.manage(name)) for process, name in zip(processes, "abcdefgh", strict=False)]
