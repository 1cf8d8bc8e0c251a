"""What the doctor finds, and whom a name means: from facts in memory."""

from __future__ import annotations

from dataclasses import replace

import builders
import pytest

from ftcoord.core import quorum_records, rendezvous_records
from ftcoord.core.layout import member_id, member_key, quorum_prefix, run_prefix
from ftcoord.etcd.api import KeyValue, MemberStatus
from ftcoord.operator.doctor import DEFAULT_QUOTA, EtcdFacts, findings
from ftcoord.operator.orders import members_called, owners
from ftcoord.operator.status import GroupKeys, JobKeys

STATUS = MemberStatus("3.6.9", "a", "a", 3, 1000, 1000, 0, False, (), 0.001)
FACTS = EtcdFacts([("h1:2379", STATUS)], True, False, False, "/f", [], 0.001, 0.002)


def said(facts: EtcdFacts) -> dict[str, str]:
    """The level of each finding that is not fine, by what it is about; each says what to do."""
    found = findings(facts)
    assert found.healthy == all(one.level != "problem" for one in found.findings)
    assert [one.level for one in found.findings] == sorted(
        (one.level for one in found.findings), key=["problem", "hint", "ok"].index
    )
    odd = [one for one in found.findings if one.level != "ok"]
    assert all(one.do for one in odd)
    return {one.about: one.level for one in odd}


def with_status(**fields: object) -> EtcdFacts:
    return replace(FACTS, endpoints=[("h1:2379", replace(STATUS, **fields))])  # type: ignore[arg-type]


def test_nothing_is_wrong_with_a_good_etcd() -> None:
    assert said(FACTS) == {}
    about = {one.about for one in findings(FACTS).findings}
    assert {"endpoint h1:2379", "leader", "release", "TLS", "right to read", "right to write"} <= about


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (replace(FACTS, endpoints=[*FACTS.endpoints, ("h2", "refused")]), {"endpoint h2": "problem"}),
        (replace(FACTS, alarms=[("a", "CORRUPT")]), {"alarm": "problem"}),
        (replace(FACTS, alarms=[("a", "NOSPACE")]), {"space": "problem"}),
        (replace(FACTS, is_full=True, alarms=None), {"space": "problem", "alarms": "hint"}),
        (replace(with_status(errors=("alarm:NOSPACE",)), alarms=[("a", "NOSPACE")]), {"space": "problem"}),
        (replace(FACTS, has_login=True, is_login_off=True), {"login": "hint"}),
        (replace(FACTS, alarms=None), {"alarms": "hint"}),
        (replace(FACTS, read_seconds=0.2), {"read latency": "hint"}),
        (replace(FACTS, write_seconds=1.5), {"write latency": "problem"}),
        (replace(FACTS, cannot_read="no", read_seconds=None), {"right to read": "problem"}),
        (replace(FACTS, cannot_write="no", write_seconds=None), {"right to write": "problem"}),
        (replace(FACTS, is_loopback=False), {"TLS": "hint", "login": "hint", "endpoints": "hint"}),
        (with_status(version="3.4.1"), {"release": "hint"}),
        (with_status(leader_id=""), {"member h1:2379": "problem"}),
        (with_status(is_learner=True), {"member h1:2379": "hint"}),
        (with_status(errors=("disk",)), {"member h1:2379": "problem"}),
        (with_status(db_size=DEFAULT_QUOTA), {"database h1:2379": "hint"}),
        (with_status(db_size=900, db_quota=1000), {"database h1:2379": "problem"}),
        (with_status(db_size=2**29, db_size_in_use=1), {"database h1:2379": "hint"}),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(facts: EtcdFacts, expected: dict[str, str]) -> None:
    assert said(facts) == expected


def test_endpoints_of_two_clusters_are_noticed() -> None:
    other = "h2", replace(STATUS, leader_id="b", version="3.5.28")
    assert said(replace(FACTS, endpoints=[*FACTS.endpoints, other])) == {"leader": "problem", "release": "hint"}


# -- whom a name means ----------------------------------------------------------------------------------------------

RUN, QUORUM = run_prefix("/f", "job"), quorum_prefix("/f", "job")


def kv(key: str, value: bytes, lease: int = 0) -> KeyValue:
    return KeyValue(key, value, 1, 1, 1, lease)


def node(lease: int, name: str, host: str) -> KeyValue:
    ask = builders.ask(name, address="a", host=host, nonce="")
    return kv(member_key(RUN, member_id(lease)), rendezvous_records.encode(ask), lease)


def replica(lease: int, name: str) -> KeyValue:
    request = builders.request(name, address="a", store_address="b")
    record = quorum_records.encode(builders.replica(request))
    return kv(member_key(QUORUM, member_id(lease)), record, lease)


REPLICAS = (
    replica(9, "r1"),
    replica(10, "t_1:4f1c"),
    replica(11, "t_10:4f1d"),
    replica(12, "t_2:4a"),
    replica(13, "t_2:4b"),
)


def keys(*nodes: KeyValue) -> JobKeys:
    return JobKeys("job", 5, GroupKeys(RUN, below_members=nodes), GroupKeys(QUORUM, below_members=REPLICAS), True)


TWO = keys(node(1, "n1", "h (pid 7)"), node(2, "n1", "h (pid 7)"), node(3, "n2", "h (pid 8)"))


@pytest.mark.parametrize(
    ("name", "leases", "several"),
    [
        (member_id(2), [2], 1),
        ("n1", [1, 2], 1),
        ("n2", [3], 1),
        ("h", [1, 2, 3], 2),
        ("h (pid 8)", [3], 1),
        ("r1", [9], 1),
        ("t_1", [10], 1),
        ("t_10:4", [11], 1),
        ("t_2", [12, 13], 2),
        ("t_2:4b", [13], 1),
        ("t_", [], 0),
        ("x", [], 0),
        ("", [], 0),
    ],
)
def test_a_name_means_all_leases_of_one_owner(name: str, leases: list[int], several: int) -> None:
    found = members_called(TWO, name)
    assert [one.kv.lease for one in found] == leases
    assert len(owners(found)) == several


def test_a_member_that_says_nothing_readable_has_an_id_all_the_same() -> None:
    odd = kv(member_key(RUN, member_id(4)), b"{", 4)
    assert [one.kv for one in members_called(keys(odd), member_id(4))] == [odd]
