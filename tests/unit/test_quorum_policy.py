"""What a decider of quorums remembers of those that it saw."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeAlias

import builders
import pytest

from ftcoord.coordination.policy import GATHERS, HighestSeen, QuorumPolicy
from ftcoord.core import layout
from ftcoord.core.asks import Ask, OpenAsk, Via
from ftcoord.core.death_records import KnownCause
from ftcoord.core.quorum import QuorumOptions
from ftcoord.core.quorum_records import QuorumRecord, ReplicaRecord, encode, parse_quorum
from ftcoord.core.verdict import Publish, Verdict, Wait
from ftcoord.errors import EtcdAuthError, EtcdError, EtcdUnavailable
from ftcoord.etcd.api import KeyValue
from ftcoord.primitives.group.use import View

PREFIX = "/ftcoord/v2/job/quorum"


def view(**members: ReplicaRecord) -> View:
    kvs = tuple(
        KeyValue(layout.member_key(PREFIX, name), encode(record), at, at, 1, at)
        for at, (name, record) in enumerate(members.items(), 2)
    )
    return View(kvs, {kv.key: 0.0 for kv in kvs}, 0.0, None, 0.0, False, 0.0)


def replica(name: str, asked: int, after: int = 0, heard: int = 0) -> ReplicaRecord:
    return builders.replica(builders.request(name), asked=asked, after=after, heard=heard)


def quorum_of(verdict: Verdict[bytes]) -> QuorumRecord:
    assert isinstance(verdict, Publish)
    return parse_quorum(layout.decided_key(PREFIX), verdict.record)


def test_a_jobs_first_quorum_has_the_number_one() -> None:
    policy = QuorumPolicy(PREFIX, QuorumOptions(1, 60.0), HighestSeen())
    quorum = quorum_of(policy.decide(view(a=replica("a", 1)), "a", 0.0))
    assert (quorum.number, quorum.id) == (1, 1)


def test_what_a_member_knew_that_is_gone_is_not_given_again() -> None:
    policy = QuorumPolicy(PREFIX, QuorumOptions(1, 60.0), HighestSeen())
    asking = replica("b", 1)
    assert isinstance(policy.decide(view(a=replica("a", 0, after=17, heard=225), b=asking), "b", 0.0), Wait)
    quorum = quorum_of(policy.decide(view(b=asking), "b", 1.0))
    assert (quorum.number, quorum.id) == (226, 18)


Causes: TypeAlias = Callable[[Iterable[str]], dict[str, KnownCause]]


def decider(causes: Causes) -> QuorumPolicy:
    return QuorumPolicy(PREFIX, QuorumOptions(2, 60.0), HighestSeen(), causes)


def with_record(seen: View, decision: Verdict[bytes], at: int, version: int) -> View:
    """What a decider sees next."""
    assert isinstance(decision, Publish)
    return replace(seen, decided=KeyValue(layout.decided_key(PREFIX), decision.record, 9, at, version, 1))


def b_is_back(policy: QuorumPolicy) -> View:
    """What it sees after its first quorum: one of two replicas has died, and is back at once."""
    first = policy.decide(view(a1=replica("a", 1), b1=replica("b", 1)), "a1", 0.0)
    return with_record(view(a1=replica("a", 2, after=1, heard=1), b2=replica("b", 1)), first, 9, 1)


@pytest.mark.parametrize("takes_over", [False, True])
def test_a_replica_that_died_and_is_back_is_told_with_the_decision_that_seats_it_again(takes_over: bool) -> None:
    asked: list[str] = []

    def causes(members: Iterable[str]) -> dict[str, KnownCause]:
        asked.extend(members)
        return {"b1": KnownCause("b was killed", 7)}

    policy = decider(causes)
    back = b_is_back(policy)
    policy = decider(causes) if takes_over else policy
    second = policy.decide(back, "a1", 1.0)
    assert isinstance(second, Publish)
    assert quorum_of(second).id == 1
    assert [(one.kind, one.number, one.node, one.member) for one in second.events] == [("died", 1, "b", "b1")]
    assert asked == ["b1"]


@pytest.mark.parametrize("problem", [EtcdUnavailable("no answer"), EtcdAuthError("permission denied")])
def test_a_death_whose_cause_etcd_does_not_tell_delays_no_quorum(problem: EtcdError) -> None:
    def refused(members: Iterable[str]) -> dict[str, KnownCause]:
        raise problem

    policy = decider(refused)
    second = policy.decide(b_is_back(policy), "a1", 1.0)
    assert isinstance(second, Publish)
    assert not second.events


# -- what members ask the decider itself -------------------------------------------------------------------------------


def asked(member: str, serial: int, step: int, order: int = 1, seen_at: int = 9, since: int = 4) -> OpenAsk:
    """An ask that came by port."""
    ask = Ask(member, since, serial, 0, 0, builders.request(member[0], step=step))
    return OpenAsk(ask, Via("p", 1), 0.0, order, seen_at, seen_at)


def steps(verdict: Verdict[bytes]) -> dict[str, int]:
    return {seat.member: seat.request.step for seat in quorum_of(verdict).seats}


def test_of_a_members_asks_by_key_and_by_port_the_later_one_counts() -> None:
    seen = view(a=replica("a", 3), b=replica("b", 0), c=replica("c", 2))
    asks = {"a": asked("a", 2, step=7), "b": asked("b", 1, step=8), "c": asked("c", 3, step=9)}
    policy = QuorumPolicy(PREFIX, QuorumOptions(3, 60.0), HighestSeen())
    assert steps(policy.decide(replace(seen, asks=asks), "a", 0.0)) == {"a": 0, "b": 8, "c": 9}


def test_an_ask_by_port_counts_no_more_once_its_member_has_written_its_key() -> None:
    """By that it has asked the same, and withdrawn: its connection was lost, which the decider does not see."""
    seen = view(a=replica("a", 0), b=replica("b", 0))
    policy = QuorumPolicy(PREFIX, QuorumOptions(1, 60.0), HighestSeen())
    asks = {"a": asked("a", 1, step=5), "b": asked("b", 1, step=5, since=2)}
    assert isinstance(policy.decide(replace(seen, asks=asks), "a", 0.0), Wait)


@pytest.mark.parametrize(("seen_at", "seated"), [(9, "a1"), (2, None)])
def test_a_newer_member_hides_what_came_by_port_before_it(seen_at: int, seated: str | None) -> None:
    """`a2` has come at revision 3, and does not ask."""
    seen = view(a1=replica("a", 0), a2=replica("a", 0))
    policy = QuorumPolicy(PREFIX, QuorumOptions(1, 60.0), HighestSeen())
    verdict = policy.decide(replace(seen, asks={"a1": asked("a1", 1, step=5, seen_at=seen_at, since=2)}), "a1", 0.0)
    assert [seat.member for seat in quorum_of(verdict).seats] == [seated] if seated else isinstance(verdict, Wait)


def test_of_two_asks_of_one_name_that_came_at_one_revision_the_last_one_counts() -> None:
    seen = view(a1=replica("a", 0), a2=replica("a", 0))
    policy = QuorumPolicy(PREFIX, QuorumOptions(1, 60.0), HighestSeen())
    asks = {"a1": asked("a1", 1, step=5, order=2), "a2": asked("a2", 1, step=6, order=1)}
    assert steps(policy.decide(replace(seen, asks=asks), "a1", 0.0)) == {"a1": 5}


def test_a_new_decider_gathers_for_as_long_as_the_last_quorum_is_large() -> None:
    policy = QuorumPolicy(PREFIX, QuorumOptions(1, 0.0), HighestSeen())
    seen = replace(view(a=replica("a", 0), b=replica("b", 0), c=replica("c", 0)), took_at=10.0)
    seen = replace(seen, asks={name: asked(name, 1, step=5) for name in "ab"})
    verdict = policy.decide(seen, "a", 10.0)
    assert isinstance(verdict, Wait)
    assert verdict.until == pytest.approx(10.0 + GATHERS)
    assert steps(policy.decide(seen, "a", 10.0 + GATHERS)) == {"a": 5, "b": 5}
