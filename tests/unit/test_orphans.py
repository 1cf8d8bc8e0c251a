"""Orphans are ended though descriptors run out."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from virtual import Scheduler

from ftcoord import concurrency, proc
from ftcoord.primitives import orphans
from ftcoord.primitives.orphans import GRACE, Orphans

MARK = "mark"


class Machine:
    """Stands in for the kernel: processes that end when they get a signal, and so many pidfds at a time."""

    def __init__(self, count: int, room: int) -> None:
        self.running = {100 + number for number in range(count)}
        self.open: dict[int, int] = {}
        self._room, self._next = room, 0

    def processes(self) -> list[int]:
        return sorted(self.running)

    def bears(self, pid: int, mark: str) -> bool:
        return mark == MARK and pid in self.running

    def open_pidfd(self, pid: int) -> int:
        if len(self.open) >= self._room:
            raise OSError(errno.EMFILE, "Too many open files")
        self._next += 1
        self.open[self._next] = pid
        return self._next

    def send(self, descriptor: int, _number: int) -> None:
        self.running.discard(self.open[descriptor])

    def close(self, descriptor: int) -> None:
        del self.open[descriptor]


def ended(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> Callable[[], None]:
    """Looks until there must be no other look."""

    def play() -> None:
        with ExitStack() as ends:
            patch = ends.enter_context(monkeypatch.context())
            patch.setattr(orphans, "bears", machine.bears)
            patch.setattr(orphans, "processes", machine.processes)
            patch.setattr(os, "close", machine.close)
            for name in ("open_pidfd", "send"):
                patch.setattr(proc, name, getattr(machine, name))
            found = Orphans(MARK)
            while found.look():
                concurrency.sleep(0.5)

    return play


def test_more_than_there_is_room_for_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(count=25, room=1)
    Scheduler(0).run(ended(monkeypatch, machine))
    assert not machine.running
    assert not machine.open


def test_where_no_descriptor_can_be_had_it_does_not_look_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(count=1, room=0)

    def play() -> None:
        ended(monkeypatch, machine)()
        assert concurrency.now() == pytest.approx(GRACE, abs=1)

    Scheduler(0).run(play)
