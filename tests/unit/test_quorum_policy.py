"""What a decider of quorums remembers of those that it saw."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeAlias

import pytest

from ftcoord.coordination.address import Job
from ftcoord.coordination.policy import HighestSeen, QuorumPolicy, QuorumUse, asking
from ftcoord.core import layout
from ftcoord.core.outlook import Next, Standing
from ftcoord.core.quorum import QuorumOptions
from ftcoord.core.quorum_head import encode_quorum, parse_quorum
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest, QuorumSeat, ReplicaRecord, encode
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
    return ReplicaRecord(QuorumRequest(name, "", "", 0, 1, False, "", 0, ()), asked, after, 0, "", heard)


def quorum_of(verdict: Verdict[bytes], roster: bytes | None = None) -> QuorumRecord:
    assert isinstance(verdict, Publish)
    roster = next((value for _, value in verdict.puts), roster)
    return parse_quorum(layout.decided_key(PREFIX), verdict.record, roster)


def test_what_a_decider_may_have_decided_is_not_given_again_once_its_record_is_deleted() -> None:
    """The answer to that was lost, and somebody else may have been told of it."""
    policy = QuorumPolicy(PREFIX, QuorumOptions(1, 60.0), 60.0, HighestSeen())
    first = policy.decide(view(a=replica("a", 1)), "a", 0.0)
    assert isinstance(first, Publish)
    key, roster = layout.decided_key(PREFIX), first.puts[0][1]
    both = replace(
        view(a=replica("a", 2, after=1, heard=1), b=replica("b", 1)),
        decided=KeyValue(key, first.record, 9, 9, 1, 1),
        roster=KeyValue(layout.roster_key(key), roster, 9, 9, 1, 1),
    )
    for _ in range(2):  # as long as the record is there, its revision tells that the first try did nothing
        second = quorum_of(policy.decide(both, "a", 1.0), roster)
        assert (second.number, second.id) == (2, 2)
    third = quorum_of(policy.decide(replace(both, vanished=True), "a", 1.0), roster)
    assert (third.number, third.id) == (3, 3)


def test_numbers_are_counted_from_etcds_revision_when_the_record_was_deleted() -> None:
    """Each that was ever given had a revision of its own, before that."""
    policy = QuorumPolicy(PREFIX, QuorumOptions(1, 60.0), 60.0, HighestSeen())
    known = replace(view(a=replica("a", 1, after=7, heard=50)), missing_at=1000)
    quorum = quorum_of(policy.decide(known, "a", 0.0))
    assert (quorum.number, quorum.id) == (1001, 1001)


def test_numbers_are_not_lower_than_those_known_where_etcd_has_fewer_revisions() -> None:
    policy = QuorumPolicy(PREFIX, QuorumOptions(1, 60.0), 60.0, HighestSeen())
    known = replace(view(a=replica("a", 1, after=7, heard=50)), missing_at=10)
    quorum = quorum_of(policy.decide(known, "a", 0.0))
    assert (quorum.number, quorum.id) == (51, 11)


def test_a_jobs_first_quorum_has_the_number_one() -> None:
    policy = QuorumPolicy(PREFIX, QuorumOptions(1, 60.0), 60.0, HighestSeen())
    quorum = quorum_of(policy.decide(replace(view(a=replica("a", 1)), missing_at=1000), "a", 0.0))
    assert (quorum.number, quorum.id) == (1, 1)


def test_numbers_are_counted_from_etcds_revision_when_only_etcd_knows_of_an_earlier_quorum() -> None:
    policy = QuorumPolicy(PREFIX, QuorumOptions(1, 60.0), 60.0, HighestSeen())
    quorum = quorum_of(policy.decide(replace(view(a=replica("a", 1)), missing_at=1000, has_era=True), "a", 0.0))
    assert (quorum.number, quorum.id) == (1001, 1001)


def test_what_a_member_knew_that_is_gone_is_not_given_again() -> None:
    policy = QuorumPolicy(PREFIX, QuorumOptions(1, 60.0), 60.0, HighestSeen())
    asking = replica("b", 1)
    assert isinstance(policy.decide(view(a=replica("a", 0, after=17, heard=225), b=asking), "b", 0.0), Wait)
    quorum = quorum_of(policy.decide(view(b=asking), "b", 1.0))
    assert (quorum.number, quorum.id) == (226, 18)


def test_an_id_that_stood_for_other_replicas_is_not_kept_when_etcd_was_restored() -> None:
    """Its replica has built its process group for that id."""
    before, alone = (QuorumPolicy(PREFIX, QuorumOptions(1, 60.0), 60.0, HighestSeen()) for _ in range(2))
    both = view(a=replica("a", 1), b=replica("b", 1))
    lost = before.decide(both, "a", 0.0)
    assert isinstance(lost, Publish)
    assert quorum_of(lost).id == quorum_of(alone.decide(view(a=replica("a", 1)), "a", 0.0)).id == 1
    own = alone.decide(view(a=replica("a", 1)), "a", 0.0)
    assert isinstance(own, Publish)

    def asked_again(last: Publish[bytes]) -> View:
        key, roster = layout.decided_key(PREFIX), last.puts[0][1]
        return replace(
            view(a=replica("a", 2, after=1, heard=1), b=replica("b", 2, after=1, heard=1)),
            decided=KeyValue(key, last.record, 9, 9, 1, 1),
            roster=KeyValue(layout.roster_key(key), roster, 9, 9, 1, 1),
        )

    assert quorum_of(before.decide(asked_again(lost), "a", 1.0), lost.puts[0][1]).id == 1
    alone.decide(asked_again(own), "a", 1.0)
    assert quorum_of(alone.decide(asked_again(lost), "a", 2.0), lost.puts[0][1]).id == 3


def test_a_replica_takes_no_part_in_a_quorum_that_gives_its_id_to_others() -> None:
    """Its decider has not heard of the replica's own quorum, which a restored etcd does not have."""
    use = QuorumUse(Job("etcd", "", "job"), "a", lambda members: {})
    key = layout.decided_key(PREFIX)

    def decided(id_: int, *names: str) -> QuorumRecord:
        seats = tuple(QuorumSeat(name, 1, replica(name, 1).request) for name in names)
        head, roster = encode_quorum(QuorumRecord(1, id_, seats, (), 0.0))
        return use.parse_with_roster(key, head, roster)

    ask = use.stamp(asking(replica("a", 1).request))
    use.takes(decided(6, "a"), 0)
    decided(5, "a", "b")  # what was restored
    found = use.outlook(decided(6, "a", "b"), ["a"], ask)
    assert (found.standing, found.next) == (Standing.MISSED, Next.WRITE)
    assert found.ask is not None
    again = use.stamp(found.ask)
    assert (again.asked, again.after) == (2, 7)
    assert use.outlook(decided(6, "a"), ["a"], ask).standing is Standing.ANSWERED
    assert use.outlook(decided(8, "a", "b"), ["a"], ask).standing is Standing.ANSWERED


