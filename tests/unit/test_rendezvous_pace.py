"""What a node that waits for its round does meanwhile, and how often thousands of them do it."""

from __future__ import annotations

import collections
import heapq
import logging
from dataclasses import dataclass, field
from typing import Any, Final, cast

import builders
import pytest
from helpers import rdzv_settings
from virtual import Scheduler

from ftcoord import concurrency
from ftcoord.core.rendezvous_records import JoinRequest
from ftcoord.core.verdict import Standing
from ftcoord.primitives.group.use import Look
from ftcoord.rendezvous import pace
from ftcoord.rendezvous.pace import FIRST_LINE, LINE_INTERVAL, LINES_PER_SECOND, RoundPace

ASK: Final = builders.ask("node", address="host", nonce="", limits=(1, 1))
WAITS: Final[Look[Any, JoinRequest]] = Look(Standing.PENDING, None, ASK)


@dataclass
class Waiting:
    """A participant that waits."""

    member: None = None
    record: None = None


@dataclass
class Attendance:
    """When who is there was asked for."""

    asked: list[float] = field(default_factory=list)

    def members(self, limit: int, timeout: float) -> tuple[list[JoinRequest], int]:
        self.asked.append(concurrency.now())
        return [ASK][:limit], 1


def lines(count: int, nnodes: tuple[int, int], seconds: float) -> list[float]:
    """When nodes that begin to wait together, for so many seconds, ask who is there, from then on."""
    settings = rdzv_settings(nnodes, join_timeout=10_000.0)
    found = Attendance()

    def scenario() -> None:
        began = concurrency.now()
        due: list[tuple[float, int, RoundPace]] = []
        for place in range(1, count + 1):
            one = RoundPace(cast(Any, Waiting()), settings, cast(Any, found), "host")
            one.see(WAITS)
            due.append((one.wake_at(Standing.PENDING), place, one))
        heapq.heapify(due)
        while due[0][0] < began + seconds:
            at, place, one = heapq.heappop(due)
            concurrency.sleep(max(at - concurrency.now(), 0))
            one.tick(WAITS)
            heapq.heappush(due, (one.wake_at(Standing.PENDING), place, one))
        found.asked[:] = [at - began for at in found.asked]

    # Not on the main thread: nobody wakes up for signals.
    def elsewhere() -> None:
        thread = concurrency.thread(scenario, "nodes")
        thread.start()
        thread.join()

    Scheduler(0, steps=50_000_000).run(elsewhere)
    return found.asked


@pytest.fixture
def read(caplog: pytest.LogCaptureFixture) -> None:
    """Somebody reads the lines."""
    caplog.set_level(logging.INFO, logger=pace.__name__)


@pytest.mark.usefixtures("read")
@pytest.mark.parametrize("count", [64, 1000])
def test_however_many_nodes_wait_a_run_logs_about_a_hundred_lines_a_second(count: int) -> None:
    said = lines(count, (count, count), 200.0)
    a_second = collections.Counter(int(at) for at in said)
    assert max(a_second.values()) <= 2 * LINES_PER_SECOND
    interval = max(LINE_INTERVAL, count / LINES_PER_SECOND)
    each = len(said) / count
    assert (200.0 - FIRST_LINE) / interval - 1 <= each <= (200.0 - FIRST_LINE) / interval + 1, "and none is forgotten"


def test_what_nobody_reads_is_not_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger=pace.__name__)
    assert lines(3, (4, 4), 100.0) == []
