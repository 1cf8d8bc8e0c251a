"""The election's two halves: each rule, then every order of joins, deaths, decisions and late hearing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
from exploring import checked, explore
from invariants import check_term

from ftcoord.core.election import ElectionSituation, decide, outlook
from ftcoord.core.election_records import Candidacy, Term, encode, parse_candidacy, parse_term
from ftcoord.core.outlook import Next, Standing
from ftcoord.core.situation import Asking, Situation
from ftcoord.core.verdict import Publish, Verdict, Wait
from ftcoord.errors import StateError

A, B = Asking("a", Candidacy("alice")), Asking("b", Candidacy("bob"))


def test_the_oldest_candidate_leads_the_first_term() -> None:
    assert decide(Situation([A, B])) == Publish(Term(1, "a", "alice"), "alice leads term 1", "E2 next term")


def test_nobody_leads_when_nobody_wants_to() -> None:
    assert decide(Situation([])) == Wait("nobody wants to lead", rule="E2 next term")
    assert decide(Situation([], Term(3, "a", "alice"))) == Wait("nobody wants to lead", rule="E2 next term")


def test_a_leader_leads_as_long_as_it_is_a_member() -> None:
    assert decide(Situation([A, B], Term(3, "b", "bob"), highest=3)) == Wait("bob leads term 3", rule="E1 leading")


def test_when_it_is_gone_the_oldest_candidate_leads_the_next_term() -> None:
    found = decide(Situation([A, B], Term(3, "gone", "carol"), highest=3))
    assert found == Publish(Term(4, "a", "alice"), "alice leads term 4", "E2 next term")


def test_a_record_that_vanished_is_put_back() -> None:
    last = Term(3, "a", "alice")
    found = decide(Situation([A, B], last, vanished=True, highest=3))
    assert isinstance(found, Publish)
    assert found.record == last


@pytest.mark.parametrize("previous", [None, Term(3, "a", "alice")], ids=["wiped", "older"])
@pytest.mark.parametrize("candidate_knows", [False, True])
def test_no_term_is_used_twice_though_etcd_lost_writes(previous: Term | None, candidate_knows: bool) -> None:
    """Nor does the leader of a term that was over lead again."""
    other = replace(B, ask=Candidacy("bob", after=7)) if candidate_knows else B
    found = decide(Situation([A, other], previous, highest=0 if candidate_knows else 7))
    assert isinstance(found, Publish)
    assert found.record.number == 8


def test_what_a_candidate_hears() -> None:
    ask = Candidacy("alice")
    assert outlook(None, ["a"], ask).standing is Standing.PENDING
    assert outlook(Term(1, "b", "bob"), ["a"], ask).standing is Standing.SPARE
    assert outlook(Term(1, "a", "alice"), ["a"], ask).next is Next.RETURN
    assert outlook(Term(1, "a", "alice"), ["a", "a2"], ask).standing is Standing.SPARE, "that lease is lost"


def test_records_are_read_as_they_were_written() -> None:
    ask, term = Candidacy("alice", 3, "nonce"), Term(3, "a", "alice", "a 7")
    assert parse_candidacy("/k", encode(ask)) == ask
    assert parse_term("/k", encode(term)) == term


@pytest.mark.parametrize("number", [-1, 2**62])
def test_numbers_that_nobody_has_counted_to_are_refused(number: int) -> None:
    with pytest.raises(StateError, match="/k"):
        parse_term("/k", encode(Term(number, "a", "alice")))
    with pytest.raises(StateError, match="/k"):
        parse_candidacy("/k", encode(Candidacy("alice", number)))


# -- every order of events --------------------------------------------------------------------------------------------

LEASES = (2, 2, 1)
"""How many each process may have."""
ALL = 1000
"""Deeper than any state: explore to the end."""
Decide = Callable[[ElectionSituation], Verdict[Term]]


class Process(NamedTuple):
    """One process: how many leases it may still have and how many it had, whether the last one lives, and the highest
    record that it heard of."""

    left: int
    leases: int = 0
    lives: bool = False
    heard: Term | None = None


class Now(NamedTuple):
    """The whole world. A member's id is its process and the number of its lease.

    Args:
        terms: how many there were so far.
        leader: of the last one of these.
    """

    processes: tuple[Process, ...]
    members: tuple[Asking[Candidacy], ...] = ()
    record: Term | None = None
    deleted: bool = False
    terms: int = 0
    leader: str = ""

    def with_process(self, at: int, process: Process) -> Now:
        return self._replace(processes=(*self.processes[:at], process, *self.processes[at + 1 :]))


def member_id(at: int, process: Process) -> str:
    return f"{at}.{process.leases}"


def nameless(now: Now) -> Hashable:
    """Two worlds with one of these differ only in which process is called what, and in who led when a term was over.

    Of a term counts its number, which is given once, and which of the living leads it.
    """
    living = {one.member: place for place, one in enumerate(now.members)}

    def told(term: Term | None) -> tuple[int, int]:
        return (term.number, living.get(term.member, -1)) if term else (0, -1)

    alive, dead = [()] * len(living), []
    for at, one in enumerate(now.processes):
        if one.lives:
            place = living[member_id(at, one)]
            alive[place] = (one.left, now.members[place].ask.after, told(one.heard))
        else:
            dead.append((one.left, told(one.heard)))
    return (*alive, *sorted(dead), told(now.record), now.deleted, now.terms, living.get(now.leader, -1))


def after_decision(now: Now, at: int, decide: Decide) -> Now | None:
    """What this member, which has read everything just now, makes of it."""
    heard = now.processes[at].heard
    previous = now.record or heard
    vanished = now.record is None and heard is not None
    highest = max(heard.number if heard else 0, now.record.number if now.record else 0)
    verdict = decide(Situation(now.members, previous, vanished, highest))
    live = {one.member for one in now.members}
    if isinstance(verdict, Wait):
        assert previous is not None
        assert previous.member in live, "nobody leads, and nobody is elected"
        return None
    term = verdict.record
    assert term.member in live
    assert term.number >= now.terms, "a term that was over began again"
    if term.number == now.terms:
        assert term.member == now.leader, f"term {term.number} was used twice"
        return now._replace(record=term)
    assert term.number == now.terms + 1
    assert now.leader not in live, "a leader that lives was replaced"
    return now._replace(record=term, terms=term.number, leader=term.member)


def following(now: Now, decide: Decide) -> Iterator[tuple[str, Now]]:
    for at, process in enumerate(now.processes):
        if process.lives:
            yield from of_candidate(now, at, process, decide)
        elif process.left:
            new = Process(process.left - 1, process.leases + 1, True, process.heard)
            ask = Candidacy(f"p{at}", process.heard.number if process.heard else 0)
            joined = now.with_process(at, new)
            yield f"p{at} joins", joined._replace(members=(*now.members, Asking(member_id(at, new), ask)))
    if now.record is not None and now.members and not now.deleted:
        # by a stranger: whoever lives heard of the record before
        all_heard = tuple(one._replace(heard=now.record) if one.lives else one for one in now.processes)
        yield "the record is deleted", now._replace(processes=all_heard, record=None, deleted=True)


def of_candidate(now: Now, at: int, process: Process, decide: Decide) -> Iterator[tuple[str, Now]]:
    """What a live one does, and what becomes of it."""
    me = member_id(at, process)
    if not is_forgotten_without(at, now):
        left = tuple(one for one in now.members if one.member != me)
        yield f"p{at} dies", now.with_process(at, process._replace(lives=False))._replace(members=left)
    if now.record is not None and process.heard != now.record:
        yield f"p{at} hears", now.with_process(at, process._replace(heard=now.record))
    if now.members[0].member == me:
        decided = after_decision(now, at, decide)
        if decided is not None:
            yield f"p{at} decides", decided


def is_forgotten_without(at: int, now: Now) -> bool:
    """Whether this process alone knows what was decided: without it, that is lost for good."""
    if not now.deleted or now.record is not None:
        return False
    last = max((one.heard for one in now.processes if one.heard), key=lambda term: term.number, default=None)
    return not any(one.lives and one.heard == last for other, one in enumerate(now.processes) if other != at)


def check(now: Now) -> None:
    told = [
        at
        for at, one in enumerate(now.processes)
        if one.lives and outlook(one.heard, [member_id(at, one)], Candidacy("")).standing is Standing.ANSWERED
    ]
    assert len(told) <= 1, "two live members believe that they lead"


def explored(decide: Decide) -> int:
    return explore(start_of(LEASES), lambda now: following(now, decide), check, ALL, nameless)


def start_of(leases: tuple[int, ...]) -> Now:
    return Now(tuple(map(Process, leases)))


def test_every_order_of_events() -> None:
    assert explored(checked(decide, check_term)) > 10_000


def test_what_can_happen_does_not_depend_on_names() -> None:
    """So one state of those that differ only in names is enough."""
    all_of_them, without_names = set[Hashable](), set[Hashable]()
    start = start_of((1, 1, 1))
    count = explore(start, lambda now: following(now, decide), lambda now: all_of_them.add(nameless(now)), ALL)
    explore(start, lambda now: following(now, decide), lambda now: without_names.add(nameless(now)), ALL, nameless)
    assert all_of_them == without_names
    assert len(all_of_them) < count


def uses_a_term_twice(situation: ElectionSituation) -> Verdict[Term]:
    found = decide(situation)
    if isinstance(found, Publish) and situation.previous:
        return replace(found, record=replace(found.record, number=situation.previous.number))
    return found


def waits_for_the_dead(situation: ElectionSituation) -> Verdict[Term]:
    return Wait("somebody leads") if situation.previous and not situation.vanished else decide(situation)


def replaces_the_living(situation: ElectionSituation) -> Verdict[Term]:
    return (
        decide(replace(situation, previous=replace(situation.previous, member="nobody")))
        if (situation.previous and len(situation.members) == len(LEASES))
        else decide(situation)
    )


def forgets(situation: ElectionSituation) -> Verdict[Term]:
    return decide(replace(situation, previous=None, highest=0)) if situation.vanished else decide(situation)


@pytest.mark.parametrize("planted", [uses_a_term_twice, waits_for_the_dead, replaces_the_living, forgets])
def test_planted_faults_are_found(planted: Decide) -> None:
    with pytest.raises(AssertionError):
        explored(planted)
