"""Many clients over a few processes, which are told together what to do."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

PROCESSES: Final = 4
PATIENCE: Final = 300.0
"""Seconds for any answer of the processes, where nothing else is said."""


Self = TypeVar("Self", bound="Processes")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Made:
    """What making the clients of a process took, or those of all: seconds and CPU seconds; the threads afterwards."""

    seconds: float
    cpu: float
    threads: int

    @classmethod
    def of_all(cls, processes: Sequence[Made]) -> Made:
        """The seconds of the slowest one, the sum of the rest."""
        return cls(
            max(one.seconds for one in processes),
            sum(one.cpu for one in processes),
            sum(one.threads for one in processes),
        )


def making(make: Callable[[], T]) -> tuple[T, Made]:
    """What `make` makes, and what that took."""
    began, cpu, threads = time.monotonic(), time.process_time(), threading.active_count()
    made = make()
    return made, Made(time.monotonic() - began, time.process_time() - cpu, threading.active_count() - threads)


class BenchmarkError(Exception):
    """A measurement did not come about; the output of the processes says why."""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class Processes:
    """`serve(pipe, numbers, *arguments)` in each of a few processes, for its share of `count` clients; context manager.

    They are forked from one that has imported what `serve` needs, so no import is measured. Each says something when it
    is ready (`ready`), and answers each request once.
    """

    def __init__(
        self,
        count: int,
        serve: Callable[..., None],
        *arguments: Any,
        processes: int = PROCESSES,
        patience: float = PATIENCE,
    ) -> None:
        self._patience = patience
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([serve.__module__])
        self._pipes = []
        self._processes = []
        for first in range(min(processes, count)):
            mine, theirs = context.Pipe()
            numbers = range(first, count, processes)
            process = context.Process(target=_serve, args=(serve, theirs, numbers, *arguments), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def __enter__(self: Self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(self.__exit__)
            self.ready = self._answers()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def ask(self, request: Any) -> list[Any]:
        """What all of them answer."""
        for pipe in self._pipes:
            pipe.send(request)
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = []
        deadline = time.monotonic() + self._patience
        for pipe in self._pipes:
            if not pipe.poll(max(deadline - time.monotonic(), 0)):
                raise BenchmarkError(f"the processes did not answer within {self._patience:g} s")
            try:
                answers.append(pipe.recv())
            except EOFError:
                raise BenchmarkError("a process failed") from None
        return answers


def _serve(serve: Callable[..., None], *arguments: Any) -> None:
    end_with_parent()
    serve(*arguments)


def end_with_parent() -> None:
    """End this process with the benchmark, however that comes about: its `kill` is not called when it is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
