"""What the doctor finds, with an etcd that answers as it should or not; and whom a name means."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import builders
import pytest
from reports import seen

from ftcoord.config import EtcdConfig
from ftcoord.core import quorum_records, rendezvous_records
from ftcoord.core.layout import member_id, member_key, quorum_prefix, run_prefix
from ftcoord.errors import EtcdAuthError, EtcdNoSpace, EtcdUnavailable
from ftcoord.etcd.api import Began, KeyValue, Lease, MemberStatus
from ftcoord.operator import doctor
from ftcoord.operator.doctor import DEFAULT_QUOTA, READS_TIMED, WRITES_TIMED
from ftcoord.operator.orders import members_called
from ftcoord.operator.status import GroupKeys, JobKeys

STATUS = MemberStatus("3.6.9", "a", "a", 3, 1000, 1000, 0, False, (), 0.001)
REFUSED, FULL = EtcdAuthError("permission denied"), EtcdNoSpace("no space")
LOCAL, OTHER = (EtcdConfig.load(f"{host}:1", env={}) for host in ("127.0.0.1", "10.0.0.1"))
BOTH = EtcdConfig.load("127.0.0.1:1,127.0.0.1:2", env={})
USER = EtcdConfig.load("127.0.0.1:1", env={}, user="ann", password="x")

Examine = Callable[..., dict[str, str]]


@pytest.fixture
def examine(monkeypatch: pytest.MonkeyPatch) -> Examine:
    """Examines an etcd whose calls return these values, or raise them; returns the level of each finding that is not
    fine, by what it is about. Each names what to do."""

    def examined(
        *statuses: Any,
        config: EtcdConfig = LOCAL,
        reads: float = 0.001,
        writes: float = 0.001,
        everything: bool = False,
        **answers: Any,
    ) -> dict[str, str]:
        left = [one for one in statuses or (STATUS,) for _ in "12"[isinstance(one, Exception) :]]
        answers = {"alarms": [], "requires_login": True, "range": None, "txn": None, "renew": 10, **answers}

        def answer(value: Any) -> Any:
            if isinstance(value, Exception):
                raise value
            return value

        calls: dict[str, Any] = {name: lambda *_, of=value: answer(of) for name, value in answers.items()}
        calls |= {"member_status": lambda: answer(left.pop(0)), "revoke": lambda _: None}
        calls |= {"grant": lambda ttl: Lease(7, ttl), "config": SimpleNamespace(request_timeout=0.1)}
        calls["watch"] = lambda _span, _start, deliver: deliver(Began(1)) or SimpleNamespace(cancel=lambda: None)
        seconds = {READS_TIMED: reads, WRITES_TIMED: 2 * writes}
        monkeypatch.setattr(doctor, "EtcdClient", lambda _: nullcontext(SimpleNamespace(**calls)))
        monkeypatch.setattr(doctor, "_timed", lambda call, times: (call(), seconds[times])[1])
        found = seen(doctor.examine(config, "/f")[0])
        assert found.healthy == all(one.level != "problem" for one in found.findings)
        assert [*found.findings] == sorted(found.findings, key=lambda one: ["problem", "hint", "ok"].index(one.level))
        assert all(one.do for one in found.findings if one.level != "ok")
        return {one.about: one.level for one in found.findings if everything or one.level != "ok"}

    return examined


def status(**fields: Any) -> MemberStatus:
    return replace(STATUS, **fields)


def test_nothing_is_wrong_with_a_good_etcd(examine: Examine) -> None:
    assert examine() == {}
    assert examine(everything=True).keys() >= {
        "endpoint 127.0.0.1:1", "leader", "release", "TLS", "right to read", "right to write", "lease", "watch"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("statuses", "calls", "expected"),
    [
        ((STATUS, EtcdUnavailable("refused")), {"config": BOTH}, {"endpoint 127.0.0.1:2": "problem"}),
        ((), {"alarms": [("a", "CORRUPT")]}, {"alarm": "problem"}),
        ((), {"alarms": [("a", "NOSPACE")]}, {"space": "problem"}),
        ((), {"txn": FULL, "alarms": REFUSED}, {"space": "problem", "alarms": "hint"}),
        ((status(errors=("alarm:NOSPACE",)),), {"alarms": [("a", "NOSPACE")]}, {"space": "problem"}),
        ((), {"config": USER, "requires_login": False}, {"login": "hint"}),
        ((), {"alarms": REFUSED}, {"alarms": "hint"}),
        ((), {"reads": 0.2}, {"read latency": "hint"}),
        ((), {"writes": 1.5}, {"write latency": "problem"}),
        ((), {"range": REFUSED}, {"right to read": "problem"}),
        ((), {"txn": REFUSED}, {"right to write": "problem"}),
        ((), {"renew": EtcdUnavailable("canceled")}, {"lease": "problem"}),
        ((), {"range": EtcdUnavailable("no answer")}, {"the cluster": "problem"}),
        ((), {"config": OTHER}, {"TLS": "hint", "login": "hint", "endpoints": "hint"}),
        ((status(version="3.4.1"),), {}, {"release": "hint"}),
        ((status(leader_id=""),), {}, {"member 127.0.0.1:1": "problem"}),
        ((status(is_learner=True),), {}, {"member 127.0.0.1:1": "hint"}),
        ((status(errors=("disk",)),), {}, {"member 127.0.0.1:1": "problem"}),
        ((status(db_size=DEFAULT_QUOTA),), {}, {"database 127.0.0.1:1": "hint"}),
        ((status(db_size=900, db_quota=1000),), {}, {"database 127.0.0.1:1": "problem"}),
        ((status(db_size=2**29, db_size_in_use=1),), {}, {"database 127.0.0.1:1": "hint"}),
        ((STATUS, status(leader_id="b", version="3.5.28")), {"config": BOTH}, {"leader": "problem", "release": "hint"}),
    ],
)
def test_what_is_wrong_is_reported_with_what_to_do(
    statuses: tuple[Any, ...], calls: dict[str, Any], expected: dict[str, str], examine: Examine
) -> None:
    assert examine(*statuses, **calls) == expected


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
    assert len({(one.group, one.owner) for one in found}) == several


def test_a_member_that_says_nothing_readable_has_an_id_all_the_same() -> None:
    odd = kv(member_key(RUN, member_id(4)), b"{", 4)
    assert [one.kv for one in members_called(keys(odd), member_id(4))] == [odd]
