"""Worlds for simulated tests: an etcd in memory, hosts that each have a client of it, and time that is virtual."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from members import Node, read
from virtual import Call, Fate, MemoryClient, MemoryEtcd, Scheduler

from ftcoord import concurrency
from ftcoord.errors import EtcdUnavailable, OutcomeUnknown
from ftcoord.etcd.api import Batch, Etcd, Event, Get, Span, WatchItem

T = TypeVar("T")

SEEDS = 10
"""Histories of each scenario. Set FTCOORD_SEEDS to try more of them."""
FEWER = 5
"""Of a scenario that is played for so long that ten would take seconds."""
PREFIX = "/g"
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
        self.decided: list[dict[str, Any]] = []
        self.observer.watch(Span(f"{PREFIX}/decided"), 0, self._observe)
        self._number = 0

    def sleep(self, seconds: float) -> None:
        self.scheduler.sleep(seconds)

    def until(self, condition: Callable[[], object], what: str, timeout: float = 120.0) -> None:
        """Wait for a condition, in virtual time."""
        deadline = concurrency.now() + timeout
        while not condition():
            assert concurrency.now() < deadline, f"not within {timeout:g} virtual seconds: {what}"
            self.sleep(0.05)

    def host(
        self,
        fate: Callable[[Call], Fate] | None = None,
        door: Callable[[Etcd], Etcd] = lambda client: client,
        **more: Any,
    ) -> Host:
        """A process on a host of its own, which is a member of the group; `door` may change what it hears of etcd."""
        self._number += 1
        return Host(self, f"host{self._number}", self.etcd.client(fate), door, **more)

    def agree(self, *hosts: Host, heard_by: Sequence[Host] = ()) -> dict[str, Any]:
        """Wait until these hosts are the members, and all of them (or `heard_by`) heard it by one record; return it."""
        ids = {host.node.id for host in hosts}
        hearing = heard_by or hosts

        def rolls() -> list[dict[str, Any]]:
            return [host.node.rolls[-1] if host.node.rolls else {"members": {}} for host in hearing]

        self.until(
            lambda: all(set(roll["members"]) == ids and roll == rolls()[0] for roll in rolls()),
            f"{ids} are in the record",
        )
        return rolls()[0]

    def check_one_history(self) -> None:
        """Every decision had the next number, and nobody heard another one under the same number."""
        numbers = [roll["number"] for roll in self.decided]
        assert numbers == list(range(1, len(numbers) + 1)), numbers

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

    def decide(self, number: int) -> int:
        """Somebody decides the last roll again, under this number; at which revision."""
        now = self.observer.get(f"{PREFIX}/decided").kvs[0]
        record = json.dumps({**read(now), "number": number}).encode()
        return self.observer.put(now.key, record, now.lease).revision

    def _observe(self, item: WatchItem) -> None:
        if isinstance(item, Batch):
            self.decided.extend(read(event.kv) for event in item.events if event.kind == "put")


class Host:
    """One process: its client, and its member of the group. All its threads stop with `pause()`."""

    def __init__(
        self, world: World, name: str, client: MemoryClient, door: Callable[[Etcd], Etcd], **more: Any
    ) -> None:
        self._world, self.name, self.client = world, name, client
        with world.scheduler.process(name):
            self.node = insist(lambda: Node(door(client), PREFIX, **{"ttl": TTL, **more}))

    @property
    def lease(self) -> int:
        return self.node.session.lease_id

    def crash(self) -> None:
        """Power off: it stops where it is, and its lease is left to expire."""
        self.client.cut_off()
        self.pause()

    def pause(self) -> None:
        self._world.scheduler.pause(self.name)

    def resume(self) -> None:
        self._world.scheduler.resume(self.name)

    def leave(self) -> None:
        self.node.group.close()
        insist(self.node.session.close)


def insist(call: Callable[[], T]) -> T:
    """Make a call until etcd answers."""
    while True:
        try:
            return call()
        except (EtcdUnavailable, OutcomeUnknown):
            continue