def test_a_profile_is_left_out_only_after_an_answer_and_only_once() -> None:
    """Others may have missed the quorum that has it, and somebody may have deleted that."""
    use = QuorumUse(Job("etcd", "", "job"), "a", lambda members: {})
    request = replica("a", 1).request
    seats = (QuorumSeat("a", 1, request),)
    head, roster = encode_quorum(QuorumRecord(1, 1, seats, (), 0.0))
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


Causes: TypeAlias = Callable[[Iterable[str]], dict[str, tuple[str, int]]]


def decider(causes: Causes) -> QuorumPolicy:
    return QuorumPolicy(PREFIX, QuorumOptions(2, 60.0), 60.0, HighestSeen(), causes)


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
def test_a_replica_that_died_and_is_back_in_the_same_decision_is_told_after_it(takes_over: bool) -> None:
    """The decision, in which a step is waiting, neither reads nor writes more for it."""
    asked: list[str] = []

    def causes(members: Iterable[str]) -> dict[str, tuple[str, int]]:
        asked.extend(members)
        return {"b1": ("b was killed", 7)}

    policy = decider(causes)
    back = b_is_back(policy)
    policy = decider(causes) if takes_over else policy
    second = policy.decide(back, "a1", 1.0)
    assert isinstance(second, Publish)
    assert back.roster is not None
    assert quorum_of(second, back.roster.value).id == 1
    assert (second.events, asked, second.nothing_follows) == ([], [], False)
    after = policy.decide(with_record(back, second, 12, 2), "a1", 1.0)
    assert isinstance(after, Wait)
    assert [(one.kind, one.number, one.node, one.member) for one in after.events] == [("died", 1, "b", "b1")]


def test_a_death_whose_cause_etcd_does_not_tell_now_is_asked_for_again() -> None:
    """The replica is back, so nobody would ask later."""
    answers: list[dict[str, tuple[str, int]] | EtcdError] = [
        EtcdUnavailable("no answer"),
        {"b1": ("b was killed", 7)},
    ]

    def causes(members: Iterable[str]) -> dict[str, tuple[str, int]]:
        answer = answers.pop(0)
        if isinstance(answer, EtcdError):
            raise answer
        return answer

    policy = decider(causes)
    back = b_is_back(policy)
    back = with_record(back, policy.decide(back, "a1", 1.0), 12, 2)
    with pytest.raises(EtcdUnavailable):
        policy.decide(back, "a1", 1.0)
    after = policy.decide(back, "a1", 1.0)
    assert isinstance(after, Wait)
    assert [(one.kind, one.number, one.node, one.member) for one in after.events] == [("died", 1, "b", "b1")]


def test_a_death_whose_cause_etcd_refuses_to_tell_stops_no_quorum() -> None:
    def refused(members: Iterable[str]) -> dict[str, tuple[str, int]]:
        raise EtcdAuthError("permission denied")

    policy = decider(refused)
    back = b_is_back(policy)
    back = with_record(back, policy.decide(back, "a1", 1.0), 12, 2)
    after = policy.decide(back, "a1", 1.0)
    assert isinstance(after, Wait)
    assert not after.events
