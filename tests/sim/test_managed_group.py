"""A manager that comes back after it lost its lease."""

from __future__ import annotations

from typing import cast

from worlds import World, simulated

from ftcoord import concurrency
from ftcoord.coordination.managed_group import REJOIN_PAUSE, ManagedGroup
from ftcoord.coordination.replica import Replica


class LosesItsLease:
    """A replica that is lost as soon as it has joined: its group's thread fails each time."""

    joined = False

    def __init__(self) -> None:
        self.beats = 0

    def await_loss(self, timeout: float | None) -> None:
        pass

    def beat(self, deadline: float) -> None:
        self.beats += 1
        concurrency.sleep(0.01)


@simulated
def test_a_manager_that_loses_each_lease_at_once_does_not_load_etcd(world: World) -> None:
    replica = LosesItsLease()
    group = ManagedGroup.__new__(ManagedGroup)  # without its sockets
    group._closed, group._replica = concurrency.event(), cast(Replica, replica)
    interval = (None, 0.5)[world.seed % 2]
    thread = concurrency.thread(group._stay, "beats", interval)
    thread.start()
    world.sleep(20)
    group._closed.set()
    thread.join(60)
    assert not thread.is_alive()
    assert 10 <= replica.beats <= 1 + 20 / (interval or REJOIN_PAUSE)
