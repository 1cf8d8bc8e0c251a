"""The election's two halves: each rule, then every order of joins, deaths, decisions and late hearing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from orders import checked, explore

from ftcoord.core.election import ElectionSituation, decide, outlook
from ftcoord.core.election_records import Candidacy, Term, encode, parse_candidacy, parse_term
from ftcoord.core.invariants import check_term
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

PROCESSES, LEASES = 3, (2, 2, 1)
Decide = Callable[[ElectionSituation], Verdict[Term]]


@dataclass(frozen=True)
class Process:
    """One process: how many leases it had, whether the last one lives, and the highest record that it heard of."""

    leases: int = 0
    lives: bool = False
    heard: Term | None = None


@dataclass(frozen=True)
class Now:
    """The whole world. A member's id is its process and the number of its lease."""

    processes: tuple[Process, ...]
    members: tuple[Asking[Candidacy], ...] = ()
    record: Term | None = None
    deleted: bool = False
    leaders: tuple[str, ...] = ()
    """Of all terms so far, the first one's first."""

    def with_process(self, at: int, process: Process, **more: object) -> Now:
        processes = (*self.processes[:at], process, *self.processes[at + 1 :])
        return replace(self, processes=processes, **more)  # type: ignore[arg-type]


def member_id(at: int, process: Process) -> str:
    return f"{at}.{process.leases}"


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
    if term.number <= len(now.leaders):
        assert now.leaders[term.number - 1] == term.member, f"term {term.number} was used twice"
        assert term.number == len(now.leaders), "a term that was over began again"
        return replace(now, record=term)
    assert term.number == len(now.leaders) + 1
    assert not now.leaders or now.leaders[-1] not in live, "a leader that lives was replaced"
    return replace(now, record=term, leaders=(*now.leaders, term.member))


def following(now: Now, decide: Decide) -> list[Now]:
    found = []
    last = max((one.heard for one in now.processes if one.heard), key=lambda term: term.number, default=None)
    for at, process in enumerate(now.processes):
        if not process.lives and process.leases < LEASES[at]:
            new = replace(process, leases=process.leases + 1, lives=True)
            ask = Candidacy(f"p{at}", process.heard.number if process.heard else 0)
            found.append(now.with_process(at, new, members=(*now.members, Asking(member_id(at, new), ask))))
        if not process.lives:
            continue
        others_know = any(one.lives and one.heard == last for other, one in enumerate(now.processes) if other != at)
        if not now.deleted or now.record is not None or others_know:  # else what was decided is forgotten for good
            left = tuple(one for one in now.members if one.member != member_id(at, process))
            found.append(now.with_process(at, replace(process, lives=False), members=left))
        if now.record is not None and process.heard != now.record:
            found.append(now.with_process(at, replace(process, heard=now.record)))
        if now.members[0].member == member_id(at, process):
            decided = after_decision(now, at, decide)
            found += [decided] if decided is not None else []
    if (
        now.record is not None and now.members and not now.deleted
    ):  # by a stranger: whoever lives heard of the record before
        all_heard = tuple(replace(one, heard=now.record) if one.lives else one for one in now.processes)
        found.append(replace(now, processes=all_heard, record=None, deleted=True))
    return found


def check(now: Now, _steps: list[Now]) -> None:
    told = [
        at
        for at, one in enumerate(now.processes)
        if one.lives and outlook(one.heard, [member_id(at, one)], Candidacy("")).standing is Standing.ANSWERED
    ]
    assert len(told) <= 1, "two live members believe that they lead"


def explored(decide: Decide) -> int:
    return explore(Now((Process(),) * PROCESSES), lambda now: following(now, decide), check)


def test_every_order_of_events() -> None:
    assert explored(checked(decide, check_term)) > 10_000


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
        if (situation.previous and len(situation.members) == PROCESSES)
        else decide(situation)
    )


def forgets(situation: ElectionSituation) -> Verdict[Term]:
    return decide(replace(situation, previous=None, highest=0)) if situation.vanished else decide(situation)


@pytest.mark.parametrize("planted", [uses_a_term_twice, waits_for_the_dead, replaces_the_living, forgets])
def test_planted_faults_are_found(planted: Decide) -> None:
    with pytest.raises(AssertionError):
        explored(planted)
