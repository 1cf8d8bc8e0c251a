"""Every order of events for members that act only as `outlook` says; and planted bugs in `outlook` are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from invariants import InvariantBroken
from members_model import MemberWorld, RoundOutlook

from ftcoord.core import rendezvous
from ftcoord.core.rendezvous_records import AnyRound, JoinRequest
from ftcoord.core.verdict import Next, Outlook, Standing

JOINED = ["A joins", "B joins", "decided"]
SEATED = [*JOINED, "A hears", "A acts", "B hears", "B acts", "decided"]
AT_WORK = [*SEATED, "A hears", "A acts", "B hears", "B acts"]
AWAY = [*JOINED, "A loses its lease", "decided"]
STARTS = {
    "nobody is there": [],
    "a round is decided": JOINED,
    "one of its nodes is away": AWAY,
    "it is ready": SEATED,
    "it runs": AT_WORK,
}
DEPTH = 5
"""Events from each of them. The planted bugs below are found by as many or fewer from one of these starts."""

ALWAYS = {Standing.PENDING, Standing.SEATED, Standing.ANSWERED, Standing.MISSED, Standing.CLOSED}


@pytest.mark.parametrize("limits", [(1, 2), (2, 2)])
def test_two_nodes(limits: tuple[int, int]) -> None:
    """From all starts at once, since much of what follows one of them follows others too."""
    world = MemberWorld(limits)
    assert world.explore_from([(world.walk(*events), DEPTH) for events in STARTS.values()]) > 5_000
    assert world.met >= ALWAYS


@pytest.mark.parametrize("limits", [(1, 2), (2, 2)])
def test_two_nodes_whose_rolls_lie_in_chunks(limits: tuple[int, int]) -> None:
    """One seat to a chunk, so that each reads its own; and it may read late."""
    world = MemberWorld(limits, chunk=1)
    starts = [(world.walk(*reading(events)), DEPTH) for events in STARTS.values()]
    assert world.explore_from(starts) > 5_000
    assert world.met >= ALWAYS


def test_three_nodes_whose_rolls_lie_in_chunks_of_two() -> None:
    world = MemberWorld((1, 2), nodes=3, hanging=False, chunk=2)
    assert world.explore(5, world.walk(*reading(AT_WORK), "C joins")) > 500
    assert world.met == ALWAYS | {Standing.SPARE}


def reading(events: list[str]) -> list[str]:
    """The same events where each member reads its chunk before it first acts on a record with a seat for it."""
    read: set[str] = set()
    out = []
    for event in events:
        if event.endswith(" acts") and event not in read:
            read.add(event)
            out.append(event)
        out.append(event)
    return out


def test_a_surplus_node() -> None:
    world = MemberWorld((1, 1))
    alone = world.walk("A joins", "decided", "A hears", "A acts", "decided", "A hears", "A acts", "B joins")
    assert world.explore(6, alone) > 500
    assert Standing.SPARE in world.met


def test_three_nodes() -> None:
    world = MemberWorld((1, 2), nodes=3, hanging=False)
    assert world.explore(5, world.walk(*AT_WORK, "C joins")) > 500
    assert world.met == ALWAYS | {Standing.SPARE}


def test_a_node_with_other_limits() -> None:
    """It is refused or closed, and nobody else is."""
    world = MemberWorld((2, 2), nodes=3, other_limits="C", hanging=False)
    assert world.explore(5, world.walk(*AT_WORK, "C joins")) > 500
    assert Standing.REFUSED in world.met


# -- the test of the tests: each of these bugs is found ---------------------------------------------------------


def instead(standing: Standing, *now: Standing, next_: Next = Next.WAIT) -> RoundOutlook:
    """An `outlook` that takes one of these standings for another."""

    def outlook(now_decided: AnyRound | None, me: str, ask: JoinRequest) -> Outlook[JoinRequest]:
        right = rendezvous.outlook(now_decided, me, ask)
        return Outlook(standing, next_) if right.standing in now else right

    return outlook


def recalled_is_missed(now: AnyRound | None, me: str, ask: JoinRequest) -> Outlook[JoinRequest]:
    """It looks at `recalled` before `ready`."""
    right = rendezvous.outlook(now, me, ask)
    return (
        Outlook(Standing.MISSED, Next.RETURN) if right.standing is Standing.ANSWERED and now and now.recalled else right
    )


def starts_when_its_seat_is_taken(now: AnyRound | None, me: str, ask: JoinRequest) -> Outlook[JoinRequest]:
    right = rendezvous.outlook(now, me, ask)
    taken = now is not None and ask.seated == now.number and not now.recalled and not now.closed
    return Outlook(Standing.ANSWERED, Next.RETURN) if taken else right


def takes_an_old_seat(now: AnyRound | None, me: str, ask: JoinRequest) -> Outlook[JoinRequest]:
    """It forgets that it asked for a later round."""
    return rendezvous.outlook(now, me, replace(ask, after=0))


def takes_its_seat_again(now: AnyRound | None, me: str, ask: JoinRequest) -> Outlook[JoinRequest]:
    return rendezvous.outlook(now, me, replace(ask, seated=0))


def takes_a_seat_of_a_recalled_round(now: AnyRound | None, me: str, ask: JoinRequest) -> Outlook[JoinRequest]:
    return rendezvous.outlook(now and replace(now, recalled=""), me, ask)


def forgets_that_it_is_away(now: AnyRound | None, me: str, ask: JoinRequest) -> Outlook[JoinRequest]:
    return rendezvous.outlook(now and replace(now, away=()), me, ask)


def changes_what_it_asks(now: AnyRound | None, me: str, ask: JoinRequest) -> Outlook[JoinRequest]:
    right = rendezvous.outlook(now, me, ask)
    return replace(right, ask=replace(right.ask, after=right.ask.after + 1)) if right.ask else right


PLANTED: dict[str, tuple[str, tuple[int, int], list[str], RoundOutlook]] = {
    "it starts when its own seat is taken": ("S1 nobody starts before", (2, 2), JOINED, starts_when_its_seat_is_taken),
    "it starts when it has a seat": (
        "S1 nobody starts before",
        (2, 2),
        JOINED,
        instead(Standing.ANSWERED, Standing.SEATED, next_=Next.RETURN),
    ),
    "a round that is ready and recalled is missed": ("S1 all that live start", (1, 2), SEATED, recalled_is_missed),
    "a seat in an earlier round counts": (
        "S1 a member starts a round that it asked",
        (1, 2),
        AT_WORK,
        takes_an_old_seat,
    ),
    "it takes no seat": ("L1", (1, 2), JOINED, instead(Standing.PENDING, Standing.SEATED)),
    "it takes its seat for ever": ("L1 what a member does", (1, 2), JOINED, takes_its_seat_again),
    "it takes a seat that was recalled": ("L1", (1, 2), JOINED, takes_a_seat_of_a_recalled_round),
    "it says more than that": ("says only", (1, 2), JOINED, changes_what_it_asks),
    "it never starts": ("L1", (1, 2), SEATED, instead(Standing.PENDING, Standing.ANSWERED)),
    "it waits though it missed its round": ("L1", (1, 2), JOINED, instead(Standing.PENDING, Standing.MISSED)),
    "it forgets that it is away": ("L1", (1, 2), AWAY, forgets_that_it_is_away),
    "it waits for its turn and asks again meanwhile": (
        "missed nothing",
        (1, 1),
        [],
        instead(Standing.MISSED, Standing.SPARE, next_=Next.RETURN),
    ),
    "a spare ends": ("L2", (1, 1), [], instead(Standing.CLOSED, Standing.SPARE, next_=Next.RETURN)),
    "the end is not heard of": ("everybody hears", (1, 2), AT_WORK, instead(Standing.PENDING, Standing.CLOSED)),
    "all are refused": ("L2 nobody with", (1, 2), [], instead(Standing.REFUSED, Standing.SPARE, next_=Next.RETURN)),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bug_is_found(bug: str) -> None:
    rule, limits, events, outlook = PLANTED[bug]
    world = MemberWorld(limits, outlook=outlook)
    start = MemberWorld(limits).walk(*events)
    with pytest.raises(InvariantBroken, match=rule):
        world.explore(DEPTH, start)


def test_what_led_to_a_broken_rule_is_reported() -> None:
    world = MemberWorld((2, 2), outlook=starts_when_its_seat_is_taken)
    with pytest.raises(InvariantBroken, match=r"^S1 nobody starts before .*, after: "):
        world.explore(9)
