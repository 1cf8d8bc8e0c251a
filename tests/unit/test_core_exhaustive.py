"""Every order of events for up to three nodes: the protocol's invariants hold after each, and planted bugs are found.

Two nodes are explored to the end; three as deep as takes seconds, from an empty run and from a round that runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from invariants import InvariantBroken
from model import START, Decide, World, quick

from ftcoord.core import rendezvous
from ftcoord.core.rendezvous import RoundCandidate, RoundOptions, RoundSituation
from ftcoord.core.rendezvous_records import JoinRequest
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


@pytest.mark.parametrize(("min_nodes", "max_nodes"), [(1, 2), (2, 3)])
def test_two_deciders_race(min_nodes: int, max_nodes: int) -> None:
    assert World((min_nodes, max_nodes), deciders=2).explore(9) > 2_000


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


def limited(**wrong: int) -> Decide:
    """A `decide` that takes other limits for those that all members want."""

    def wanting(situation: RoundSituation) -> RoundSituation:
        members = [replace(member, ask=replace(member.ask, **wrong)) for member in situation.members]
        return replace(situation, members=members, previous=situation.previous and replace(situation.previous, **wrong))

    return seen_as(wanting)


def recalls_for_spares(situation: RoundSituation, options: RoundOptions, verdict: Verdict) -> Verdict:
    last = situation.previous
    if isinstance(verdict, Publish) or last is None or last.recalled or last.closed:
        return verdict
    spare = len(situation.members) > len(last.seats)
    return Publish(replace(last, recalled="somebody waits"), "") if spare else verdict


def replaces_without_recall(situation: RoundSituation, options: RoundOptions, verdict: Verdict) -> Verdict:
    if isinstance(verdict, Wait) or not verdict.record.recalled:
        return verdict
    again = rendezvous.decide(replace(situation, previous=verdict.record), options, 0.0)
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


def starts_at_once(situation: RoundSituation, decision: Publish) -> Publish:
    return replace(decision, record=replace(decision.record, ready=True))


def no_newcomers(situation: RoundSituation, options: RoundOptions, verdict: Verdict) -> Verdict:
    waits = isinstance(verdict, Publish) and "waits to join" in verdict.record.recalled
    return Wait("they may wait") if waits else verdict


PLANTED: dict[str, tuple[str, tuple[int, int], Decide]] = {
    "max is ignored": ("S1 min <= n <= max", (1, 1), limited(max_nodes=3)),
    "the dead are seated": ("S1 only live", (1, 2), seen_as(partial(with_the_dead, back=True))),
    "a round is replaced unrecalled": ("a running round is recalled", (1, 2), outcome(replaces_without_recall)),
    "a spare recalls a full round": ("L2", (1, 1), outcome(recalls_for_spares)),
    "a newcomer is left waiting": ("L1 a round", (1, 2), outcome(no_newcomers)),
    "a round starts when it is decided": ("nobody starts", (1, 2), new_round(starts_at_once)),
    "who is away is taken to ask": ("only those that ask", (1, 2), seen_as(with_the_away)),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bug_is_found(bug: str) -> None:
    rule, limits, decide = PLANTED[bug]
    world = World(limits, nodes=2, decide=decide, hanging=False)
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
