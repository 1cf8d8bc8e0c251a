"""A node that an operator drains: what the record, the decider and the node itself make of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import builders
import pytest
from invariants import InvariantBroken, check_round

from ftcoord.core.rendezvous import (
    DRAINED_KEPT,
    RoundCandidate,
    RoundOptions,
    RoundSituation,
    decide,
    drain,
    outlook,
    why_not_drained,
)
from ftcoord.core.rendezvous_records import NO_ROUND, JoinRequest, Round, RoundHead, Seat, encode, parse_decided
from ftcoord.core.verdict import Next, Publish, Standing, Wait

WHY = "hostB was drained by ann"
OPTIONS = RoundOptions(last_call_timeout=30.0, settle_timeout=1.0)
NOW = 100.0


def ask(node: str, after: int = 0, seated: int = 0) -> JoinRequest:
    return builders.ask(
        node, address=f"{node}.example", port=1000, after=after, nonce=f"{node}/{after}", seated=seated, limits=(2, 3)
    )


def candidates(*asks: JoinRequest) -> list[RoundCandidate]:
    return [RoundCandidate(one.node, one, 0.0) for one in asks]


def a_round(nodes: str, *, ready: bool = True, recalled: str = "") -> Round:
    seats = tuple(Seat(node, node, f"host{node}") for node in nodes)
    return builders.round_(1, seats, address="A.example", port=1000, ready=ready, recalled=recalled, limits=(2, 3))


def head_of(round_: Round) -> RoundHead:
    """What a node knows before it has read its chunk."""
    return parse_decided("/run/decided", encode(round_))


def situation(members: Sequence[JoinRequest], previous: Round) -> RoundSituation:
    return RoundSituation(candidates(*members), 0.0, previous, 0.0)


def drained(now: Round, *leavers: JoinRequest) -> Round:
    found = drain(now, leavers, WHY)
    assert isinstance(found, Round)
    return found


def test_one_that_asks_before_it_has_heard_gets_no_seat() -> None:
    now = drained(a_round("ABC"), ask("B", seated=1))
    members = [ask(node, after=1, seated=1) for node in "ABC"]
    verdict = decide(situation(members, now), OPTIONS, NOW)
    assert isinstance(verdict, Publish)
    assert [seat.node for seat in verdict.record.seats] == ["A", "C"]
    seated = replace(verdict.record, seats=a_round("ABC").seats)
    with pytest.raises(InvariantBroken, match="nobody that is drained is seated"):
        check_round(situation(members, now), seated)


def test_one_that_is_gone_gets_no_seat_when_it_comes_back_but_its_host_may_bring_another() -> None:
    now = drained(a_round("ABC"), ask("B", seated=1))
    verdict = decide(situation([ask("A", after=1, seated=1), ask("C", after=1, seated=1), ask("D")], now), OPTIONS, NOW)
    assert isinstance(verdict, Publish)
    assert ([seat.node for seat in verdict.record.seats], verdict.record.drained) == (["A", "D", "C"], ("B",))


def test_only_the_last_that_are_gone_are_remembered() -> None:
    """Whoever has still to leave always is."""
    gone = tuple(f"gone{number}" for number in range(DRAINED_KEPT + 3))
    now = replace(a_round("ABC", recalled=WHY), drained=("B", *gone))
    members = [ask("A", after=1, seated=1), ask("B", seated=1), ask("C", after=1, seated=1)]
    verdict = decide(situation(members, now), OPTIONS, NOW)
    assert isinstance(verdict, Publish)
    assert verdict.record.drained == ("B", *gone[3:])


def test_one_without_a_seat_calls_nobody_back() -> None:
    now = drained(a_round("AC"), ask("B"))
    assert (now.drained, now.recalled) == (("B",), "")
    members = [ask("A", seated=1), ask("B"), ask("C", seated=1)]
    assert isinstance(decide(situation(members, now), OPTIONS, NOW), Wait)


@pytest.mark.parametrize("recalled", ["", WHY])
@pytest.mark.parametrize(
    ("asks", "ready"), [(ask("B"), True), (ask("B", seated=1), False), (ask("B", after=1, seated=1), True)]
)
def test_it_leaves_wherever_it_stands(asks: JoinRequest, ready: bool, recalled: str) -> None:
    now = replace(a_round("ABC", ready=ready, recalled=recalled), drained=("B",))
    found = outlook(now, "B", asks)
    assert (found.standing, found.next) == (Standing.DRAINED, Next.RETURN)
    assert outlook(now, "A", ask("A", seated=1)).standing is not Standing.DRAINED


def test_one_that_others_have_started_with_starts_first() -> None:
    """They would wait for it in the round's store."""
    now = drained(a_round("ABC"), ask("B", seated=1))
    assert outlook(now, "B", ask("B", seated=1)).standing is Standing.ANSWERED
    assert outlook(head_of(now), "B", ask("B", seated=1)).next is Next.READ


def test_a_seat_that_nobody_knew_of_is_recalled_by_the_decider() -> None:
    now = replace(a_round("ABC"), drained=("B",))
    verdict = decide(situation([ask(node, seated=1) for node in "ABC"], now), OPTIONS, NOW)
    assert isinstance(verdict, Publish)
    assert (verdict.record.recalled, verdict.record.drained) == ("hostB was drained", ("B",))


def test_a_run_that_is_over_says_that() -> None:
    closed = replace(a_round("ABC"), closed="by hand", outcome="closed", drained=("B",))
    assert outlook(closed, "B", ask("B", seated=1)).standing is Standing.CLOSED
    assert drain(closed, [ask("C")], WHY) is None


def test_twice_is_once_and_an_earlier_recall_stays() -> None:
    now = drained(a_round("ABC", recalled="hostA left"), ask("B", seated=1))
    assert now.recalled == "hostA left"
    assert drain(now, [ask("B", seated=1)], WHY) is None


@pytest.mark.parametrize(
    ("now", "seated", "why"),
    [
        (NO_ROUND, 0, "no round yet"),
        (NO_ROUND, 7, "etcd has lost the record"),
        (replace(a_round("ABC"), closed="by hand", outcome="closed"), 1, "the run is over: by hand"),
        (replace(a_round("ABC"), drained=("B",)), 1, "it is to leave already"),
    ],
)
def test_whoever_cannot_be_drained_is_told_why(now: Round, seated: int, why: str) -> None:
    asks = [ask("B", seated=seated)]
    assert why in why_not_drained(now, asks)
    assert drain(now, asks, WHY) is None


@pytest.mark.parametrize(
    ("ready", "asks", "recalled"),
    [
        (True, ask("B", seated=1), WHY),
        (True, ask("B"), ""),
        (False, ask("B"), WHY),  # it may have a seat that it has not taken yet
    ],
)
def test_of_a_large_round_its_own_word_says_whether_it_has_a_seat(
    ready: bool, asks: JoinRequest, recalled: str
) -> None:
    head = head_of(a_round("ABC", ready=ready))
    found = drain(head, [asks], WHY)
    assert isinstance(found, RoundHead)
    assert (found.recalled, found.drained) == (recalled, ("B",))
