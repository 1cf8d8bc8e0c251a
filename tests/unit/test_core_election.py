"""Who leads: each rule, and what every order of events keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from ftcoord.core.election import decide, outlook
from ftcoord.core.election_records import Candidacy, Term, encode, parse_candidacy, parse_term
from ftcoord.core.outlook import Next, Standing
from ftcoord.core.situation import Asking, Situation
from ftcoord.core.verdict import Publish, Wait
from ftcoord.errors import StateError


def asking(*members: str, after: int = 0) -> list[Asking[Candidacy]]:
    return [Asking(member, Candidacy(f"{member}'s name", after)) for member in members]


def decided(situation: Situation[Term, Candidacy]) -> Term:
    verdict = decide(situation)
    assert isinstance(verdict, Publish), verdict
    return verdict.record


def test_the_oldest_candidate_leads_first() -> None:
    assert decided(Situation(asking("a", "b"))) == Term(1, "a", "a's name")


def test_a_leader_leads_as_long_as_it_is_there() -> None:
    verdict = decide(Situation(asking("b", "a"), Term(7, "a", "a's name"), highest=7))
    assert isinstance(verdict, Wait)
    assert verdict.until is None


def test_the_oldest_candidate_leads_when_the_leader_is_gone() -> None:
    assert decided(Situation(asking("b", "c"), Term(7, "a", "a's name"), highest=7)) == Term(8, "b", "b's name")


def test_nobody_leads_where_nobody_stands() -> None:
    assert isinstance(decide(Situation([], Term(7, "a", "a's name"), highest=7)), Wait)


def test_a_record_that_vanished_is_put_back() -> None:
    assert decided(Situation(asking("a"), Term(7, "a", "n"), vanished=True, highest=7)) == Term(7, "a", "n")


@pytest.mark.parametrize(
    "situation",
    [
        Situation(asking("b"), Term(3, "a", "n"), highest=9),
        Situation(asking("b"), None, highest=9),
        Situation(asking("b", after=9)),
        Situation(asking("b"), Term(9, "a", "n"), vanished=True),
    ],
    ids=["seen", "seen, and lost", "known to a member", "vanished with its leader"],
)
def test_a_term_is_above_all_that_were_ever_known(situation: Situation[Term, Candidacy]) -> None:
    assert decided(situation).number == 10


def test_outlook() -> None:
    ask = Candidacy("n", 3)
    assert outlook(None, ["x"], ask).standing is Standing.PENDING
    assert outlook(Term(4, "y", "n"), ["x"], ask).standing is Standing.SPARE
    assert outlook(Term(3, "x", "n"), ["x"], ask).standing is Standing.SPARE
    mine = outlook(Term(4, "x", "n"), ["w", "x"], ask)
    assert (mine.standing, mine.next) == (Standing.ANSWERED, Next.RETURN)


def test_who_was_elected_under_a_lease_that_it_lost_does_not_lead() -> None:
    assert outlook(Term(4, "w", "n"), ["w", "x"], Candidacy("n", 0)).standing is Standing.SPARE


@dataclass(frozen=True)
class World:
    """Candidates by age; the record; what was decided; and the highest number that any decider saw."""

    alive: tuple[str, ...] = ()
    record: Term | None = None
    vanished: bool = False
    terms: tuple[Term, ...] = ()

    def next(self) -> Iterator[World]:
        for name in set("abc") - set(self.alive):
            yield replace(self, alive=(*self.alive, name))
        for name in self.alive:
            yield replace(self, alive=tuple(other for other in self.alive if other != name))
        if self.record is not None and not self.vanished:
            yield replace(self, vanished=True)
        highest = max((term.number for term in self.terms), default=0)
        verdict = decide(Situation(asking(*self.alive), self.record, self.vanished, highest))
        if isinstance(verdict, Publish):
            yield replace(self, record=verdict.record, vanished=False, terms=(*self.terms, verdict.record))
        elif self.alive:  # then somebody who is there leads
            assert self.record is not None
            assert self.record.member in self.alive


def test_every_order_of_events_keeps_one_leader_a_term() -> None:
    seen, new = {World()}, [World()]
    for _ in range(7):
        new = [state for state in {state for world in new for state in world.next()} if state not in seen]
        seen.update(new)
    leaders = [{(term.number, term.member) for term in world.terms} for world in seen]
    assert all(len({number for number, _ in pairs}) == len(pairs) for pairs in leaders)
    assert all([t.number for t in w.terms] == sorted(t.number for t in w.terms) for w in seen)
    assert max(len(world.terms) for world in seen) > 2


@pytest.mark.parametrize("record", [Candidacy("n", 3, "x"), Term(3, "m", "n", "by")])
def test_records_are_read_as_they_were_written(record: Candidacy | Term) -> None:
    parse, other = (parse_candidacy, parse_term) if isinstance(record, Candidacy) else (parse_term, parse_candidacy)
    assert parse("/k", encode(record)) == record
    with pytest.raises(StateError, match="/k"):
        other("/k", encode(record))
