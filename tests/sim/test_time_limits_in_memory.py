"""A call ends in the time that its caller gives it, whichever of its requests etcd does not answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers import rdzv_settings
from torch.distributed.elastic.rendezvous.api import RendezvousError
from virtual import DELIVERED, Call, Fate, MemoryClient
from worlds import World, play, simulated

from ftcoord import concurrency
from ftcoord.coordination.address import parse_address
from ftcoord.coordination.replica import Replica
from ftcoord.core.rendezvous_records import RoundHead
from ftcoord.errors import EtcdUnavailable, OutcomeUnknown
from ftcoord.etcd.api import Put
from ftcoord.etcd.retry import SHORTEST_TIMEOUT, TimeLimit
from ftcoord.primitives.group.participant import TAKE_BACK_TIMEOUT
from ftcoord.primitives.write_once import WRITE_ATTEMPT_TIMEOUT, ExactlyOnceWriter
from ftcoord.rendezvous.node import Node
from ftcoord.rendezvous.pace import LAST_READ_TIMEOUT
from ftcoord.rendezvous.run_record import RecordChange, change_record

TIMEOUT = 0.5
"""Seconds that callers allow: a fraction of what one request may take."""
LAST_REQUESTS = 0.35
"""Seconds that requests may take whose time was over before they began: each has a tenth in any case."""


def hanging_after(world: World, answered: int) -> MemoryClient:
    """A client of an etcd that hangs after it has answered so many requests of this client's."""
    left = [answered]

    def fate(_call: Call) -> Fate:
        if not left[0]:
            client.cut_off()
        left[0] -= 1
        return DELIVERED

    client = world.etcd.client(fate)
    return client


def seconds_of(call: Callable[[], object]) -> float:
    """How long a call takes that does not end well."""
    began = concurrency.now()
    with pytest.raises((EtcdUnavailable, OutcomeUnknown, TimeoutError)):
        call()
    return concurrency.now() - began


@pytest.mark.parametrize("answered", range(2))
def test_a_change_of_a_store_takes_no_longer_than_its_deadline(answered: int) -> None:
    @simulated
    def scenario(world: World) -> None:
        client = hanging_after(world, answered)
        writer = ExactlyOnceWriter(client, "/s/", 60, None, None, concurrency.event())
        deadline = concurrency.now() + TIMEOUT
        seconds = seconds_of(lambda: writer.make([Put("/s/key", b"1")], [], None, deadline))
        assert seconds < SHORTEST_TIMEOUT + LAST_REQUESTS
        writer.close()

    scenario()


@pytest.mark.parametrize("answered", range(12))
def test_a_node_that_gets_no_round_in_time_leaves_soon_after(answered: int) -> None:
    """It still looks who is there, takes back what it asked, and gives up its lease."""

    def scenario(world: World) -> None:
        settings = rdzv_settings((2, 2), join_timeout=4.0)
        node = Node(hanging_after(world, answered), settings, "host", "host")
        began = concurrency.now()
        with pytest.raises(RendezvousError):
            node.ask(1)
        seconds = concurrency.now() - began
        leaving = WRITE_ATTEMPT_TIMEOUT + TAKE_BACK_TIMEOUT
        assert seconds < settings.times.join_timeout + LAST_READ_TIMEOUT + leaving + LAST_REQUESTS

    play(scenario, answered)


@simulated
def test_a_replica_leaves_in_the_time_that_it_was_given(world: World) -> None:
    """It says that it leaves, and gives up its lease."""
    client = world.etcd.client()
    replica = Replica(client, parse_address("etcd://memory:1/job"), "a", keeps_lease=True, dies_with_process=False)
    replica.beat(concurrency.now() + 60)
    client.cut_off()
    began = concurrency.now()
    replica.leave(2.0)
    assert concurrency.now() - began < 2.0 + LAST_REQUESTS


@simulated
def test_a_run_is_closed_in_time_or_not_at_all(world: World) -> None:
    """Its record is read, a lease is granted, and the record is written: each in time by itself, but not together."""

    def ends(now: RoundHead) -> RecordChange:
        return now, (), ()

    client = world.etcd.client(lambda _call: Fate(answers=0.8 * TIMEOUT))
    seconds = seconds_of(lambda: change_record(client, "/run", 60, ends, by="me", within=TimeLimit.of(TIMEOUT)))
    assert seconds < TIMEOUT + LAST_REQUESTS
