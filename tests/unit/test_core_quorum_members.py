"""Every order of events for replicas that act only as `outlook` says; and planted bugs in `outlook` are found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from quorum_members_model import TICK, QuorumOutlook, QuorumWorld

from ftcoord.core import quorum
from ftcoord.core.invariants import InvariantBroken
from ftcoord.core.outlook import Next, Outlook, Standing
from ftcoord.core.quorum import QuorumOptions
from ftcoord.core.quorum_records import QuorumRecord

TOGETHER = ["a comes", "b comes", "a asks", "b asks", "decided"]
ALL = ["a comes", "b comes", "c comes", "a asks", "b asks", "c asks", "decided"]
ANSWERED = [f"{name} {what}" for name in "bc" for what in ("hears", "acts", "asks")]
MISSING = [*ALL, *ANSWERED, "a tick"]
"""The next quorum will come about without a, which has not heard of the last one."""
EXPECTED = {Standing.PENDING, Standing.ANSWERED, Standing.MISSED}


@pytest.mark.parametrize("min_replicas", [1, 2])
@pytest.mark.parametrize(("events", "depth"), [([], 7), (TOGETHER, 5)], ids=["nobody is there", "a quorum is decided"])
def test_two_replicas(events: list[str], depth: int, min_replicas: int) -> None:
    world = QuorumWorld(options=QuorumOptions(min_replicas, TICK))
    assert world.explore(depth, world.walk(*events)) > 1_000
    assert world.met >= {Standing.PENDING, Standing.ANSWERED}


def test_a_quorum_is_missed() -> None:
    """By a replica that hears of it only when the next one has come about without it."""
    world = QuorumWorld(("a", "b", "c"))
    assert world.explore(3, world.walk(*MISSING)) > 300
    assert world.met >= EXPECTED


def test_two_processes_with_one_replica_id() -> None:
    world = QuorumWorld(("a", "a'"))
    assert world.explore(6) > 1_000
    assert Standing.OUTRANKED in world.met


def test_three_replicas() -> None:
    world = QuorumWorld(("a", "b", "c"), QuorumOptions(2, TICK))
    assert world.explore(3, world.walk(*TOGETHER, "a hears", "a acts")) > 300


# -- the test of the tests: each of these bugs is found ---------------------------------------------------------


def instead(standing: Standing, of: Standing, next_: Next) -> QuorumOutlook:
    """An `outlook` that takes one standing for another."""

    def outlook(now: QuorumRecord | None, me: Sequence[str], replica_id: str, asked: int) -> Outlook[int]:
        right = quorum.outlook(now, me, replica_id, asked)
        return Outlook(standing, next_) if right.standing is of else right

    return outlook


def any_seat_answers(now: QuorumRecord | None, me: Sequence[str], replica_id: str, asked: int) -> Outlook[int]:
    return quorum.outlook(now, me, replica_id, min(asked, 1))


def only_later_ones_answer(now: QuorumRecord | None, me: Sequence[str], replica_id: str, asked: int) -> Outlook[int]:
    return quorum.outlook(now, me, replica_id, asked + 1)


def seats_of_the_name_answer(now: QuorumRecord | None, me: Sequence[str], replica_id: str, asked: int) -> Outlook[int]:
    right = quorum.outlook(now, me, replica_id, asked)
    return Outlook(Standing.ANSWERED, Next.RETURN) if now is not None and replica_id in now.names else right


def the_idle_are_forgotten(now: QuorumRecord | None, me: Sequence[str], replica_id: str, asked: int) -> Outlook[int]:
    return quorum.outlook(now and replace(now, idle=()), me, replica_id, asked)


def the_answered_have_missed(now: QuorumRecord | None, me: Sequence[str], replica_id: str, asked: int) -> Outlook[int]:
    right = quorum.outlook(now, me, replica_id, asked)
    return Outlook(Standing.MISSED, Next.WRITE) if right.standing is Standing.ANSWERED else right


PLANTED: dict[str, tuple[str, Sequence[str], Sequence[str], QuorumOutlook]] = {
    "any seat is an answer": ("S1", "ab", TOGETHER, any_seat_answers),
    "an answer is taken for an older one": ("L1", "ab", TOGETHER, only_later_ones_answer),
    "the seat of another member of its name is its own": ("S1", ("a", "a'"), [], seats_of_the_name_answer),
    "it waits though it missed its quorum": ("L1 nobody waits", "abc", MISSING, the_idle_are_forgotten),
    "what it missed is its answer": (
        "S1 an answer has a seat",
        "abc",
        MISSING,
        instead(Standing.ANSWERED, Standing.MISSED, Next.RETURN),
    ),
    "it does not ask again": (
        "L1 nobody waits",
        "abc",
        MISSING,
        instead(Standing.MISSED, Standing.MISSED, Next.WAIT),
    ),
    "it asks again though it has its answer": ("has its answer", "ab", TOGETHER, the_answered_have_missed),
    "it never hears its answer": ("L1", "ab", TOGETHER, instead(Standing.PENDING, Standing.ANSWERED, Next.WAIT)),
    "it ends because it is outranked": (
        "only an answer",
        ("a", "a'"),
        [],
        instead(Standing.CLOSED, Standing.OUTRANKED, Next.RETURN),
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bug_is_found(bug: str) -> None:
    rule, names, events, outlook = PLANTED[bug]
    start = QuorumWorld(names).walk(*events)
    with pytest.raises(InvariantBroken, match=rule):
        QuorumWorld(names, outlook=outlook).explore(6, start)
