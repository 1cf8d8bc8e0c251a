"""Every order of events for up to three nodes: the protocol's invariants hold after each, and planted bugs are found.

Two nodes are explored to the end; three as deep as takes seconds, from an empty run and from a round that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import exploring
import pytest
from invariants import InvariantBroken
from model import RETURN, START, Decide, State, World, nameless, quick

from ftcoord.core import rendezvous
from ftcoord.core.rendezvous_records import JoinRequest
from ftcoord.core.round_situation import RoundCandidate, RoundOptions, RoundSituation
from ftcoord.core.verdict import Publish, Verdict, Wait

ALL = 1000
"""Deeper than any state: explore to the end."""
THREE_NODES = [(1, 2, True), (2, 2, True), (2, 3, True), (1, 3, False)]


@pytest.mark.parametrize(("min_nodes", "max_nodes", "depth"), [(2, 2, ALL), (1, 2, 12), (1, 1, 12)])
def test_two_nodes(min_nodes: int, max_nodes: int, depth: int) -> None:
    assert World((min_nodes, max_nodes), nodes=2).explore(depth) > 1_500


@pytest.mark.parametrize(("min_nodes", "max_nodes", "recall_on_loss"), THREE_NODES)
def test_three_nodes(min_nodes: int, max_nodes: int, recall_on_loss: bool) -> None:
    """From both at once: much of what follows the one follows the other too, or ends in the same way."""
    world = World((min_nodes, max_nodes), quick(recall_on_loss))
    joined = [f"{node}0 joins after round 0" for node in "ABC"]
    running = world.walk(*joined, "a tick", "a tick", "decided", *seated("ABC"[:max_nodes]), "decided")
    assert world.explore_from([(START, 8), (running, 6)]) > 2_000


@pytest.mark.parametrize(("min_nodes", "max_nodes"), [(1, 1), (1, 2)])
def test_the_record_may_vanish(min_nodes: int, max_nodes: int) -> None:
    assert World((min_nodes, max_nodes), nodes=2, vanishing=True).explore(9) > 1_500


@pytest.mark.parametrize(("min_nodes", "max_nodes"), [(1, 2), (2, 3)])
def test_two_deciders_race(min_nodes: int, max_nodes: int) -> None:
    assert World((min_nodes, max_nodes), deciders=2).explore(9) > 2_000


@pytest.mark.parametrize(("nodes", "depth"), [(2, 8), (3, 6)])
def test_what_can_happen_does_not_depend_on_names(nodes: int, depth: int) -> None:
    """So one state of those that differ only in names is enough."""
    world = World((1, 2), nodes=nodes, vanishing=True)
    all_of_them, without_names = set[Hashable](), set[Hashable]()
    count = exploring.explore(START, world._events, lambda state: all_of_them.add(nameless(state)), depth)
    exploring.explore(START, world._events, lambda state: without_names.add(nameless(state)), depth, nameless)
    assert all_of_them == without_names
    assert len(all_of_them) < count


@pytest.mark.parametrize(("deciders", "vanishing", "depth"), [(1, True, 8), (2, False, 7)])
def test_what_can_happen_does_not_depend_on_times_that_count_for_nothing(
    deciders: int, vanishing: bool, depth: int
) -> None:
    """So one state of those that differ only in these is enough."""
    plain = World((1, 2), nodes=2, vanishing=vanishing, deciders=deciders, all_times=True)
    world = World((1, 2), nodes=2, vanishing=vanishing, deciders=deciders)
    all_of_them, without_times = set[Hashable](), set[Hashable]()

    def note(states: set[Hashable], state: State) -> None:
        if not state.pending:  # while a decision is on its way, times stay as they were
            states.add(nameless(world._timed(state)))

    count = exploring.explore(START, plain._events, partial(note, all_of_them), depth, nameless)
    exploring.explore(START, world._events, partial(note, without_times), depth, nameless)
    assert all_of_them == without_times
    assert len(all_of_them) < count


def test_what_follows_any_of_several_starts_is_explored() -> None:
    world = World((1, 2), nodes=2)
    starts = [(START, 5), (world.walk("A0 joins after round 0", "B0 joins after round 0", "decided"), 4)]
    apart, together = set[Hashable](), set[Hashable]()
    for start, depth in starts:
        exploring.explore(start, world._events, lambda state: apart.add(nameless(state)), depth, nameless)
    count = exploring.explore_from(starts, world._events, lambda state: together.add(nameless(state)), nameless)
    assert together == apart
    assert count == len(apart)


def seated(nodes: str) -> list[str]:
    return [f"{node}0 takes its seat" for node in nodes]


# -- the test of the tests: each of these bugs is found ---------------------------------------------------------

Change = Callable[[RoundSituation, RoundOptions, Verdict], Verdict]


def outcome(change: Change) -> Decide:
    """A `decide` whose verdict is changed."""
    return lambda situation, options, now: change(situation, options, rendezvous.decide(situation, options, now))


def new_round(change: Callable[[RoundSituation, Publish], Publish]) -> Decide:
    """A `decide` whose new rounds are changed."""

    def changed(situation: RoundSituation, options: RoundOptions, verdict: Verdict) -> Verdict:
        last = situation.previous.number if situation.previous else 0
        new = isinstance(verdict, Publish) and verdict.record.number != last
        return change(situation, verdict) if new and isinstance(verdict, Publish) else verdict

    return outcome(changed)


def seen_as(change: Callable[[RoundSituation], RoundSituation]) -> Decide:
    """A `decide` that sees the world wrongly."""
    return lambda situation, options, now: rendezvous.decide(change(situation), options, now)


def told(**wrong: Any) -> Decide:
    """A `decide` that takes other options for the user's."""
    return lambda situation, options, now: rendezvous.decide(situation, replace(options, **wrong), now)


