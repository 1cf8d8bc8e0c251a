"""What operators are told again and again: the same as what is told at once, from what has changed alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from held import TIMER, expired_kv, timers_kv

from ftcoord.core import quorum_records, rendezvous_records
from ftcoord.core.death_records import Death
from ftcoord.core.death_records import encode as encode_death
from ftcoord.core.layout import (
    death_key,
    decided_key,
    member_id,
    member_key,
    quorum_prefix,
    roll_key,
    roster_key,
    run_prefix,
)
from ftcoord.core.quorum_head import encode_quorum
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest, QuorumSeat, ReplicaRecord, digest_of
from ftcoord.core.rendezvous_records import JoinRequest, Round, Seat, chunks_of, head_of, roll_id
from ftcoord.etcd.api import KeyValue
from ftcoord.operator import quorums, rounds
from ftcoord.operator.job_keys import GroupKeys, JobKeys
from ftcoord.operator.memo import Memo
from ftcoord.operator.status import JobTeller, Rules, tell_job

RUN, QUORUM = run_prefix("/f", "job"), quorum_prefix("/f", "job")
CHUNKS = 4
LEASES = range(1, 13)


class Etcd:
    """Keys as etcd would have them; `lose` is an etcd that gives its revisions again."""

    def __init__(self) -> None:
        self.kvs: dict[str, KeyValue] = {}
        self.revision = 0

    def put(self, key: str, value: bytes, lease: int = 0) -> None:
        self.revision += 1
        was = self.kvs.get(key)
        created, version = (was.create_revision, was.version + 1) if was else (self.revision, 1)
        self.kvs[key] = KeyValue(key, value, created, self.revision, version, lease)

    def delete(self, key: str) -> None:
        self.revision += 1
        self.kvs.pop(key, None)

    def lose(self, revisions: int) -> None:
        self.revision = max(self.revision - revisions, 0)

    def below(self, prefix: str) -> dict[str, KeyValue]:
        return {key: kv for key, kv in self.kvs.items() if key.startswith(f"{prefix}/")}

    def keys(self) -> JobKeys:
        quorum_decided = decided_key(QUORUM)
        own = GroupKeys(RUN, self.kvs.get(decided_key(RUN)), None, {}, *self._group(RUN))
        if own.roll_name is not None:
            own = replace(own, roll=self.below(f"{RUN}/rolls/{own.roll_name}"))
        roster = self.kvs.get(roster_key(quorum_decided))
        replicas = GroupKeys(QUORUM, self.kvs.get(quorum_decided), roster, {}, *self._group(QUORUM))
        held = tuple(self.below(f"{RUN}/timers").values())
        return JobKeys("job", self.revision, own, replicas, len(self.kvs), held)

    def _group(self, prefix: str) -> tuple[tuple[KeyValue, ...], tuple[KeyValue, ...]]:
        members = sorted(self.below(f"{prefix}/members").values(), key=lambda kv: kv.create_revision)
        return tuple(members), tuple(self.below(f"{prefix}/deaths").values())


def ask(lease: int, **fields: Any) -> JoinRequest:
    return replace(JoinRequest(f"node{lease}", "10.0.0.1", 5, 0, f"host{lease}", "n", 2, 8), **fields)


def say(etcd: Etcd, lease: int, **fields: Any) -> None:
    etcd.put(member_key(RUN, member_id(lease)), rendezvous_records.encode(ask(lease, **fields)), lease)


def round_of(number: int, *leases: int, **fields: Any) -> Round:
    seats = tuple(Seat(member_id(lease), f"node{lease}", f"host{lease}") for lease in leases)
    return replace(Round(number, seats, "10.0.0.1", 5, (), 2, 8), **fields)


def decide(etcd: Etcd, record: Round, *, large: bool) -> None:
    if not large:
        etcd.put(decided_key(RUN), rendezvous_records.encode(record))
        return
    roll = roll_id(record, CHUNKS, "me")
    for at, chunk in enumerate(chunks_of(record, CHUNKS)):
        etcd.put(roll_key(RUN, roll, at), rendezvous_records.encode(chunk))
    etcd.put(decided_key(RUN), rendezvous_records.encode(head_of(record, roll, CHUNKS, "me")))


def request(name: str, step: int) -> QuorumRequest:
    return QuorumRequest(name, f"{name}:1", f"{name}:2", step, 2, False, "", 0, ())


def hold(etcd: Etcd, lease: int) -> None:
    kv = timers_kv(RUN, replace(TIMER, token=lease), lease=lease)
    etcd.put(kv.key, kv.value, lease)


def changes(etcd: Etcd, chance: random.Random) -> Iterator[Callable[[], object]]:
    """What may happen next."""
    lease, number = chance.choice(LEASES), chance.randrange(1, 4)
    some = chance.sample(LEASES, chance.randrange(2, 7))
    yield lambda: say(etcd, lease, seated=number, after=chance.choice([number, number - 1]))
    yield lambda: say(etcd, lease, leaving=chance.choice(["", "its fan broke"]))
    yield lambda: say(etcd, lease, node=f"node{chance.choice(LEASES)}")
    yield lambda: say(etcd, lease, holds=member_id(chance.choice(LEASES)), seated=number, after=number - 1)
    yield lambda: say(etcd, lease, min_nodes=3)
    yield lambda: etcd.delete(member_key(RUN, member_id(lease)))
    yield lambda: etcd.put(member_key(RUN, member_id(lease)), b"{", chance.choice([lease, 0]))
    yield lambda: etcd.put(death_key(RUN, member_id(lease)), encode_death(Death(f"host{lease} died", 1)))
    record = round_of(number, *some, ready=chance.random() < 0.5, recalled=chance.choice(["", "so"]))
    yield lambda: decide(etcd, record, large=chance.random() < 0.7)
    yield lambda: [etcd.delete(key) for key in list(etcd.below(f"{RUN}/rolls"))[:1]]
    yield lambda: etcd.delete(decided_key(RUN))
    yield lambda: etcd.lose(chance.randrange(3))
    yield lambda: hold(etcd, chance.randrange(1, 4))
    yield lambda: etcd.put(expired_kv(RUN).key, expired_kv(RUN).value, 1)
    yield lambda: etcd.put(timers_kv(RUN, lease=chance.randrange(1, 4)).key, b"{", 1)
    asked, step = chance.randrange(3), chance.randrange(5)
    said = ReplicaRecord(request(f"r{lease}", step), asked, 0, 0)
    short = replace(said, profile=digest_of(said.request.profile))
    key = member_key(QUORUM, member_id(lease))
    yield lambda: etcd.put(key, quorum_records.encode(chance.choice([said, short])), lease)
    yield lambda: etcd.delete(key)
    found = tuple(QuorumSeat(member_id(one), 1, request(f"r{one}", chance.randrange(5))) for one in some)
    yield lambda: write_quorum(etcd, QuorumRecord(number, number, found, (), 1.5, "me"))
    yield lambda: etcd.delete(roster_key(decided_key(QUORUM)))


def write_quorum(etcd: Etcd, record: QuorumRecord) -> None:
    head, roster = encode_quorum(record)
    assert roster is not None
    etcd.put(roster_key(decided_key(QUORUM)), roster)
    etcd.put(decided_key(QUORUM), head)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_told_again_is_what_would_be_told_at_once(seed: int) -> None:
    chance, etcd, rules = random.Random(seed), Etcd(), Rules()
    teller, states = JobTeller(rules), set[str]()
    for _ in range(200):
        chance.choice(list(changes(etcd, chance)))()
        keys = etcd.keys()
        told = teller.tell(keys)
        assert told == tell_job(keys, rules)
        states |= {one.state for one in (told.rounds, told.quorum) if one is not None}
    assert states >= {"running", "seating", "forming", "unreadable"}


class Counting:
    """Counts the calls of a module's function."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
        self.calls, self._real = 0, getattr(module, name)
        monkeypatch.setattr(module, name, self)

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        return self._real(*arguments)


