"""What a decider of quorums remembers of those that it saw."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeAlias

import builders
import pytest

from ftcoord.coordination.address import Job
from ftcoord.coordination.policy import HighestSeen, QuorumPolicy, QuorumUse, asking
from ftcoord.core import layout
from ftcoord.core.death_records import KnownCause
from ftcoord.core.quorum import QuorumOptions
from ftcoord.core.quorum_head import encode_quorum, parse_quorum
from ftcoord.core.quorum_records import QuorumRecord, QuorumSeat, ReplicaRecord, encode
from ftcoord.core.verdict import Publish, Verdict, Wait
from ftcoord.errors import EtcdAuthError, EtcdError, EtcdUnavailable
from ftcoord.etcd.api import KeyValue
from ftcoord.primitives.group.policy import View

PREFIX = "/ftcoord/v1/job/quorum"


def view(**members: ReplicaRecord) -> View:
    kvs = tuple(
        KeyValue(layout.member_key(PREFIX, name), encode(record), at, at, 1, at)
        for at, (name, record) in enumerate(members.items(), 2)
    )
    return View(kvs, {kv.key: 0.0 for kv in kvs}, 0.0, None, 0.0, False, 0.0)


def replica(name: str, asked: int, after: int = 0, heard: int = 0) -> ReplicaRecord:
    return builders.replica(builders.request(name), asked=asked, after=after, profile="", heard=heard)


def quorum_of(verdict: Verdict[bytes], roster: bytes | None = None) -> QuorumRecord:
    assert isinstance(verdict, Publish)
    roster = next((value for _, value in verdict.puts), roster)
    return parse_quorum(layout.decided_key(PREFIX), verdict.record, roster)


def test_a_jobs_first_quorum_has_the_number_one() -> None:
    policy = QuorumPolicy(PREFIX, QuorumOptions(1, 60.0), HighestSeen())
    quorum = quorum_of(policy.decide(replace(view(a=replica("a", 1)), missing_at=1000), "a", 0.0))
    assert (quorum.number, quorum.id) == (1, 1)


def test_what_a_member_knew_that_is_gone_is_not_given_again() -> None:
    policy = QuorumPolicy(PREFIX, QuorumOptions(1, 60.0), HighestSeen())
    asking = replica("b", 1)
    assert isinstance(policy.decide(view(a=replica("a", 0, after=17, heard=225), b=asking), "b", 0.0), Wait)
    quorum = quorum_of(policy.decide(view(b=asking), "b", 1.0))
    assert (quorum.number, quorum.id) == (226, 18)


def test_a_profile_is_left_out_only_after_an_answer_and_only_once() -> None:
    """Others may have missed the quorum that has it, and somebody may have deleted that."""
    use = QuorumUse(Job("etcd", "", "job"), "a", lambda members: {})
    request = replica("a", 1).request
    seats = (QuorumSeat("a", 1, request),)
    head, roster = encode_quorum(builders.quorum(1, seats))
    quorum = use.parse_with_roster(layout.decided_key(PREFIX), head, roster)
    first = use.stamp(asking(request))
    assert not first.profile, "nothing of this replica was ever answered, whatever others of its name were told"
    use.takes(quorum, first.asked)
    short = use.stamp(asking(request))
    assert short.profile
    assert not use.stamp(short).profile, "it waits, and writes its request again"
    second = use.stamp(asking(request))
    assert not second.profile, "nobody has answered the one before"
    use.takes(quorum, second.asked)
    use.takes(quorum, short.asked)  # a call that ends late
    last = use.stamp(asking(request))
    assert last.profile
    use.nobody_asks()
    assert use.stamp(last).profile, "nobody needs a request that was answered, and beats repeat it"


Causes: TypeAlias = Callable[[Iterable[str]], dict[str, KnownCause]]


def decider(causes: Causes) -> QuorumPolicy:
    return QuorumPolicy(PREFIX, QuorumOptions(2, 60.0), HighestSeen(), causes)


def with_record(seen: View, decision: Verdict[bytes], at: int, version: int) -> View:
    """What a decider sees next."""
    assert isinstance(decision, Publish)
    key = layout.decided_key(PREFIX)
    roster = dict(decision.puts).get(layout.roster_key(key), seen.roster.value if seen.roster else b"")
    return replace(
        seen,
        decided=KeyValue(key, decision.record, 9, at, version, 1),
        roster=KeyValue(layout.roster_key(key), roster, 9, at, version, 1),
    )


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
    assert back.roster is not None
    assert quorum_of(second, back.roster.value).id == 1
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
