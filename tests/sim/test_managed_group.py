"""A manager that comes back after it lost its lease, and one whose etcd is slow."""

from __future__ import annotations

from typing import cast

import builders
import pytest
from virtual import DELIVERED, Call, Fate
from worlds import World, simulated

from ftcoord import concurrency
from ftcoord.coordination.address import parse_address
from ftcoord.coordination.manager import REJOIN_PAUSE, ManagedGroup
from ftcoord.coordination.replica import Replica
from ftcoord.core.layout import members_span
from ftcoord.core.quorum_records import parse_replica
from ftcoord.primitives.group.participant import TAKE_BACK_TIMEOUT

UNBEATEN = parse_address("etcd://memory:1/job?min_replicas=2")
"""A job whose replicas live as long as their leases do."""


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
    thread = concurrency.thread(group._stay, "joins again")
    thread.start()
    world.sleep(20)
    group._closed.set()
    thread.join(60)
    assert not thread.is_alive()
    assert 10 <= replica.beats <= 1 + 20 / REJOIN_PAUSE


@simulated
def test_nobody_asks_for_a_rank_that_has_gone_though_its_request_is_still_under_way(world: World) -> None:
    """It arrives later than a withdrawal alone may take."""
    client, late = world.etcd.client(), list[Call]()
    replica = Replica(client, UNBEATEN, "a", keeps_lease=True, dies_with_process=False)
    replica.beat(concurrency.now() + 60)
    gone = concurrency.event()

    def delay_first(call: Call) -> Fate:
        if call.writes and not late:
            late.append(call)
            return Fate(arrives=2 * TAKE_BACK_TIMEOUT)
        return DELIVERED

    def go() -> None:
        world.until(lambda: late, "the request is under way")
        gone.set()
        replica.participant.nudge()

    client.fate = delay_first
    concurrency.thread(go, "goes away").start()
    with pytest.raises(TimeoutError):
        replica.ask(builders.request("a", address="http://a:1", store_address="a:2"), concurrency.now() + 30, gone)
    world.sleep(5)
    ((key, value),) = world.keys(members_span(UNBEATEN.prefix).start).items()
    assert parse_replica(key, value).asked == 0
    replica.leave(10)
