"""Many clients over a few processes, which are told together what to do."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from typing import Any, Final, TypeVar

PROCESSES: Final = 4
PATIENCE: Final = 300.0
"""Seconds for any answer of the processes."""


Self = TypeVar("Self", bound="Processes")


class BenchmarkError(Exception):
    """A measurement did not come about; the output of the processes says why."""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class Processes:
    """`serve(pipe, numbers, *arguments)` in each of a few processes, for its share of `count` clients; context manager.

    They are forked from one that has imported what `serve` needs, so no import is measured. Each says something when it
    is ready, and answers each request once.
    """

    def __init__(self, count: int, serve: Callable[..., None], *arguments: Any, processes: int = PROCESSES) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([serve.__module__])
        self._pipes = []
        self._processes = []
        for first in range(min(processes, count)):
            mine, theirs = context.Pipe()
            numbers = range(first, count, processes)
            process = context.Process(target=serve, args=(theirs, numbers, *arguments), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def __enter__(self: Self) -> Self:
        self._answers()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def ask(self, request: Any) -> list[Any]:
        """What all of them answer."""
        for pipe in self._pipes:
            pipe.send(request)
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = []
        for pipe in self._pipes:
            if not pipe.poll(PATIENCE):
                raise BenchmarkError(f"the processes did not answer within {PATIENCE:g} s")
            try:
                answers.append(pipe.recv())
            except EOFError:
                raise BenchmarkError("a process failed") from None
        return answers