def limited(**wrong: int) -> Decide:
    """A `decide` that takes other limits for those that all members want."""

    def wanting(situation: RoundSituation) -> RoundSituation:
        members = [replace(member, ask=replace(member.ask, **wrong)) for member in situation.members]
        return replace(situation, members=members, previous=situation.previous and replace(situation.previous, **wrong))

    return seen_as(wanting)


def renumbered(number: Callable[[RoundSituation], int]) -> Decide:
    return new_round(lambda s, d: replace(d, record=replace(d.record, number=number(s))))


def previous_as(**wrong: Any) -> Decide:
    return seen_as(lambda s: replace(s, previous=replace(s.previous, **wrong)) if s.previous else s)


def recalls_for_spares(situation: RoundSituation, options: RoundOptions, verdict: Verdict) -> Verdict:
    last = situation.previous
    if isinstance(verdict, Publish) or last is None or last.recalled or last.closed:
        return verdict
    spare = len(situation.members) > len(last.seats)
    return Publish(replace(last, recalled="somebody waits"), "") if spare else verdict


def recalls_without_the_gone(situation: RoundSituation, options: RoundOptions, verdict: Verdict) -> Verdict:
    if isinstance(verdict, Wait) or not verdict.record.recalled:
        return verdict
    live = {member.id for member in situation.members}
    seats = tuple(seat for seat in verdict.record.seats if seat.member in live)
    return replace(verdict, record=replace(verdict.record, seats=seats))


def replaces_without_recall(situation: RoundSituation, options: RoundOptions, verdict: Verdict) -> Verdict:
    if isinstance(verdict, Wait) or not verdict.record.recalled:
        return verdict
    again = rendezvous.decide(replace(situation, previous=verdict.record, vanished=False), options, 0.0)
    return again if isinstance(again, Publish) else verdict


def with_the_dead(situation: RoundSituation, back: bool) -> RoundSituation:
    last = situation.previous
    if last is None:
        return situation
    live = {member.id for member in situation.members}
    after = last.number if back else 0
    dead = [
        RoundCandidate(s.member, JoinRequest(s.node, "", 1, after, "", "", *last.limits), 0.0)
        for s in last.seats
        if s.member not in live
    ]
    return replace(situation, members=(*situation.members, *dead))


def with_the_away(situation: RoundSituation) -> RoundSituation:
    last = situation.previous
    if last is None:
        return situation
    away = {away.member: away.round for away in last.away}
    back = [replace(m, ask=replace(m.ask, after=max(m.ask.after, away.get(m.id, 0)))) for m in situation.members]
    return replace(situation, members=back)


def without_nodes(situation: RoundSituation) -> RoundSituation:
    last = situation.previous
    if last is None or not last.recalled:
        return situation
    return replace(situation, previous=replace(last, seats=tuple(replace(seat, node="") for seat in last.seats)))


def one_newcomer(situation: RoundSituation) -> RoundSituation:
    last = situation.previous
    if last and not last.recalled:
        return situation
    nodes = {seat.node for seat in last.seats} if last else set()
    new = [member for member in situation.members if member.ask.node not in nodes]
    return replace(situation, members=tuple(m for m in situation.members if m not in new[1:]))


def starts_at_once(situation: RoundSituation, decision: Publish) -> Publish:
    return replace(decision, record=replace(decision.record, ready=True))


def ready_without_all(situation: RoundSituation, options: RoundOptions, verdict: Verdict) -> Verdict:
    last = situation.previous
    unready = last is not None and last.seats and not (last.ready or last.recalled or last.closed)
    waits = isinstance(verdict, Wait) and unready and not situation.vanished
    return Publish(replace(last, ready=True), "") if last and waits else verdict


