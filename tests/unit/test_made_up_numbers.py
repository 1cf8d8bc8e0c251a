"""Numbers that a member made up: nobody counts on from them, and what no member could read is not published."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import builders
import pytest
from virtual import MemoryEtcd

from ftcoord.coordination.policy import HighestSeen, QuorumPolicy
from ftcoord.core import layout
from ftcoord.core.quorum import Highest, QuorumCandidate, QuorumOptions, QuorumSituation
from ftcoord.core.quorum_records import encode as encode_quorum
from ftcoord.core.rendezvous import RoundCandidate, RoundOptions
from ftcoord.core.rendezvous_records import Seat, encode
from ftcoord.core.strict import LARGEST_COUNT, LARGEST_STEP
from ftcoord.core.verdict import Publish, Verdict, Wait
from ftcoord.etcd.api import KeyValue
from ftcoord.primitives.group.use import DECIDE_AGAIN_AFTER, View
from ftcoord.rendezvous.policy import RendezvousPolicy

LIMITS = (1, 2)


def asks(member: str, after: int = 0, **more: Any) -> RoundCandidate:
    ask = builders.ask(
        f"node {member}", address=f"{member}.example", after=after, host=member, nonce=member, limits=LIMITS
    )
    return RoundCandidate(member, replace(ask, **more), 0.0)


PREFIX = "/p"


# -- quorums ------------------------------------------------------------------------------------------------------


def replica(name: str, asked: int = 1, after: int = 0, failures: int = 0) -> QuorumCandidate:
    return QuorumCandidate(f"m{name}", builders.request(name, commit_failures=failures), asked, after, 0.0)


TWO = QuorumSituation([replica("a"), replica("b")], None)


# -- in a decider ---------------------------------------------------------------------------------------------------


def view(values: dict[str, bytes]) -> View:
    members = tuple(KeyValue(key, value, 1, at, 1, at) for at, (key, value) in enumerate(values.items(), 1))
    return View(members, dict.fromkeys(values, 0.0), 0.0, None, 0.0, 0.0)


# -- numbers that others name ------------------------------------------------------------------------------------


def round_number(rogue: int, known: int) -> Verdict[bytes]:
    asked = {"a": asks("a", after=known), "b": asks("b", after=known), "c": asks("c", after=rogue)}
    members = view({layout.member_key(PREFIX, one): encode(member.ask) for one, member in asked.items()})
    with MemoryEtcd() as memory:
        client = memory.client()
        if known:
            round_ = builders.round_(known, [Seat(one, f"node {one}", one) for one in "ab"], ready=True, recalled="x")
            for key, value in builders.round_keys(PREFIX, round_).items():
                client.put(key, value)
        decided = client.get(layout.decided_key(PREFIX)).one
        return RendezvousPolicy(PREFIX, RoundOptions(), client).decide(replace(members, decided=decided), "a", 60.0)


def quorum_number(rogue: int, known: int) -> Verdict[bytes]:
    records = {one.member: builders.replica(one.request, asked=one.asked, heard=known) for one in TWO.members}
    records["c"] = builders.replica(replace(TWO.members[0].request, replica_id="c"), asked=1, heard=rogue)
    members = view({layout.member_key(PREFIX, one): encode_quorum(record) for one, record in records.items()})
    seen = HighestSeen()
    seen.highest = Highest(known, known)
    decided = QuorumPolicy(PREFIX, QuorumOptions(1, 0.0), seen).decide(members, "a", 60.0)
    return replace(decided, record=zlib.decompress(decided.record)) if isinstance(decided, Publish) else decided


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
