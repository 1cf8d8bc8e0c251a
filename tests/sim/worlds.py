"""Worlds for simulated tests: an etcd in memory, hosts that each have a client of it, and time that is virtual."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TypeVar

from virtual import MemoryEtcd, Scheduler

from ftcoord import concurrency
from ftcoord.errors import EtcdUnavailable, OutcomeUnknown
from ftcoord.etcd.api import Batch, Event, Get, Span, WatchItem

T = TypeVar("T")

SEEDS = 10
"""Histories of each scenario. Set FTCOORD_SEEDS to try more of them."""
FEWER = 5
"""Of a scenario that is played for so long that ten would take seconds."""
TTL = 10
"""Seconds of a host's lease."""


def simulated(scenario: Callable[[World], None], seeds: int = SEEDS) -> Callable[[], None]:
    """Make a test of a scenario: it is played under many seeds, each a history of its own."""

    @functools.wraps(scenario)
    def test() -> None:
        for seed in range(int(os.environ.get("FTCOORD_SEEDS", seeds))):
            try:
                play(scenario, seed)
            except Exception as error:
                raise AssertionError(f"seed {seed}: {error!r}") from error

    del test.__wrapped__  # pytest would look for a fixture of the name of the scenario's argument
    return test


long_simulated = functools.partial(simulated, seeds=FEWER)


def play(scenario: Callable[[World], T], seed: int) -> T:
    """One history."""
    scheduler = Scheduler(seed)

    def main() -> T:
        with MemoryEtcd() as etcd:
            return scenario(World(scheduler, etcd))

    return scheduler.run(main)


class World:
    """What a scenario has to play with."""

    def __init__(self, scheduler: Scheduler, etcd: MemoryEtcd) -> None:
        self.scheduler, self.etcd, self.seed = scheduler, etcd, scheduler.seed
        self.observer = etcd.client()

    def sleep(self, seconds: float) -> None:
        self.scheduler.sleep(seconds)

    def until(self, condition: Callable[[], object], what: str, timeout: float = 120.0) -> None:
        """Wait for a condition, in virtual time."""
        deadline = concurrency.now() + timeout
        while not condition():
            assert concurrency.now() < deadline, f"not within {timeout:g} virtual seconds: {what}"
            self.sleep(0.05)

    def keys(self, prefix: str) -> dict[str, bytes]:
        """What etcd has below a prefix."""
        return {kv.key: kv.value for kv in self.observer.range(Get(Span(prefix, is_prefix=True))).kvs}

    def events(self, key: str) -> list[Event]:
        """All changes of a key since the beginning, in order."""
        items: list[WatchItem] = []
        watch = self.observer.watch(Span(key), 1, items.append)
        self.sleep(1)
        watch.cancel()
        return [event for item in items if isinstance(item, Batch) for event in item.events]


def insist(call: Callable[[], T]) -> T:
    """Make a call until etcd answers."""
    while True:
        try:
            return call()
        except (EtcdUnavailable, OutcomeUnknown):
            continue