def recall_takes_back(situation: RoundSituation, options: RoundOptions, verdict: Verdict) -> Verdict:
    if isinstance(verdict, Wait) or not verdict.record.recalled:
        return verdict
    return replace(verdict, record=replace(verdict.record, ready=False))


def no_newcomers(situation: RoundSituation, options: RoundOptions, verdict: Verdict) -> Verdict:
    waits = isinstance(verdict, Publish) and "waits to join" in verdict.record.recalled
    return Wait("they may wait") if waits else verdict


PLANTED: dict[str, tuple[str, tuple[int, int], Decide]] = {
    "numbers start again": ("S1", (1, 2), renumbered(lambda s: 1)),
    "numbers ignore what the members know": (
        "S2",
        (1, 2),
        renumbered(lambda s: s.previous.number + 1 if s.previous else 1),
    ),
    "numbers ignore the last round": (
        "S1",
        (1, 2),
        renumbered(lambda s: max(m.ask.after for m in s.members) + (0 if s.previous else 1)),
    ),
    "max is ignored": ("S1 min <= n <= max", (1, 1), limited(max_nodes=3)),
    "min is ignored": ("S1 min <= n <= max", (2, 2), limited(min_nodes=1)),
    "a member is seated twice": (
        "S1 one seat",
        (1, 3),
        new_round(lambda s, d: replace(d, record=replace(d.record, seats=d.record.seats + d.record.seats[:1]))),
    ),
    "the dead are seated": ("S1 only live", (1, 2), seen_as(partial(with_the_dead, back=True))),
    "a recall drops the gone": ("S1 a recall", (1, 2), outcome(recalls_without_the_gone)),
    "a round is replaced unrecalled": ("a running round is recalled", (1, 2), outcome(replaces_without_recall)),
    "a recall is repeated": ("recalled once", (1, 2), previous_as(recalled="")),
    "a closed run goes on": ("closed", (1, 2), previous_as(closed="")),
    "a spare recalls a full round": ("L2", (1, 1), outcome(recalls_for_spares)),
    "a newcomer is left waiting": ("L1 a round", (1, 2), outcome(no_newcomers)),
    "the dead keep their seats": ("who is not back", (1, 1), seen_as(partial(with_the_dead, back=False))),
    "participants are awaited for ever": ("L1", (1, 2), told(last_call_timeout=1e9, settle_timeout=1e9)),
    "newcomers are let in one by one": ("L1 within", (1, 3), seen_as(one_newcomer)),
    "a vanished record is not missed": ("L1", (1, 2), seen_as(lambda s: replace(s, vanished=False))),
    "who waited for hours ends the last call": (
        "last call to come back",
        (1, 2),
        seen_as(lambda s: replace(s, previous_at=-RETURN) if s.previous and s.previous.recalled else s),
    ),
    "a round starts when it is decided": ("nobody starts", (1, 2), new_round(starts_at_once)),
    "a round starts without those that did not take their seats": ("nobody starts", (1, 2), outcome(ready_without_all)),
    "a recall takes a start back": ("S1 a recall changes", (1, 2), outcome(recall_takes_back)),
    "a seat is taken for good": ("long ago", (1, 2), told(fresh=1e9)),
    "ranks are upside down": (
        "rank 0",
        (1, 2),
        new_round(lambda s, d: replace(d, record=replace(d.record, seats=d.record.seats[::-1]))),
    ),
    "who is away is taken to ask": ("only those that ask", (1, 2), seen_as(with_the_away)),
    "survivors are taken for newcomers": ("survivor", (1, 1), seen_as(without_nodes)),
}


SHOWN_BY_A_LOST_RECORD = {"numbers ignore what the members know", "a vanished record is not missed"}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bug_is_found(bug: str) -> None:
    rule, limits, decide = PLANTED[bug]
    world = World(limits, nodes=2, decide=decide, vanishing=bug in SHOWN_BY_A_LOST_RECORD, hanging=False)
    with pytest.raises(InvariantBroken, match=rule):
        world.explore(12)


def test_a_missing_guard_is_found() -> None:
    world = World((1, 2), nodes=2, deciders=2, guarded=False, hanging=False)
    with pytest.raises(InvariantBroken, match="S1 S2"):
        world.explore(10)


def test_a_broken_rule_is_reported_with_what_led_there() -> None:
    world = World((1, 2), nodes=2, decide=outcome(no_newcomers), hanging=False)
    with pytest.raises(
        InvariantBroken, match=r"^L1 a round runs, .*, after: A0 joins after round 0 \| .* \| B0 joins after round 0$"
    ):
        world.explore(10)
