"""The decisions of a rendezvous: who is in the next round, when, and at which rank.

Members are written as they are spoken of: `B` is node B's first incarnation, `B'` the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcoord.core.records import NO_ROUND, Ask, Round, Seat
from ftcoord.core.rendezvous import Decision, Member, Options, Situation, Verdict, Waiting, decide

LAST_CALL, SETTLE = 30.0, 1.0
AGO = -1000.0
"""Long before now; all times here are relative to now."""
PORTS = {node: 1000 + number for number, node in enumerate("ABCDEFGH")}


def asks(name: str, after: int = 0, seen: float = 0.0) -> Member:
    node = name[0]
    return Member(name, Ask(node, f"{node}.example", PORTS[node], after, f"host{node}", f"{name}/{after}"), seen)


def all_ask(names: str, after: int = 0, seen: float = 0.0) -> list[Member]:
    return [asks(name, after, seen) for name in names.split()]


def a_round(names: str, number: int = 1, **more: Any) -> Round:
    seats = tuple(Seat(name, name[0], f"host{name[0]}") for name in names.split())
    first = names[0]
    return replace(Round(number, seats, f"{first}.example", PORTS[first]), **more)


def recalled(names: str, number: int = 1) -> Round:
    return a_round(names, number, recalled="somebody is gone")


def options(min_nodes: int, max_nodes: int, **more: Any) -> Options:
    return replace(Options(min_nodes, max_nodes, LAST_CALL, SETTLE), **more)


def judge(
    members: Sequence[Member],
    previous: Round | None = None,
    limits: tuple[int, int] = (2, 3),
    *,
    changed_at: float = 0.0,
    previous_at: float = AGO,
    vanished: bool = False,
    **more: Any,
) -> Verdict:
    return decide(Situation(members, changed_at, previous, previous_at, vanished), options(*limits, **more), 0.0)


def seats(verdict: Verdict) -> str:
    """The members of a new round, in rank order."""
    assert isinstance(verdict, Decision), verdict
    assert not verdict.round.recalled, verdict
    return " ".join(seat.member for seat in verdict.round.seats)


def is_recall(verdict: Verdict, previous: Round, why: str, waiting: int = 0) -> bool:
    """A recall says so in the record, and changes nothing else in it."""
    assert isinstance(verdict, Decision), verdict
    assert why in verdict.round.recalled
    assert verdict.round.recalled in verdict.reason
    return verdict.round == replace(previous, recalled=verdict.round.recalled, waiting=waiting)


def waits(verdict: Verdict, until: float | None) -> bool:
    assert isinstance(verdict, Waiting), verdict
    return verdict.until == until and bool(verdict.reason)


# -- the first round --------------------------------------------------------------------------------------------


def test_too_few_wait_for_others_without_a_limit() -> None:
    assert waits(judge([], limits=(1, 3)), None)
    assert waits(judge(all_ask("A", seen=AGO)), None)


@pytest.mark.parametrize("names", ["A", "A B", "A B C"])
def test_a_full_round_is_decided_at_once(names: str) -> None:
    nodes = len(names.split())
    assert judge(all_ask(names), limits=(1, nodes)) == Decision(a_round(names), f"round 1 on {nodes} nodes")


def test_beyond_max_the_oldest_are_seated() -> None:
    assert seats(judge(all_ask("B C A D"))) == "B C A"


def test_the_last_call_starts_with_the_node_that_makes_it_enough() -> None:
    members = [asks("A", seen=AGO), asks("B", seen=-10.0), asks("C", seen=-4.0)]
    assert waits(judge(members, limits=(2, 4)), 20.0)
    assert waits(judge(members, limits=(3, 4)), 26.0)


def test_the_first_round_does_not_end_at_the_settle_time_out() -> None:
    assert waits(judge(all_ask("A B", seen=-10.0), changed_at=-10.0), 20.0)


@pytest.mark.parametrize("seen", [-LAST_CALL, AGO])
def test_the_last_call_ends(seen: float) -> None:
    assert seats(judge(all_ask("A B", seen=seen))) == "A B"


# -- a running round --------------------------------------------------------------------------------------------

RUNNING = a_round("A B")


def test_a_running_round_is_left_alone() -> None:
    assert waits(judge(all_ask("A B"), RUNNING), None)


def test_a_newcomer_recalls_when_there_is_room() -> None:
    assert is_recall(judge(all_ask("A B C"), RUNNING), RUNNING, "hostC waits to join", waiting=1)
    assert is_recall(judge(all_ask("A B C D"), RUNNING, (2, 4)), RUNNING, "hostC, hostD waits to join", waiting=2)


def test_a_spare_waits_and_never_recalls_a_full_round() -> None:
    assert waits(judge([*all_ask("A B"), asks("C", seen=AGO)], RUNNING, (2, 2), changed_at=AGO), None)
    assert waits(judge([*all_ask("A B"), asks("C", after=7)], RUNNING, (2, 2)), None)


def test_a_participant_that_is_gone_recalls() -> None:
    assert is_recall(judge(all_ask("B"), RUNNING), RUNNING, "hostA is gone")
    assert is_recall(judge(all_ask("B C"), RUNNING, (2, 2)), RUNNING, "hostA is gone", waiting=1)


def test_a_loss_may_be_left_to_the_workers() -> None:
    assert waits(judge(all_ask("B"), RUNNING, recall_on_loss=False), None)


def test_a_seat_that_a_loss_left_free_is_room_for_a_newcomer() -> None:
    verdict = judge(all_ask("B C"), RUNNING, (2, 2), recall_on_loss=False)
    assert is_recall(verdict, RUNNING, "hostC waits to join", waiting=1)


def test_when_all_are_gone_there_is_nobody_to_leave_it_to() -> None:
    verdict = judge(all_ask("C"), RUNNING, (2, 2), recall_on_loss=False)
    assert is_recall(verdict, RUNNING, "hostA, hostB is gone", waiting=1)


@pytest.mark.parametrize("recall_on_loss", [True, False])
def test_a_participant_that_comes_back_recalls(recall_on_loss: bool) -> None:
    verdict = judge([asks("A", after=1), asks("B")], RUNNING, (2, 2), recall_on_loss=recall_on_loss)
    assert is_recall(verdict, RUNNING, "hostA came back")


def test_only_newcomers_are_counted_as_waiting() -> None:
    assert is_recall(judge([asks("A", after=1), *all_ask("B C")], RUNNING), RUNNING, "hostA came back", waiting=1)


def test_a_new_incarnation_recalls_as_its_old_lease_is_gone() -> None:
    assert is_recall(judge([asks("B"), asks("A'", after=1)], RUNNING, (2, 2)), RUNNING, "hostA is gone", waiting=1)


def test_many_names_are_cut_short() -> None:
    many = a_round("A B C D E")
    assert is_recall(judge([], many, (1, 8)), many, "hostA, hostB, hostC and 2 more is gone")


# -- a recalled round -------------------------------------------------------------------------------------------


def test_all_back_and_full_goes_on_at_once() -> None:
    verdict = judge(all_ask("A B", after=1), recalled("A B"), (2, 2))
    assert isinstance(verdict, Decision)
    assert verdict.round == a_round("A B", 2)


def test_all_survivors_back_go_on_when_it_has_settled() -> None:
    back = all_ask("B C", after=1)
    assert waits(judge(back, recalled("A B C"), changed_at=-0.25), 0.75)
    assert seats(judge(back, recalled("A B C"), changed_at=-SETTLE)) == "B C"


def test_changes_put_settling_off_only_to_the_end_of_the_last_call() -> None:
    back = all_ask("B C", after=1, seen=-29.5)
    assert waits(judge(back, recalled("A B C"), previous_at=-29.5), 0.5)


def test_a_newcomer_takes_the_seat_of_one_that_is_gone() -> None:
    assert seats(judge([*all_ask("B C", after=1), asks("D")], recalled("A B C"))) == "B D C"


def test_seats_are_kept_for_those_still_to_come_back() -> None:
    members = [asks("A"), asks("B", after=1), *all_ask("C D")]
    assert waits(judge(members, recalled("A B"), (2, 2)), LAST_CALL)
    members[0] = asks("A", after=1)
    assert seats(judge(members, recalled("A B"), (2, 2))) == "A B"


def test_the_last_call_ends_without_those_that_did_not_come_back() -> None:
    members = [asks("A"), asks("B", after=1, seen=-LAST_CALL), asks("C", seen=AGO)]
    assert seats(judge(members, recalled("A B"), previous_at=-LAST_CALL)) == "B C"


def test_who_missed_the_last_call_has_no_seat_before_it_asks_again() -> None:
    hangs, back = asks("A"), asks("B", after=1, seen=-LAST_CALL)
    without = judge([hangs, back], recalled("A B"), (1, 2), previous_at=-LAST_CALL)
    assert seats(without) == "B"
    assert isinstance(without, Decision)
    assert waits(judge([hangs, back], without.round, (1, 2), previous_at=0.0), None)

    again = judge([asks("A", after=1), back], without.round, (1, 2), previous_at=0.0)
    assert is_recall(again, without.round, "hostA waits to join", waiting=1)


def test_a_spare_of_hours_does_not_shorten_the_last_call() -> None:
    members = [*all_ask("A B"), asks("C", after=1, seen=-2.0), *all_ask("D E", seen=AGO)]
    assert waits(judge(members, recalled("A B C"), previous_at=-3.0), LAST_CALL - 3.0)


def test_newcomers_alone_have_a_last_call_of_their_own() -> None:
    assert waits(judge(all_ask("C D", seen=-5.0), recalled("A B"), changed_at=-5.0), LAST_CALL - 5.0)


def test_too_few_survivors_wait_for_a_newcomer() -> None:
    alone = asks("B", after=1, seen=AGO)
    assert waits(judge([alone], recalled("A B"), changed_at=AGO), None)
    assert seats(judge([alone, asks("C", seen=-SETTLE)], recalled("A B"), changed_at=-SETTLE)) == "B C"


def test_a_new_incarnation_is_a_survivor() -> None:
    members = [asks("C", after=1), asks("D", seen=AGO), asks("B'", after=1), asks("A", after=1)]
    assert seats(judge(members, recalled("A B C"))) == "A B' C"


def test_nobody_waits_for_an_incarnation_that_is_gone() -> None:
    assert seats(judge([asks("A", after=1), asks("B'")], recalled("A B C"), changed_at=-SETTLE)) == "A B'"


# -- ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "now", "after"),
    [
        pytest.param("A B C D", "D C B A", "A B C D", id="all keep their ranks, in whatever order they come back"),
        pytest.param("A B C D", "A B D", "A B D", id="a rank that is too high now takes the gap"),
        pytest.param("A B C D", "D C A E", "A E C D", id="a newcomer fills the gap"),
        pytest.param("A B C D", "E A C F", "A E C F", id="newcomers fill the gaps by age"),
        pytest.param("A B C D", "E B C D", "B E C D", id="the lowest survivor takes rank 0"),
        pytest.param("A B C D", "E F G D", "D E F G", id="a lone survivor takes rank 0"),
        pytest.param("A B", "E A B F", "A B E F", id="newcomers get the ranks that are new"),
        pytest.param("A B C D", "C D", "C D", id="a smaller world"),
        pytest.param("A B", "F E", "F E", id="only newcomers: by age"),
    ],
)
def test_ranks(before: str, now: str, after: str) -> None:
    nodes = len(now.split())
    assert seats(judge(all_ask(now, after=1), recalled(before), (nodes, nodes))) == after


def test_survivors_go_before_older_newcomers() -> None:
    assert seats(judge([asks("D", seen=AGO), *all_ask("B A", after=1)], recalled("A B"), (2, 2))) == "A B"


# -- numbers, the end, and a record that is gone ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "previous", "number"),
    [
        pytest.param(all_ask("A B", after=7), recalled("A B", 7), 8, id="from the last round"),
        pytest.param([asks("A", after=41), asks("B")], None, 42, id="from what members know when no record is left"),
        pytest.param([*all_ask("A B", after=1), asks("C", after=9)], recalled("A B"), 10, id="also without a seat"),
    ],
)
def test_numbers_grow(members: list[Member], previous: Round | None, number: int) -> None:
    verdict = judge(members, previous, (2, 2))
    assert seats(verdict) == "A B"
    assert isinstance(verdict, Decision)
    assert verdict.round.number == number


@pytest.mark.parametrize("record", [a_round("A B", closed="done"), replace(NO_ROUND, closed="done")])
def test_a_closed_run_stays_closed(record: Round) -> None:
    assert waits(judge(all_ask("A B C", after=1), record), None)
    verdict = judge(all_ask("A B C", after=1), record, vanished=True)
    assert isinstance(verdict, Decision)
    assert (verdict.round.closed, verdict.round.number) == ("done", record.number)


@pytest.mark.parametrize("record", [RUNNING, recalled("A B")])
def test_a_record_that_vanished_is_written_again_as_a_recall(record: Round) -> None:
    assert is_recall(judge(all_ask("A B"), record, vanished=True), record, "vanished")


# -- whatever the situation -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    situation: Situation
    options: Options
    now: float

    @property
    def verdict(self) -> Verdict:
        return decide(self.situation, self.options, self.now)


times = st.integers(-60, 0).map(float)
limits = st.tuples(st.integers(1, 6), st.integers(1, 6)).map(sorted)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    nodes = draw(st.permutations("ABCDEF"))
    low, high = draw(limits)
    names = [node + draw(st.sampled_from(["", "'"])) for node in nodes[: draw(st.integers(0, 6))]]
    members = [asks(name, draw(st.integers(0, 4)), draw(times)) for name in names]
    before = draw(st.permutations("ABCDEF"))[: draw(st.integers(1, high))]
    why = {"recalled": draw(st.sampled_from(["", "gone"])), "closed": draw(st.sampled_from(["", "", "", "done"]))}
    previous = draw(st.none() | st.just(a_round(" ".join(before), draw(st.integers(1, 4)), **why)))
    vanished = previous is not None and draw(st.integers(0, 9)) == 0
    chosen = options(low, high, recall_on_loss=draw(st.booleans()))
    return Case(Situation(members, draw(times), previous, draw(times), vanished), chosen, 0.0)


@given(cases())
def test_a_verdict_depends_on_the_arguments_only(case: Case) -> None:
    assert case.verdict == case.verdict


@given(cases(), st.integers(-(2**20), 2**20).map(float))
def test_only_time_differences_matter(case: Case, shift: float) -> None:
    s = case.situation
    members = [replace(member, seen=member.seen + shift) for member in s.members]
    there = replace(s, members=members, changed_at=s.changed_at + shift, previous_at=s.previous_at + shift)
    verdict, moved = case.verdict, decide(there, case.options, case.now + shift)
    if isinstance(moved, Waiting) and moved.until is not None:
        moved = replace(moved, until=moved.until - shift)
    assert moved == verdict


@given(cases())
def test_at_the_time_that_was_named_there_is_a_decision(case: Case) -> None:
    verdict = case.verdict
    if isinstance(verdict, Waiting) and verdict.until is not None:
        assert verdict.until > case.now
        assert isinstance(decide(case.situation, case.options, verdict.until), Decision)


@given(cases(), st.integers(0, 100).map(float))
def test_a_decision_does_not_expire(case: Case, later: float) -> None:
    if isinstance(case.verdict, Decision):
        assert decide(case.situation, case.options, case.now + later) == case.verdict


@given(cases())
def test_a_new_round_is_sound(case: Case) -> None:
    verdict, before = case.verdict, case.situation.previous
    if not isinstance(verdict, Decision) or verdict.round.recalled:
        return
    new, members = verdict.round, {member.id: member for member in case.situation.members}
    chosen = [seat.member for seat in new.seats]
    assert len(set(chosen)) == len(chosen)
    assert case.options.min_nodes <= len(chosen) <= case.options.max_nodes
    assert all(seat == Seat(seat.member, (m := members[seat.member]).ask.node, m.ask.host) for seat in new.seats)
    assert new.number > max([before.number if before else 0, *(member.ask.after for member in members.values())])
    assert (new.address, new.port) == (members[chosen[0]].ask.address, members[chosen[0]].ask.port)
    assert before is None or (before.recalled and not before.closed)


@given(cases())
def test_survivors_keep_their_ranks(case: Case) -> None:
    verdict, before = case.verdict, case.situation.previous
    if not isinstance(verdict, Decision) or verdict.round.recalled or before is None:
        return
    old, new = ([seat.node for seat in record.seats] for record in (before, verdict.round))
    survivors = [node for node in old if node in new]
    assert new[0] in survivors or not survivors
    assert all(new[rank] == node for rank, node in enumerate(old) if node in survivors[1:] and 0 < rank < len(new))


@given(cases())
def test_a_recall_has_a_cause_and_changes_no_membership(case: Case) -> None:
    verdict, before, s = case.verdict, case.situation.previous, case.situation
    if not isinstance(verdict, Decision) or not verdict.round.recalled:
        return
    assert before is not None
    assert verdict.round == replace(before, recalled=verdict.round.recalled, waiting=verdict.round.waiting)
    at_work = [m for m in s.members if before.rank_of(m.id) is not None and m.ask.after < before.number]
    assert s.vanished or not (before.recalled or before.closed)
    assert s.vanished or len(at_work) < len(before.seats) or len(before.seats) < case.options.max_nodes
