"""What a decider of rounds remembers between its decisions: who is gone, since when, and of what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
from virtual import MemoryEtcd
from virtual.etcd import MemoryClient

from ftcoord.core.death_records import Death
from ftcoord.core.death_records import encode as encode_death
from ftcoord.core.layout import Span, death_key, decided_key, member_id, member_key, round_key, rounds_span
from ftcoord.core.rendezvous_records import JoinRequest, Round, Seat, encode, head_of, parse_decided
from ftcoord.core.round_situation import MOMENT, RoundOptions
from ftcoord.core.verdict import Publish, Wait
from ftcoord.etcd.api import Get, KeyValue
from ftcoord.primitives.group.policy import View
from ftcoord.rendezvous.policy import RendezvousPolicy

PREFIX = "/run"
LEASE = 10.0
NAMES = "ABCD"
ROUND = Round(
    3, tuple(Seat(member_id(1 + at), name, name) for at, name in enumerate(NAMES)), "a", 1, (), 1, 4, ready=True
)


@pytest.fixture
def client() -> Iterator[MemoryClient]:
    with MemoryEtcd() as etcd:
        yield etcd.client()


@pytest.fixture
def policy(client: MemoryClient) -> RendezvousPolicy:
    return RendezvousPolicy(PREFIX, RoundOptions(return_to_seat=LEASE), client)


def seated(name: str) -> JoinRequest:
    return JoinRequest(name, name, 1, 2, name, "", 1, 4, seated=3)


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
    return View(tuple(keys), since, 0.0, decided, at, False, -60.0)


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


def test_a_number_that_has_a_fence_is_not_given(policy: RendezvousPolicy, client: MemoryClient) -> None:
    """Another decider gave it, and the record was deleted. While there is a record, the decider looks only
    when etcd has refused its round."""
    asking = {1 + at: (replace(seated(name), after=3), 0.0) for at, name in enumerate(NAMES)}
    recalled = seen(asking, replace(ROUND, recalled="A came back"))

    def decided() -> tuple[int, tuple[tuple[Span, int], ...]]:
        verdict = policy.decide(recalled, member_id(2), 1.0)
        assert isinstance(verdict, Publish)
        return parse_decided("", verdict.record).number, tuple(verdict.no_newer)

    client.put(round_key(PREFIX, 6), b"")
    assert decided() == (4, ((Span(round_key(PREFIX, 4)), 0),))
    assert decided() == (7, ((Span(round_key(PREFIX, 7)), 0),))


def test_when_the_record_vanished_the_last_round_with_a_fence_is_recalled_and_no_later_fence_may_have_come(
    policy: RendezvousPolicy, client: MemoryClient
) -> None:
    """Another decider gave it while this one was stopped; and a third one may do so until this one's decision comes."""
    there = {1 + at: (seated(name), -60.0) for at, name in enumerate(NAMES)}
    before = policy.decide(seen(there), member_id(1), 0.0)
    assert isinstance(before, Wait)
    gone = replace(seen(there), vanished=True, missing_at=20)
    for fence in (6, 8):  # the second time etcd has refused the first decision
        client.put(round_key(PREFIX, fence), b"")
        looked_at = client.range(Get(rounds_span(PREFIX))).revision
        verdict = policy.decide(gone, member_id(1), 1.0)
        assert isinstance(verdict, Publish)
        record = parse_decided("", verdict.record)
        assert (record.number, bool(record.recalled)) == (fence, True)
        assert tuple(verdict.no_newer) == ((rounds_span(PREFIX), looked_at),)


@pytest.mark.parametrize("knows", [0, 3])
def test_a_new_decider_without_a_record_looks_for_fences(
    policy: RendezvousPolicy, client: MemoryClient, knows: int
) -> None:
    """Each lease has a decider of its own, which has read nothing. Somebody has deleted the record since, and all that
    were in the last round may be dead."""
    client.put(round_key(PREFIX, 6), b"")
    asking = {1 + at: (replace(seated(name), after=knows, seated=0), 0.0) for at, name in enumerate(NAMES)}
    verdict = policy.decide(replace(seen(asking), decided=None, missing_at=20), member_id(1), 1.0)
    assert isinstance(verdict, Publish)
    assert parse_decided("", verdict.record).number == 7


@pytest.mark.parametrize("outcome", ["", "failed"])
def test_a_large_round_is_recalled_when_its_record_vanished_with_its_roll(
    policy: RendezvousPolicy, outcome: str
) -> None:
    """Its nodes may still take their seats, and wait until all have. A run that is closed stays closed."""
    there = {1 + at: (seated(name), -60.0) for at, name in enumerate(NAMES)}
    head = head_of(replace(ROUND, ready=False, closed=outcome, outcome=outcome), "roll", 2, member_id(9))
    decided = KeyValue(decided_key(PREFIX), encode(head), 9, 9, 1, 9)
    gone = replace(seen(there), decided=decided, vanished=True, missing_at=20)
    verdict = policy.decide(gone, member_id(1), 1.0)
    assert isinstance(verdict, Publish)
    record = parse_decided("", verdict.record)
    assert (record.number, record.size, record.closed) == (3, 0, outcome)
    assert record.recalled == "its record vanished from etcd"


def test_a_large_round_that_runs_goes_on_when_its_record_vanished_with_its_roll(policy: RendezvousPolicy) -> None:
    there = {1 + at: (seated(name), -60.0) for at, name in enumerate(NAMES)}
    decided = KeyValue(decided_key(PREFIX), encode(head_of(ROUND, "roll", 2, member_id(9))), 9, 9, 1, 9)
    gone = replace(seen(there), decided=decided, vanished=True, missing_at=20)
    assert isinstance(policy.decide(gone, member_id(1), 1.0), Wait)


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