def test_a_change_of_one_node_has_one_node_read_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    etcd, record = Etcd(), round_of(1, *range(1, 301), min_nodes=1, max_nodes=300, ready=True)
    decide(etcd, record, large=True)
    for lease in range(1, 301):
        say(etcd, lease, seated=1, min_nodes=1, max_nodes=300)
    asks, rolls, stands = (
        Counting(monkeypatch, rounds, name) for name in ("parse_join_request", "parse_chunk", "_node_status")
    )
    teller = JobTeller(Rules())
    first = teller.tell(etcd.keys())
    assert (asks.calls, rolls.calls, stands.calls) == (300, CHUNKS, 300)
    say(etcd, 7, seated=1, min_nodes=1, max_nodes=300, leaving="its fan broke")
    second = teller.tell(etcd.keys())
    assert (asks.calls, rolls.calls, stands.calls) == (301, CHUNKS, 301)
    assert first.rounds is not None
    assert second.rounds is not None
    same = [one is other for one, other in zip(first.rounds.members, second.rounds.members, strict=True)]
    assert (same.count(False), same[6]) == (1, False)
    decide(etcd, replace(record, recalled="a node left"), large=True)
    assert teller.tell(etcd.keys()) == tell_job(etcd.keys(), Rules())
    assert asks.calls == 301 + 300  # those of the second teller


def test_what_is_said_of_a_round_later_leaves_its_roll_read(monkeypatch: pytest.MonkeyPatch) -> None:
    etcd, record = Etcd(), round_of(1, *LEASES)
    decide(etcd, record, large=True)
    roll = etcd.below(f"{RUN}/rolls")
    reads, teller = Counting(monkeypatch, rounds, "parse_chunk"), JobTeller(Rules())
    teller.tell(etcd.keys())
    decide(etcd, replace(record, ready=True), large=True)
    etcd.kvs.update(roll)  # which nobody writes again
    told = teller.tell(etcd.keys())
    assert told.rounds is not None
    assert told.rounds.ready
    assert reads.calls == CHUNKS


def test_a_change_of_one_replica_has_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    etcd = Etcd()
    for lease in range(1, 51):
        record = ReplicaRecord(request(f"r{lease}", 5), 1, 0, 0)
        etcd.put(member_key(QUORUM, member_id(lease)), quorum_records.encode(record), lease)
    replicas = Counting(monkeypatch, quorums, "parse_replica")
    teller = JobTeller(Rules())
    teller.tell(etcd.keys())
    record = ReplicaRecord(request("r9", 6), 2, 0, 0)
    etcd.put(member_key(QUORUM, member_id(9)), quorum_records.encode(record), 9)
    teller.tell(etcd.keys())
    assert replicas.calls == 51


def test_a_memo_forgets_what_is_gone() -> None:
    read: list[str] = []
    memo = Memo(lambda kv: read.append(kv.key) or kv.value)  # type: ignore[func-returns-value]
    one, two = (KeyValue(key, b"x", 1, 1, 1, 0) for key in ("a", "b"))
    assert memo.of([one, two]) == [b"x", b"x"]
    assert memo.of([two]) == [b"x"]
    assert memo.of([one, two]) == [b"x", b"x"]
    assert read == ["a", "b", "a"]
    assert memo.of([one._replace(value=b"y")]) == [b"y"]  # an etcd that lost writes has given its revision again
