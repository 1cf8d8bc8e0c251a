"""Every order in which nodes lose their leases and take their seats again (R9); and planted bugs are found."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import pytest
from invariants import InvariantBroken
from members_model import RoundOutlook
from model import Decide, quick
from seats_model import LEASE, CallBack, Seats, SeatsWorld, Vacant

from ftcoord.core import rendezvous
from ftcoord.core.rendezvous import call_back
from ftcoord.core.rendezvous_records import AnyRound, JoinRequest, Round
from ftcoord.core.round_situation import RoundCandidate, RoundOptions, RoundSituation, vacant
from ftcoord.core.verdict import Outlook, Verdict

TWO, THREE = "AB", "ABC"
IGNORES = replace(quick(recall_on_loss=False), return_to_seat=LEASE)
TAKES_SEATS = ["A comes back", "decided", "B comes back", "decided", "A hears", "A acts"]
"""The next round is decided, and one has taken its seat."""


@dataclass(frozen=True)
class Scene:
    """What is explored.

    Args:
        limits: the fewest and the most nodes of a round.
        nodes: those that work in it.
        happens: see SeatsWorld.
        depth: how many events follow.
        first: what has happened before.
    """

    limits: tuple[int, int]
    nodes: str
    happens: tuple[str, ...]
    depth: int
    first: tuple[str, ...] = ()
    options: RoundOptions | None = None

    def world(self, **wrong: Any) -> tuple[SeatsWorld, Seats]:
        options = {} if self.options is None else {"options": self.options}
        world = SeatsWorld(self.limits, 3, happens=self.happens, **options)
        start = world.follow(world.running(self.nodes), *self.first)
        for name, function in wrong.items():
            setattr(world, name, function)
        return world, start


EVERYTHING = (
    "keys outlive leases",
    "failures",
    "newcomers",
    "wipes",
    "deciders",
    "deaths",
    "lost hosts",
    "farewells",
)
SCENES = {
    "anything, two nodes": Scene((1, 2), TWO, EVERYTHING, 3),
    "anything, three nodes": Scene((1, 3), THREE, EVERYTHING, 3),
    "seats are being taken": Scene((1, 2), TWO, EVERYTHING, 3, tuple(TAKES_SEATS)),
    "leases": Scene((1, 3), THREE, ("keys outlive leases",), 4),
    "leases, for longer": Scene((2, 2), TWO, ("keys outlive leases",), 5),
    "nodes are lost": Scene((1, 3), THREE, ("deaths", "lost hosts", "farewells"), 4),
    "workers fail": Scene((2, 3), THREE, ("failures", "deciders"), 4),
    "an etcd is wiped or restored": Scene((1, 2), TWO, ("wipes", "failures", "newcomers"), 4),
    "a spare waits": Scene((2, 2), TWO, ("newcomers", "wipes"), 4, ("C joins",)),
    "two deciders": Scene((1, 2), TWO, ("deciders", "deaths", "wipes"), 5),
    "nobody is replaced": Scene((1, 2), TWO, ("newcomers", "keys outlive leases", "lost hosts"), 4, (), IGNORES),
}


@pytest.mark.parametrize("name", SCENES)
def test_every_order(name: str) -> None:
    world, start = SCENES[name].world()
    assert world.explore_seats(SCENES[name].depth, start) > 1_000


# -- the test of the tests: each of these bugs is found ---------------------------------------------------------


def seen_as(**wrong: Any) -> Decide:
    """A `decide` that sees something else in each member's key."""

    def changed(situation: RoundSituation, options: RoundOptions, now: float) -> Verdict:
        members = [replace(member, ask=replace(member.ask, **wrong)) for member in situation.members]
        return rendezvous.decide(replace(situation, members=members), options, now)

    return changed


def told(**wrong: Any) -> Decide:
    """A `decide` that takes other options for the user's."""
    return lambda situation, options, now: rendezvous.decide(situation, replace(options, **wrong), now)


def knowing(**wrong: Any) -> Decide:
    """A `decide` that takes something else for what the decider has noticed."""
    return lambda situation, options, now: rendezvous.decide(replace(situation, **wrong), options, now)


