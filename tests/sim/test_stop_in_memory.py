"""An agreed stop, with ranks whose threads change over between any two statements."""

from __future__ import annotations

import random
from datetime import timedelta

from simulator.statements import any_statement
from torch.distributed import Store
from worlds import World, simulated

from ftcoord import concurrency
from ftcoord.stop import KEYS, AgreedStop

RANKS, STEPS = 3, 40


class InstantStore(Store):
    """A store that answers without any time: so a rank's loop goes on while its promise is made."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._changed = concurrency.condition("InstantStore._changed")

    def clone(self) -> InstantStore:
        return self

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._values[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self.set(key, str(total))
            return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._changed:
            if key not in self._values and not expected:
                self.set(key, desired)
            return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self._changed:
            self._changed.wait_for(lambda: all(key in self._values for key in keys))


class Rank:
    """A rank's loop: the steps that it began, in a process of its own."""

    def __init__(self, world: World, store: Store, number: int, *, ends_at: int) -> None:
        self.began: list[int] = []
        self.stopped: int | None = None
        self._ends_at = ends_at
        with world.scheduler.process(f"rank {number}"):
            self.stop = AgreedStop(store, number, RANKS, signals=())
            self.thread = concurrency.thread(self._train, f"loop of rank {number}")
        self.thread.start()

    def _train(self) -> None:
        for step in range(self._ends_at):
            if self.stop.at(step):
                self.stopped = step
                return
            self.began.append(step)
        self.stop.close()


def play(world: World, *lengths: int) -> list[Rank]:
    with any_statement(world.scheduler):
        store = InstantStore()
        ranks = [Rank(world, store, number, ends_at=length) for number, length in enumerate(lengths)]
        ranks[world.seed % RANKS].stop.request("a test")
        for rank in ranks:
            rank.thread.join(1000)
    return ranks


def ranks_stop_at_one_step(world: World) -> None:
    """All that are still in their loops: one that has ended its loop is not waited for."""
    lengths = (random.Random(world.seed).choice([2, STEPS]), STEPS, STEPS)
    ranks = play(world, *lengths)
    stopped = {rank.stopped for rank in ranks} - {None}
    assert len(stopped) <= 1
    for rank, length in zip(ranks, lengths, strict=True):
        assert rank.began == list(range(length if rank.stopped is None else rank.stopped))
        assert rank.stop.reason == "a test" or rank.stopped is None


test_ranks_stop_at_one_step = simulated(ranks_stop_at_one_step, 200)


class SlowStore(InstantStore):
    """A store that takes a second to write a promise."""

    def set(self, key: str, value: str) -> None:
        if "/promise/" in key:
            concurrency.sleep(1)
        super().set(key, value)


@simulated
def test_a_rank_that_ends_in_the_middle_of_its_promise_has_made_it(world: World) -> None:
    """Its process ends then, and the others wait for all promises."""
    store = SlowStore()
    with world.scheduler.process("rank 0"):
        stop = AgreedStop(store, 0, 2, signals=())
    stop.request("a test")
    world.sleep(0.5)
    stop.close()
    assert store.multi_get([f"{KEYS}/promise/0", f"{KEYS}/promised"]) == [b"0", b"1"]
