"""Every order of events for replicas that act only as `outlook` says; and planted bugs in `outlook` are found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from invariants import InvariantBroken
from quorum_members_model import TICK, QuorumOutlook, QuorumWorld

from ftcoord.core import quorum
from ftcoord.core.quorum import QuorumOptions
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest
from ftcoord.core.verdict import Next, Outlook, Standing

TOGETHER = ["a comes", "b comes", "a asks", "b asks", "decided"]
ALL = ["a comes", "b comes", "c comes", "a asks", "b asks", "c asks", "decided"]
ANSWERED = [f"{name} {what}" for name in "bc" for what in ("hears", "acts", "asks")]
MISSING = [*ALL, *ANSWERED, "a tick"]
"""The next quorum will come about without a, which has not heard of the last one."""
LEFT_OUT = [*ALL, "a hears", "a acts", *ANSWERED, "a tick", "decided", "a asks"]
"""The last quorum came about without a, which asks without its profile: it has heard of the one before only."""
EXPECTED = {Standing.PENDING, Standing.ANSWERED, Standing.MISSED}


@pytest.mark.parametrize("min_replicas", [1, 2])
@pytest.mark.parametrize(("events", "depth"), [([], 7), (TOGETHER, 5)], ids=["nobody is there", "a quorum is decided"])
def test_two_replicas(events: list[str], depth: int, min_replicas: int) -> None:
    world = QuorumWorld(options=QuorumOptions(min_replicas, TICK))
    assert world.explore(depth, world.walk(*events)) > 300
    assert world.met >= {Standing.PENDING, Standing.ANSWERED}


def test_a_quorum_is_missed() -> None:
    """By a replica that hears of it only when the next one has come about without it."""
    world = QuorumWorld(("a", "b", "c"))
    assert world.explore(3, world.walk(*MISSING)) > 100
    assert world.met >= EXPECTED


def test_a_profile_is_left_out_that_the_last_quorum_has_not() -> None:
    """Whoever hears of that writes it, and is in the next quorum."""
    world = QuorumWorld(("a", "b", "c"))
    start = world.walk(*LEFT_OUT)
    assert start.record is not None
    assert "a" not in start.record.names
    (mind,) = (mind for mind in start.minds if mind.name == "a")
    assert mind.short
    assert world.explore(3, start) > 100
    after = world.walk(*LEFT_OUT, "a hears", "a acts", *ANSWERED, "decided")
    assert after.record is not None
    assert after.record.names == {"a", "b", "c"}


def test_two_processes_with_one_replica_id() -> None:
    world = QuorumWorld(("a", "a'"))
    assert world.explore(6) > 300
    assert world.met >= {Standing.PENDING, Standing.ANSWERED}


def test_two_processes_with_one_replica_id_and_another_replica() -> None:
    world = QuorumWorld(("a", "a'", "b"), QuorumOptions(2, TICK))
    assert world.explore(4, world.walk("a comes", "a' comes", "b comes", "a asks")) > 300
    assert world.met >= {Standing.PENDING, Standing.ANSWERED}


def test_three_replicas() -> None:
    world = QuorumWorld(("a", "b", "c"), QuorumOptions(2, TICK))
    assert world.explore(3, world.walk(*TOGETHER, "a hears", "a acts")) > 100


# -- the test of the tests: each of these bugs is found ---------------------------------------------------------


def instead(standing: Standing, of: Standing, next_: Next) -> QuorumOutlook:
    """An `outlook` that takes one standing for another."""

    def outlook(
        now: QuorumRecord | None, me: Sequence[str], replica_id: str, asked: int, short: QuorumRequest | None
    ) -> Outlook[int]:
        right = quorum.outlook(now, me, replica_id, asked, short)
        return Outlook(standing, next_) if right.standing is of else right

    return outlook


def any_seat_answers(
    now: QuorumRecord | None, me: Sequence[str], replica_id: str, asked: int, short: QuorumRequest | None
) -> Outlook[int]:
    return quorum.outlook(now, me, replica_id, min(asked, 1), short)


def only_later_ones_answer(
    now: QuorumRecord | None, me: Sequence[str], replica_id: str, asked: int, short: QuorumRequest | None
) -> Outlook[int]:
    return quorum.outlook(now, me, replica_id, asked + 1, short)


def seats_of_the_name_answer(
    now: QuorumRecord | None, me: Sequence[str], replica_id: str, asked: int, short: QuorumRequest | None
) -> Outlook[int]:
    right = quorum.outlook(now, me, replica_id, asked, short)
    return Outlook(Standing.ANSWERED, Next.RETURN) if now is not None and replica_id in now.names else right


def only_its_own_seat_answers(
    now: QuorumRecord | None, me: Sequence[str], replica_id: str, asked: int, short: QuorumRequest | None
) -> Outlook[int]:
    right = quorum.outlook(now, me, replica_id, asked, short)
    is_seated = now is not None and any(now.seated.get(member, 0) >= asked for member in me)
    return right if is_seated or right.standing is not Standing.ANSWERED else Outlook(Standing.PENDING)


def the_idle_are_forgotten(
    now: QuorumRecord | None, me: Sequence[str], replica_id: str, asked: int, short: QuorumRequest | None
) -> Outlook[int]:
    return quorum.outlook(now and replace(now, idle=()), me, replica_id, asked, short)


def the_answered_have_missed(
    now: QuorumRecord | None, me: Sequence[str], replica_id: str, asked: int, short: QuorumRequest | None
) -> Outlook[int]:
    right = quorum.outlook(now, me, replica_id, asked, short)
    return Outlook(Standing.MISSED, Next.WRITE) if right.standing is Standing.ANSWERED else right


def no_profile_is_missed(
    now: QuorumRecord | None, me: Sequence[str], replica_id: str, asked: int, short: QuorumRequest | None
) -> Outlook[int]:
    return quorum.outlook(now, me, replica_id, asked, None)


def every_profile_is_missed(
    now: QuorumRecord | None, me: Sequence[str], replica_id: str, asked: int, short: QuorumRequest | None
) -> Outlook[int]:
    right = quorum.outlook(now, me, replica_id, asked, short)
    return Outlook(right.standing, Next.WRITE) if right.standing is Standing.PENDING else right


PLANTED: dict[str, tuple[str, Sequence[str], Sequence[str], QuorumOutlook]] = {
    "any seat is an answer": ("S1", "ab", TOGETHER, any_seat_answers),
    "an answer is taken for an older one": ("L1", "ab", TOGETHER, only_later_ones_answer),
    "any seat of its name is an answer": ("S1", ("a", "a'"), [], seats_of_the_name_answer),
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
    "only its own seat is an answer": ("L1 nobody waits", ("a", "a'"), [], only_its_own_seat_answers),
    "it waits though nobody knows its profile": ("L1 nobody waits", "abc", LEFT_OUT, no_profile_is_missed),
    "it writes a profile that all know": ("only an unknown profile", "ab", TOGETHER, every_profile_is_missed),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bug_is_found(bug: str) -> None:
    rule, names, events, outlook = PLANTED[bug]
    start = QuorumWorld(names).walk(*events)
    with pytest.raises(InvariantBroken, match=rule):
        QuorumWorld(names, outlook=outlook).explore(6, start)
