"""Informers whose reports take long, in virtual time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from worlds import World, play, simulated

from ftcoord import concurrency
from ftcoord.etcd.api import Span
from ftcoord.primitives import mirror as informer_module
from ftcoord.primitives.mirror import Informer, Mirror


class SlowReader:
    """An informer's report of one key that takes longer than the time between two changes of it."""

    def __init__(self, world: World, **options: Any) -> None:
        self.shown: list[bytes] = []
        self._world = world
        client = world.etcd.client()
        self.informer = Informer(client, [Span("/f")], self._tell, "ftcoord-test", world.scheduler.fail, **options)
        world.until(lambda: self.shown, "it shows that there is nothing")

    def follow(self, changes: int) -> list[bytes]:
        """What is shown while the key counts up so far, and afterwards."""
        for number in range(changes):
            self._world.observer.put("/f", b"%d" % number)
            self._world.sleep(0.01)
        self._world.until(lambda: self.shown[-1] == b"%d" % (changes - 1), "it shows the last change")
        self.informer.close()
        return self.shown[1:]

    def _tell(self, mirror: Mirror) -> None:
        self._world.sleep(0.1)
        self.shown.append(mirror.one.value if mirror.one else b"")


@simulated
def test_an_informer_that_gathers_does_not_fall_behind(world: World) -> None:
    reader = SlowReader(world, gathers=True)
    before = concurrency.now()
    reader.follow(100)
    assert concurrency.now() - before < 100 * 0.01 + 3 * 0.1, "it ends with the changes: none of them is queued"


@simulated
def test_an_informer_that_does_not_gather_shows_what_lasted_for_a_moment_too(world: World) -> None:
    assert SlowReader(world).follow(30) == [b"%d" % number for number in range(30)]


def test_an_informer_reports_though_changes_come_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(informer_module, "BATCHES_PER_REPORT", 5)

    def scenario(world: World) -> None:
        shown = [int(value) for value in SlowReader(world, gathers=True).follow(100)]
        assert max(after - before for before, after in pairwise(shown)) == 5

    play(scenario, 0)
