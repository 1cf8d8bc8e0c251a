"""Two releases in one job: either says so by name, and no record changes without a new version."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Final

import builders
import pytest
from invariants import check_round

from ftcoord.coordination.policy import HighestSeen, QuorumPolicy
from ftcoord.core.death_records import Death
from ftcoord.core.history import HistoryEvent
from ftcoord.core.layout import decided_key, member_id, member_key
from ftcoord.core.quorum import QuorumOptions
from ftcoord.core.quorum_records import (
    IdleMember,
    QuorumRecord,
    QuorumRequest,
    QuorumSeat,
    ReplicaRecord,
    encode,
    parse_replica,
)
from ftcoord.core.rendezvous import RoundCandidate, RoundOptions, RoundSituation, decide
from ftcoord.core.rendezvous_records import Away, Chunk, JoinRequest, RoundHead, Seat, WorkerFailure
from ftcoord.core.strict import V4, VERSION
from ftcoord.core.timers import LAYOUT as TIMERS_LAYOUT, HeldTimers, Timer, Worker
from ftcoord.core.verdict import Publish, Wait
from ftcoord.errors import StateError
from ftcoord.etcd.api import KeyValue
from ftcoord.heartbeat import Beat
from ftcoord.primitives.group.use import View

ROUNDS_AND_QUORUMS: Final = {
    JoinRequest: "node address port after host nonce min_nodes max_nodes seated reopens holds failed",
    RoundHead: "number token size chunks address port min_nodes max_nodes ready recalled waiting closed outcome before "
    "by drained stop",
    Chunk: "ranks seats away",
    Seat: "member node host",
    Away: "member round",
    ReplicaRecord: "request asked after beat heard min_replicas",
    QuorumRequest: "replica_id address store_address step world_size shrink_only data commit_failures handles",
    QuorumRecord: "number id seats idle created by",
    QuorumSeat: "member asked request",
    IdleMember: "member asked",
    WorkerFailure: "pid rank local_rank exit_code signal fate exception traceback timer",
}
"""What these have in the version that follows. Who changes a line counts `core.strict`'s version on, and this one; but
not for a HistoryEvent, which a reader leaves out if it cannot read it."""
V_ROUNDS_AND_QUORUMS: Final = 4
OTHERS: Final = {
    Beat: "name data left",
    Death: "cause wall_ms left failures",
    HistoryEvent: "kind number who node reason failures noted by wall_ms member",
}
TIMERS: Final = {
    HeldTimers: "worker timers",
    Timer: "scope after_ms until_ms wall_ms slot token",
    Worker: "host pid start node rank ledger",
}
"""Of these each change needs a version of its own, in the module of the record."""
V_OTHERS, V_TIMERS = 1, 2


def test_no_field_comes_or_goes_without_a_new_version() -> None:
    assert (V4, VERSION, TIMERS_LAYOUT) == (V_ROUNDS_AND_QUORUMS, V_OTHERS, V_TIMERS)
    for record, names in (ROUNDS_AND_QUORUMS | OTHERS | TIMERS).items():
        assert " ".join(field.name for field in fields(record)) == names, record.__name__


# -- a release of layouts v1 and v2: no `heard`, no `holds`, no `failed` ------------------------------------------

REQUEST = QuorumRequest("b", "addr", "store", 0, 1, False, "", 0, ())
ASK = JoinRequest("b", "b", 1, 0, "b", "", 1, 2)


def as_release_before(value: bytes, version: int, *without: str) -> bytes:
    raw = {name: said for name, said in json.loads(value).items() if name not in without}
    return json.dumps({**raw, "v": version}).encode()


OLD_REPLICA = as_release_before(encode(ReplicaRecord(REQUEST, 1, 0, 0)), 2, "heard", "min_replicas")


@pytest.mark.parametrize(
    "value", [OLD_REPLICA, as_release_before(encode(ReplicaRecord(REQUEST, 1, 0, 0)), 3, "min_replicas")]
)
def test_a_replica_of_another_release_is_named_for_what_it_is(value: bytes) -> None:
    with pytest.raises(StateError, match=r"layout version .*reads 4: use one release in all of a job"):
        parse_replica("key", value)


def seen(*members: bytes, decided: bytes | None = None) -> View:
    keys = tuple(
        KeyValue(member_key("/job", member_id(lease)), value, lease, lease, 1, lease)
        for lease, value in enumerate(members, 1)
    )
    record = KeyValue(decided_key("/job"), decided, 9, 9, 1, 9) if decided else None
    return View(keys, dict.fromkeys((kv.key for kv in keys), 0.0), 0.0, record, 0.0, 0.0)


def test_a_replica_that_cannot_be_read_counts_as_alive_and_asks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Else each release would have quorums of itself alone."""
    policy = QuorumPolicy("/job", QuorumOptions(1, 60.0), HighestSeen(), wall_clock=lambda: 0.0)
    own = encode(ReplicaRecord(QuorumRequest("a", "addr", "store", 0, 1, False, "", 0, ()), 1, 0, 0))
    verdict = policy.decide(seen(own, OLD_REPLICA), member_id(1), 1000.0)
    assert isinstance(verdict, Wait)
    assert "at least half of 2 healthy workers" in verdict.reason
    assert "[1 not readable: use one release in all of a job]" in verdict.reason
    assert "layout version 2" in caplog.text
    assert isinstance(policy.decide(seen(own), member_id(1), 1000.0), Publish), "when that one is gone"


def rounds_with(**more: object) -> RoundSituation:
    asks = RoundCandidate(member_id(1), JoinRequest("a", "a", 1, 0, "a", "", 1, 2, seated=1), 1000.0)
    seats = Seat(member_id(1), "a", "a"), Seat(member_id(2), "b", "b")
    running = builders.round_(1, seats, limits=(1, 2), **more)
    return RoundSituation([asks], 0.0, running, 0.0, unreadable=frozenset({member_id(2)}))


def test_a_node_that_cannot_be_read_is_not_gone() -> None:
    running = decide(rounds_with(ready=True), RoundOptions(), 1000.0)
    assert isinstance(running, Wait), "nobody is recalled for it"
    seating = decide(rounds_with(), RoundOptions(), 1.0)
    assert isinstance(seating, Wait), "it has not said that it takes its seat"
    late = decide(rounds_with(), RoundOptions(), 1000.0)
    assert isinstance(late, Publish)
    assert late.record.recalled == "b did not take its seat"


def test_a_node_that_cannot_be_read_is_away_from_the_next_round() -> None:
    """It is waited for as one that has still to come back."""
    asks = RoundCandidate(member_id(1), JoinRequest("a", "a", 1, 1, "a", "", 1, 2), 0.0)
    before = rounds_with(ready=True, recalled="so").previous
    situation = RoundSituation([asks], 0.0, before, 0.0, unreadable=frozenset({member_id(2)}))
    options = RoundOptions()
    waiting = decide(situation, options, 1.0)
    assert isinstance(waiting, Wait)
    assert "1 still to come back" in waiting.reason
    formed = decide(situation, options, options.return_timeout)
    assert isinstance(formed, Publish)
    assert formed.record.away == (Away(member_id(2), 1),)
    check_round(situation, formed.record)
