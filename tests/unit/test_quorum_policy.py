"""What a decider of quorums remembers of those that it saw."""

from __future__ import annotations

from ftcoord.coordination.policy import HighestSeen, QuorumPolicy
from ftcoord.core import layout
from ftcoord.core.quorum import QuorumOptions
from ftcoord.core.quorum_records import QuorumRequest, ReplicaRecord, encode, parse_quorum
from ftcoord.core.verdict import Publish, Wait
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


def test_what_a_member_knew_that_is_gone_is_not_given_again() -> None:
    policy = QuorumPolicy(PREFIX, QuorumOptions(1, 60.0), 60.0, dict, HighestSeen())
    asking = replica("b", 1)
    assert isinstance(policy.decide(view(a=replica("a", 0, after=17, heard=225), b=asking), "b", 0.0), Wait)
    verdict = policy.decide(view(b=asking), "b", 1.0)
    assert isinstance(verdict, Publish)
    roster = next((value for _, value in verdict.puts), None)
    quorum = parse_quorum(layout.decided_key(PREFIX), verdict.record, roster)
    assert (quorum.number, quorum.id) == (226, 18)
