"""The invariants: what breaks them, and that tests see it. A decider publishes nothing that no member could read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import invariants
import pytest
from invariants import (
    InvariantBroken,
    check_fences,
    check_quorum,
    check_round,
    check_succession,
)
from virtual import MemoryEtcd

from ftcoord.coordination.policy import HighestSeen, QuorumPolicy
from ftcoord.core import layout
from ftcoord.core.quorum import Highest, QuorumCandidate, QuorumOptions, QuorumSituation
from ftcoord.core.quorum import decide as decide_quorum
from ftcoord.core.quorum_records import IdleMember, QuorumRecord, QuorumRequest, ReplicaRecord
from ftcoord.core.quorum_records import encode as encode_quorum
from ftcoord.core.rendezvous import decide as decide_round
from ftcoord.core.rendezvous_records import Away, JoinRequest, Round, encode
from ftcoord.core.round_situation import RoundCandidate, RoundOptions, RoundSituation
from ftcoord.core.strict import LARGEST_COUNT, LARGEST_STEP
from ftcoord.core.verdict import Publish, Verdict, Wait
from ftcoord.etcd.api import KeyValue, Span
from ftcoord.primitives.group.policy import DECIDE_AGAIN_AFTER, View
from ftcoord.rendezvous.policy import RendezvousPolicy

LIMITS = (1, 2)


def asks(member: str, after: int = 0, **more: Any) -> RoundCandidate:
    ask = JoinRequest(f"node {member}", f"{member}.example", 1, after, member, member, *LIMITS)
    return RoundCandidate(member, replace(ask, **more), 0.0)


def published(situation: RoundSituation) -> Round:
    verdict = decide_round(situation, RoundOptions(), 0.0)
    assert isinstance(verdict, Publish)
    return verdict.record


JOINING = RoundSituation([asks("a"), asks("b")], 0.0, None, 0.0)
FIRST = published(JOINING)
SEATED = RoundSituation([asks("a", seated=1), asks("b", seated=1)], 0.0, FIRST, 0.0)
READY = published(SEATED)
RECALLED = replace(READY, recalled="somebody came")
BACK = RoundSituation([asks("a", 1), asks("b", 1)], 0.0, RECALLED, 0.0)
SECOND = published(BACK)
CLOSED = replace(READY, closed="done", outcome="failed")
ENDED = RoundSituation([asks("c", reopens=1)], 0.0, CLOSED, 0.0)
REOPENED = replace(SECOND, seats=(replace(FIRST.seats[0], member="c", node="node c"),), address="c.example")

ROUNDS: dict[str, tuple[str, RoundSituation, Round]] = {
    "a number again": ("S2", BACK, replace(SECOND, number=0)),
    "a number that a member knows": ("S2", replace(BACK, members=[asks("a", 7), asks("b", 1)]), SECOND),
    "a number that etcd lost": ("S2", replace(BACK, highest=2), SECOND),
    "other seats": ("S1 a recall changes no membership", SEATED, replace(READY, seats=READY.seats[:1])),
    "closed by the decider": ("S1 a recall changes no membership", SEATED, replace(READY, closed="so")),
    "a start taken back": ("S1 a recall changes no start", BACK, replace(RECALLED, ready=False)),
    "a recall taken back": ("S1 a recall is not taken back", BACK, replace(RECALLED, recalled="")),
    "an early start": ("S1 nobody starts before", replace(SEATED, members=JOINING.members), READY),
    "a recalled start": ("S1 a recalled round", replace(SEATED, previous=FIRST), replace(READY, recalled="so")),
    "one seat too many": ("S1 one seat", BACK, replace(SECOND, seats=SECOND.seats + SECOND.seats[:1])),
    "a dead member": ("S1 only live", replace(BACK, members=BACK.members[:1]), SECOND),
    "too many": ("S1 min <= n", BACK, replace(SECOND, max_nodes=1)),
    "too few": ("S1 min <= n", BACK, replace(SECOND, min_nodes=3, max_nodes=3)),
    "a busy member": ("S1 only those that ask", replace(BACK, members=[asks("a", 1), asks("b", 0)]), SECOND),
    "an away member": (
        "S1 only those that ask",
        RoundSituation([asks("a", 2), asks("b", 0)], 0.0, replace(RECALLED, number=2, away=(Away("b", 1),)), 0.0),
        replace(SECOND, number=3),
    ),
    "ready when decided": ("S1 nobody starts before", BACK, replace(SECOND, ready=True)),
    "closed when decided": ("S1 a new round is neither", BACK, replace(SECOND, closed="so")),
    "recalled when decided": ("S2 no number is given again", BACK, replace(SECOND, recalled="so")),
    "seats in a round that was lost": (
        "S1 one membership a round",
        replace(BACK, members=[asks("c", seated=2)]),
        replace(SECOND, recalled="so"),
    ),
    "not recalled before": ("S1 a running round", replace(BACK, previous=READY), SECOND),
    "an end that nobody saw": ("S1 a closed run", replace(ENDED, members=[asks("c")]), REOPENED),
    "another address": ("S1 rank 0", BACK, replace(SECOND, port=2)),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_what_breaks_a_round(name: str) -> None:
    rule, situation, record = ROUNDS[name]
    with pytest.raises(InvariantBroken, match=f"^{rule}"):
        check_round(situation, record)


@pytest.mark.parametrize(
    ("situation", "record"),
    [
        (JOINING, FIRST),
        (SEATED, READY),
        (BACK, RECALLED),
        (BACK, SECOND),
        (ENDED, REOPENED),
        (replace(BACK, vanished=True), replace(RECALLED, recalled="its record vanished")),
    ],
)
def test_what_decide_does_is_allowed(situation: RoundSituation, record: Round) -> None:
    check_round(situation, record)


def test_records_that_follow_each_other() -> None:
    for old, new in ((FIRST, READY), (READY, RECALLED), (RECALLED, SECOND), (READY, CLOSED)):
        check_succession(old, new)
    for rule, old, new in (
        ("S2", SECOND, RECALLED),
        ("S1 one membership", FIRST, replace(FIRST, seats=FIRST.seats[:1])),
        ("S1 a recall", RECALLED, replace(RECALLED, ready=False)),
    ):
        with pytest.raises(InvariantBroken, match=rule):
            check_succession(old, new)


PREFIX = "/p"


def opening(number: int, *over: int) -> Publish[bytes]:
    stores = [Span(layout.round_store_prefix(PREFIX, one), True) for one in (*over, number)]
    fences = [Span(layout.round_key(PREFIX, one)) for one in over]
    return Publish(b"", "", puts=((layout.round_key(PREFIX, number), b""),), deletes=[*fences, *stores])


def test_fences_that_are_allowed() -> None:
    check_fences(PREFIX, None, 1, opening(1))
    check_fences(PREFIX, READY, 2, opening(2, 1))
    check_fences(PREFIX, FIRST, 1, Publish(b"", ""))


@pytest.mark.parametrize(
    ("rule", "number", "decision"),
    [
        ("S3 only a new round", 1, opening(1)),
        ("S3 a new round opens", 2, replace(opening(2, 1), puts=())),
        ("S3 a new round keeps", 2, replace(opening(2, 1), deletes=[*opening(2, 1).deletes, Span("/p/rounds/", True)])),
        ("S3 a new store", 2, replace(opening(2, 1), deletes=opening(2, 1).deletes[:-1])),
        ("S3 the last round", 2, opening(2)),
    ],
)
def test_what_breaks_a_fence(rule: str, number: int, decision: Publish[bytes]) -> None:
    with pytest.raises(InvariantBroken, match=f"^{rule}"):
        check_fences(PREFIX, READY, number, decision)


# -- quorums ------------------------------------------------------------------------------------------------------


def replica(name: str, asked: int = 1, after: int = 0, failures: int = 0) -> QuorumCandidate:
    return QuorumCandidate(f"m{name}", QuorumRequest(name, "", "", 0, 1, False, "", failures, ()), asked, after, 0.0)


OPTIONS = QuorumOptions(2, 10.0)
TWO = QuorumSituation([replica("a"), replica("b")], None)


def agreed(situation: QuorumSituation) -> QuorumRecord:
    verdict = decide_quorum(situation, OPTIONS, 0.0)
    assert isinstance(verdict, Publish)
    return verdict.record


ONE = agreed(TWO)
AGAIN = QuorumSituation([replica("a", 2), replica("b", 2)], ONE)
NEXT = agreed(AGAIN)
LEFT_OUT = QuorumSituation([replica("a", 2), replica("b", 2), replica("c", 0), replica("d", 0)], replace(ONE, seats=()))

PAIR = QuorumSituation([replica("a"), replica("b"), replace(replica("b"), member="mb2", asked_at=3)], None)
PAIRED = agreed(PAIR)

QUORUMS: dict[str, tuple[str, QuorumSituation, QuorumRecord]] = {
    "a number again": ("S2", AGAIN, replace(NEXT, number=1)),
    "a number that was lost": ("S2", replace(AGAIN, highest=Highest(2, 1)), NEXT),
    "one seat too many": ("S1 one seat", AGAIN, replace(NEXT, seats=NEXT.seats + NEXT.seats[:1])),
    "a dead replica": ("S1 only live", replace(AGAIN, members=AGAIN.members[:1]), NEXT),
    "a request that is not known": (
        "S1 only known",
        replace(AGAIN, members=[replace(replica("a", 2), is_whole=False), replica("b", 2)]),
        NEXT,
    ),
    "another request": ("S1 a seat answers", AGAIN, replace(NEXT, seats=ONE.seats)),
    "answered twice": ("S1 no request", replace(TWO, previous=ONE), replace(ONE, number=2)),
    "an answer forgotten": (
        "S1 no answer",
        replace(AGAIN, members=[*AGAIN.members, replica("c")], previous=replace(ONE, idle=(IdleMember("mc", 1),))),
        NEXT,
    ),
    "an earlier request of the same replica": ("S1 the last request", PAIR, ONE),
    "what was asked before another one came": (
        "S1 a newcomer hides",
        replace(TWO, members=[*TWO.members, replace(replica("b", 0), member="mb2", came_at=3)]),
        ONE,
    ),
    "a namesake without an answer": ("S1 members of one name", PAIR, replace(PAIRED, idle=())),
    "an id of others": ("S2 an id", replace(AGAIN, previous=replace(ONE, seats=ONE.seats[:1])), NEXT),
    "an id after failures": (
        "S2 process groups",
        QuorumSituation([replica("a", 2, failures=1), replica("b", 2)], ONE),
        replace(
            agreed(QuorumSituation([replica("a", 2, failures=1), replica("b", 2)], ONE)),
            id=ONE.id,
        ),
    ),
    "an id that a member knows": ("S2 ids", replace(AGAIN, members=[replica("a", 2, 9), replica("b", 2)]), NEXT),
    "an id that goes back": ("S2 ids", replace(AGAIN, previous=replace(ONE, id=5)), replace(NEXT, id=4)),
    "nobody": ("S5 no quorum", AGAIN, replace(NEXT, seats=(), idle=(IdleMember("ma", 2), IdleMember("mb", 2)), id=2)),
    "too few": (
        "S5 min_replicas",
        replace(TWO, members=TWO.members[:1]),
        replace(ONE, seats=ONE.seats[:1]),
    ),
    "half": ("S5 more than half", LEFT_OUT, replace(NEXT, id=2)),
}


@pytest.mark.parametrize("name", QUORUMS)
def test_what_breaks_a_quorum(name: str) -> None:
    rule, situation, record = QUORUMS[name]
    with pytest.raises(InvariantBroken, match=f"^{rule}"):
        check_quorum(situation, OPTIONS, record)


def test_quorums_that_are_allowed() -> None:
    check_quorum(TWO, OPTIONS, ONE)
    check_quorum(AGAIN, OPTIONS, NEXT)
    check_quorum(PAIR, OPTIONS, PAIRED)
    check_quorum(AGAIN, replace(OPTIONS, min_replicas=3), NEXT)  # all of the last quorum ask again


# -- in a decider ---------------------------------------------------------------------------------------------------


def view(values: dict[str, bytes]) -> View:
    members = tuple(KeyValue(key, value, 1, at, 1, at) for at, (key, value) in enumerate(values.items(), 1))
    return View(members, dict.fromkeys(values, 0.0), 0.0, None, 0.0, False, 0.0)


def publishes_a_round(monkeypatch: pytest.MonkeyPatch, breaks: bool) -> None:
    if breaks:
        record = replace(FIRST, seats=FIRST.seats + FIRST.seats[:1])
        monkeypatch.setattr("ftcoord.rendezvous.policy.decide", lambda *_: Publish(record, "two seats for one"))
    members = view({layout.member_key(PREFIX, one.id): encode(one.ask) for one in JOINING.members})
    with invariants.checked(), MemoryEtcd() as memory:
        assert isinstance(RendezvousPolicy(PREFIX, RoundOptions(), memory.client()).decide(members, "a", 0.0), Publish)


def opens_a_fence(monkeypatch: pytest.MonkeyPatch, breaks: bool) -> None:
    if breaks:
        monkeypatch.setattr(RendezvousPolicy, "_publish", lambda *_, **__: Publish(encode(FIRST), "no fence"))
    publishes_a_round(monkeypatch, False)


def publishes_a_quorum(monkeypatch: pytest.MonkeyPatch, breaks: bool) -> None:
    if breaks:
        record = replace(ONE, number=0)
        monkeypatch.setattr("ftcoord.coordination.policy.decide", lambda *_: Publish(record, "again"))
    records = {one.member: ReplicaRecord(one.request, one.asked, one.after, 0) for one in TWO.members}
    members = view({layout.member_key(PREFIX, one): encode_quorum(record) for one, record in records.items()})
    with invariants.checked():
        assert isinstance(QuorumPolicy(PREFIX, OPTIONS, HighestSeen()).decide(members, "a", 0.0), Publish)


@pytest.mark.parametrize(
    ("decides", "rule"),
    [
        (publishes_a_round, "S1 one seat for each"),
        (opens_a_fence, "S3 a new round opens its fence"),
        (publishes_a_quorum, "S2 quorums only grow"),
    ],
)
def test_each_decision_is_checked(
    decides: Callable[[pytest.MonkeyPatch, bool], None], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decides(monkeypatch, False)
    with pytest.raises(InvariantBroken, match=rule):
        decides(monkeypatch, True)


# -- numbers that others name ------------------------------------------------------------------------------------


def round_number(rogue: int, known: int) -> Verdict[bytes]:
    asked = {"a": asks("a", after=known), "b": asks("b", after=known), "c": asks("c", after=rogue)}
    members = view({layout.member_key(PREFIX, one): encode(member.ask) for one, member in asked.items()})
    with MemoryEtcd() as memory:
        policy = RendezvousPolicy(PREFIX, RoundOptions(), memory.client())
        policy._last.highest = known
        return policy.decide(members, "a", 60.0)


def quorum_number(rogue: int, known: int) -> Verdict[bytes]:
    records = {one.member: ReplicaRecord(one.request, one.asked, 0, 0, heard=known) for one in TWO.members}
    records["c"] = ReplicaRecord(replace(TWO.members[0].request, replica_id="c"), 1, 0, 0, heard=rogue)
    members = view({layout.member_key(PREFIX, one): encode_quorum(record) for one, record in records.items()})
    seen = HighestSeen()
    seen.highest = Highest(known, known)
    return QuorumPolicy(PREFIX, QuorumOptions(1, 0.0), seen).decide(members, "a", 60.0)


USES = pytest.mark.parametrize("decide", [round_number, quorum_number])


@USES
@pytest.mark.parametrize("known", [0, 5, 10**15 + 5, 10**17])
def test_nobody_counts_on_from_a_number_that_a_member_made_up(
    decide: Callable[[int, int], Verdict[bytes]], known: int
) -> None:
    """Up to LARGEST_STEP above the highest known number somebody may have counted."""
    for rogue, number in {
        known + LARGEST_STEP: known + LARGEST_STEP + 1,
        known + LARGEST_STEP + 1: known + 1,
        LARGEST_COUNT: known + 1,
    }.items():
        verdict = decide(rogue, known)
        assert isinstance(verdict, Publish), verdict
        assert json.loads(verdict.record)["number"] == number


@USES
def test_what_nobody_could_read_is_not_published(
    decide: Callable[[int, int], Verdict[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    verdict = decide(0, LARGEST_COUNT)
    assert isinstance(verdict, Wait)
    assert "no member could read it" in verdict.reason
    assert f"number {LARGEST_COUNT + 1}" in verdict.reason
    assert verdict.until == 60.0 + DECIDE_AGAIN_AFTER
    assert "no member could read it" in caplog.text