def asks_by_the_record_only(situation: RoundSituation, options: RoundOptions, now: float) -> Verdict:
    """Who works in a round of which the record has no seats is taken to ask."""
    last, members = situation.previous, situation.members
    if last is not None and not last.seats:
        members = [
            replace(one, ask=replace(one.ask, seated=0)) if one.ask.seated == last.number else one for one in members
        ]
    return rendezvous.decide(replace(situation, members=members), options, now)


def forgets_lost_rounds(situation: RoundSituation, options: RoundOptions, now: float) -> Verdict:
    number = situation.previous.number if situation.previous else 0
    members = [
        replace(one, ask=replace(one.ask, seated=0, after=max(one.ask.after, one.ask.seated)))
        if one.ask.seated > number
        else one
        for one in situation.members
    ]
    return rendezvous.decide(replace(situation, members=members), options, now)


def all_that_say_so_hold(last: Round, members: Collection[RoundCandidate]) -> Collection[str]:
    return vacant(last, members) - {member.ask.holds for member in members}


def nobody_holds(last: Round, members: Collection[RoundCandidate]) -> Collection[str]:
    return last.ranks.keys() - {member.id for member in members}


def recalls_only_its_own(now: AnyRound | None, mine: AnyRound) -> tuple[int, str]:
    return call_back(now, mine) if now is None or rendezvous.is_same_round(now, mine) else (0, "")


def called_by_any_other(now: AnyRound | None, mine: AnyRound) -> tuple[int, str]:
    return (1, "another round") if now is not None and now.number != mine.number else call_back(now, mine)


def waits_for_a_lost_round(now: AnyRound | None, me: str, ask: JoinRequest) -> Outlook[JoinRequest]:
    """A member that has taken its seat in a round that etcd has lost."""
    return rendezvous.outlook(now, me, replace(ask, seated=0) if now and not now.size else ask)


Wrong = Decide | RoundOutlook | CallBack | Vacant
PLANTED: dict[str, tuple[str, str, str, Wrong]] = {
    "who holds a seat asks": ("L2 a surplus node", "leases", "decide", seen_as(holds="")),
    "a lost lease is a lost node": ("R9 a lost lease", "leases", "decide", told(return_to_seat=0.0)),
    "they are gone for long": ("R9 a lost lease", "leases", "decide", knowing(gone_since=-LEASE)),
    "they went just now": ("R9 nobody waits for long", "nodes are lost", "decide", knowing(gone_since=0.0)),
    "the dead are waited for": ("R9 nobody waits for one", "nodes are lost", "decide", knowing(deaths={})),
    "who leaves is waited for": ("R9 nobody waits for one", "nodes are lost", "decide", seen_as(leaving="")),
    "an old ask counts": (
        "S1 only those that ask",
        "an etcd is wiped or restored",
        "decide",
        asks_by_the_record_only,
    ),
    "a lost round is forgotten": ("S[12]", "an etcd is wiped or restored", "decide", forgets_lost_rounds),
    "who is missing in a lost round is not missed": ("L1 a lost round", "two deciders", "decide", knowing(mine=None)),
    "a seat in a lost round is waited for": ("L1", "seats are being taken", "outlook", waits_for_a_lost_round),
    "a seat of another round is held": ("R9", "an etcd is wiped or restored", "vacant", all_that_say_so_hold),
    "held seats are vacant": ("R9", "nodes are lost", "vacant", nobody_holds),
    "later rounds call nobody back": ("S1 nobody works", "anything, two nodes", "call_back", recalls_only_its_own),
    "an older record calls all back": (
        "R9 nobody is called back",
        "an etcd is wiped or restored",
        "call_back",
        called_by_any_other,
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bug_is_found(bug: str) -> None:
    rule, name, function, wrong = PLANTED[bug]
    world, start = SCENES[name].world(**{function: wrong})
    with pytest.raises(InvariantBroken, match=rule):
        world.explore_seats(SCENES[name].depth, start)
