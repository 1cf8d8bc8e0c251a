"""What a decider of rounds remembers between its decisions: who is gone, since when, and of what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import builders
import pytest
from virtual import MemoryEtcd
from virtual.etcd import MemoryClient

from ftcoord.core.death_records import Death, encode as encode_death
from ftcoord.core.layout import death_key, decided_key, member_id, member_key
from ftcoord.core.rendezvous import MOMENT, RoundOptions
from ftcoord.core.rendezvous_records import JoinRequest, Round, Seat, encode
from ftcoord.core.verdict import Publish, Wait
from ftcoord.etcd.api import KeyValue
from ftcoord.primitives.group.use import View
from ftcoord.rendezvous.policy import RendezvousPolicy

PREFIX = "/run"
LEASE = 10.0
NAMES = "ABCD"
ROUND = builders.round_(
    3,
    tuple(Seat(member_id(1 + at), name, name) for at, name in enumerate(NAMES)),
    address="a",
    port=1,
    ready=True,
    limits=(1, 4),
)


@pytest.fixture
def client() -> Iterator[MemoryClient]:
    with MemoryEtcd() as etcd:
        client = etcd.client()
        for key, value in builders.round_keys(PREFIX, ROUND).items():
            client.put(key, value)
        yield client


@pytest.fixture
def policy(client: MemoryClient) -> RendezvousPolicy:
    return RendezvousPolicy(PREFIX, RoundOptions(return_to_seat=LEASE), client)


def seated(name: str) -> JoinRequest:
    return builders.ask(name, address=name, after=2, host=name, nonce="", seated=3, limits=(1, 4))


def holding(name: str) -> JoinRequest:
    return replace(seated(name), after=3, holds=member_id(1 + NAMES.index(name)))


def seen(members: Mapping[int, tuple[JoinRequest, float]], record: Round = ROUND, at: float = -60.0) -> View:
    """By lease: what each says, and since when; and the record, and since when."""
    keys = [
        KeyValue(member_key(PREFIX, member_id(lease)), encode(ask), lease, lease, 1, lease)
        for lease, (ask, _) in members.items()
    ]
    since = {kv.key: at for kv, (_, at) in zip(keys, members.values(), strict=True)}
    decided = KeyValue(decided_key(PREFIX), encode(record), 9, 9, 1, 9)
    return View(tuple(keys), since, 0.0, decided, at, -60.0)


def test_each_that_loses_its_lease_has_its_own_time(policy: RendezvousPolicy) -> None:
    """Also if another one was gone before: that one is back."""
    there = {1 + at: (seated(name), -60.0) for at, name in enumerate(NAMES)}

    def decided(now: float, *gone: int, **back: JoinRequest) -> Wait | Publish:
        live = {lease: one for lease, one in there.items() if lease not in gone}
        live |= {5 + at: (ask, now) for at, ask in enumerate(back.values())}
        return policy.decide(seen(live), member_id(4), now)

    first, both = decided(0.0, 1), decided(0.25, 1, 2)
    assert isinstance(first, Wait)
    assert isinstance(both, Wait)
    assert (first.until, both.until) == (MOMENT, MOMENT)
    for now in (0.375, 0.24 + LEASE):
        assert isinstance(decided(now, 1, 2, a=holding("A")), Wait)
    assert isinstance(decided(0.25 + LEASE, 1, 2, a=holding("A")), Publish)


def test_a_seat_that_is_held_in_another_round_is_vacant(policy: RendezvousPolicy, client: MemoryClient) -> None:
    """So it is known since when it is, and why."""
    client.put(death_key(PREFIX, member_id(1)), encode_death(Death("a was killed", 0)))
    others = {1 + at: (seated(NAMES[at]), -60.0) for at in (1, 2, 3)}
    verdict = policy.decide(seen({**others, 5: (replace(holding("A"), seated=2), 0.0)}), member_id(2), 0.0)
    assert isinstance(verdict, Publish)
    assert "a was killed" in verdict.reason


def test_another_node_that_is_drained_starts_no_time_out_anew(policy: RendezvousPolicy) -> None:
    """The record changes, but its round was recalled when it was."""
    recalled = replace(ROUND, recalled="hostA was drained", drained=("A",))
    asking = {1 + at: (replace(seated(name), after=3), 0.0) for at, name in enumerate("BC", 1)}
    asking[4] = seated("D"), -60.0  # who is still to come back
    before = policy.decide(seen(asking, recalled, at=1.0), member_id(2), 1.0)
    again = policy.decide(seen(asking, replace(recalled, drained=("A", "X")), at=5.0), member_id(2), 5.0)
    assert isinstance(before, Wait)
    assert isinstance(again, Wait)
    assert before.until == again.until is not None
