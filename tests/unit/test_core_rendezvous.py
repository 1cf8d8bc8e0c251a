"""The decisions of a rendezvous: who is in the next round, when, and at which rank.

Members are written as they are spoken of: `B` is node B's first incarnation, `B'` the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import builders
import pytest
from hypothesis import given, strategies as st
from invariants import check_round

from ftcoord.core.history import note_ends
from ftcoord.core.rendezvous import (
    FRESH,
    MOMENT,
    RULES,
    SAY_AGAIN,
    SEATING,
    SEATS,
    RoundCandidate,
    RoundOptions,
    RoundSituation,
    call_back,
    decide,
    may_reopen,
    outlook,
    seating_time,
    unhurried,
    vacant,
)
from ftcoord.core.rendezvous_records import (
    CLOSED,
    FAILED,
    FINISHED,
    NO_ROUND,
    Away,
    JoinRequest,
    Round,
    Seat,
    WorkerFailure,
)
from ftcoord.core.verdict import Publish, Standing, Verdict, Wait

LAST_CALL, SETTLE, RETURN = 30.0, 1.0, 45.0
AGO = -1000.0
"""Long before now; all times here are relative to now."""
PORTS = {node: 1000 + number for number, node in enumerate("ABCDEFGH")}


EXITED = WorkerFailure(7, exit_code=1, fate="exited with code 1")


def asks(name: str, after: int = 0, seen: float = 0.0, **more: Any) -> RoundCandidate:
    """A member; `judge` has it want the limits of the test, if it is not said here what it wants."""
    node = name[0]
    ask = builders.ask(
        node, address=f"{node}.example", port=PORTS[node], after=after, nonce=f"{name}/{after}", limits=NO_ROUND.limits
    )
    return RoundCandidate(name, replace(ask, **more), seen)


def all_ask(names: str, after: int = 0, seen: float = 0.0) -> list[RoundCandidate]:
    return [asks(name, after, seen) for name in names.split()]


def a_round(names: str, number: int = 1, **more: Any) -> Round:
    seats = tuple(Seat(name, name[0], f"host{name[0]}") for name in names.split())
    first = names[0]
    return replace(builders.round_(number, seats, address=f"{first}.example", port=PORTS[first], ready=True), **more)


def recalled(names: str, number: int = 1) -> Round:
    return a_round(names, number, recalled="somebody is gone")


def within(limits: tuple[int, int], record: Any) -> Any:
    """A record with these limits, unless it has some."""
    return record if record.limits != NO_ROUND.limits else replace(record, min_nodes=limits[0], max_nodes=limits[1])


def asks_of(members: Sequence[RoundCandidate]) -> list[tuple[JoinRequest, int]]:
    return [(one.ask, one.revision) for one in members]


def situation(
    members: Sequence[RoundCandidate], changed_at: float, previous: Round | None, limits: tuple[int, int], *more: Any
) -> RoundSituation:
    """All that is there, where nothing else is said with these limits."""
    there = [replace(member, ask=within(limits, member.ask)) for member in members]
    previous = previous and within(limits, previous)
    ends = note_ends({}, previous, asks_of(there), ()).values() if previous else ()
    return replace(RoundSituation(there, changed_at, previous, *more), ends=tuple(ends))


def judge(
    members: Sequence[RoundCandidate],
    previous: Round | None = None,
    limits: tuple[int, int] = (2, 3),
    *,
    changed_at: float = 0.0,
    previous_at: float = AGO,
    **more: Any,
) -> Verdict:
    options = replace(RoundOptions(LAST_CALL, SETTLE), **more)
    there = situation(members, changed_at, previous, limits, previous_at)
    verdict = decide(there, options, 0.0)
    assert verdict.rule in RULES
    if isinstance(verdict, Publish):
        check_round(there, verdict.record)
    return verdict


def seats(verdict: Verdict) -> str:
    """The members of a new round, in rank order."""
    assert isinstance(verdict, Publish), verdict
    assert not verdict.record.recalled, verdict
    return " ".join(seat.member for seat in verdict.record.seats)


def is_recall(verdict: Verdict, previous: Round, why: str, waiting: int = 0) -> bool:
    """A recall says so in the record, and changes nothing else in it."""
    assert isinstance(verdict, Publish), verdict
    assert why in verdict.record.recalled
    assert verdict.record.recalled in verdict.reason
    before = within(verdict.record.limits, previous)
    return verdict.record == replace(before, recalled=verdict.record.recalled, waiting=waiting)


def waits(verdict: Verdict, until: float | None) -> bool:
    assert isinstance(verdict, Wait), verdict
    return verdict.until == until and bool(verdict.reason)


# -- the first round --------------------------------------------------------------------------------------------


def test_too_few_wait_for_others_without_a_limit() -> None:
    assert waits(judge([], limits=(1, 3)), None)
    assert waits(judge(all_ask("A", seen=AGO)), None)


@pytest.mark.parametrize("names", ["A", "A B", "A B C"])
def test_a_full_round_is_decided_at_once(names: str) -> None:
    nodes = len(names.split())
    decided = within((1, nodes), a_round(names, ready=False, token=""))
    on = "1 node" if nodes == 1 else f"{nodes} nodes"
    assert judge(all_ask(names), limits=(1, nodes)) == Publish(decided, f"round 1 on {on}", "R4 forming")


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


def test_a_new_incarnation_that_asks_recalls() -> None:
    assert is_recall(judge([asks("B"), asks("A'", after=1)], RUNNING, (2, 2)), RUNNING, "hostA came back for a new")


# -- a recalled round -------------------------------------------------------------------------------------------


def test_all_back_and_full_goes_on_at_once() -> None:
    verdict = judge(all_ask("A B", after=1), recalled("A B"), (2, 2))
    assert isinstance(verdict, Publish)
    assert verdict.record == within((2, 2), a_round("A B", 2, ready=False, before="somebody is gone", token=""))


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
    assert waits(judge(members, recalled("A B"), (2, 2)), RETURN)
    members[0] = asks("A", after=1)
    assert seats(judge(members, recalled("A B"), (2, 2))) == "A B"


def test_the_last_call_ends_without_those_that_did_not_come_back() -> None:
    members = [asks("A"), asks("B", after=1, seen=-RETURN), asks("C", seen=AGO)]
    assert seats(judge(members, recalled("A B"), previous_at=-RETURN)) == "B C"


def test_workers_that_torch_had_to_kill_are_back_in_time() -> None:
    """With the defaults: torch kills them 30 s after the recall, which is when the last call for newcomers ends."""
    members = [asks("A"), asks("B", after=1, seen=-30.0)]
    assert waits(judge(members, recalled("A B"), (1, 2), previous_at=-30.0, changed_at=-30.0), 15.0)
    members[0] = asks("A", after=1)
    assert seats(judge(members, recalled("A B"), (1, 2), previous_at=-30.5)) == "A B"


def test_who_missed_the_last_call_has_no_seat_before_it_asks_again() -> None:
    hangs, back = asks("A"), asks("B", after=1, seen=-RETURN)
    without = judge([hangs, back], recalled("A B"), (1, 2), previous_at=-RETURN)
    assert seats(without) == "B"
    assert isinstance(without, Publish)
    runs, seated = replace(without.record, ready=True), asks("B", after=1, seated=2)
    assert waits(judge([hangs, seated], runs, (1, 2), previous_at=0.0), None)

    again = judge([asks("A", after=1), seated], runs, (1, 2), previous_at=0.0)
    assert is_recall(again, runs, "hostA waits to join", waiting=1)


def test_a_spare_of_hours_does_not_shorten_the_last_call() -> None:
    members = [*all_ask("A B"), asks("C", after=1, seen=-2.0), *all_ask("D E", seen=AGO)]
    assert waits(judge(members, recalled("A B C"), previous_at=-3.0), RETURN - 3.0)


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
def test_numbers_grow(members: list[RoundCandidate], previous: Round | None, number: int) -> None:
    verdict = judge(members, previous, (2, 2))
    assert seats(verdict) == "A B"
    assert isinstance(verdict, Publish)
    assert verdict.record.number == number


@pytest.mark.parametrize("record", [a_round("A B", closed="done"), builders.round_(0, closed="done")])
def test_a_closed_run_stays_closed(record: Round) -> None:
    assert waits(judge(all_ask("A B C", after=1), record), None)


REOPENED = a_round("A B", 4, closed="hostB failed", outcome=FAILED)


def test_a_failed_run_is_gone_on_from_when_nobody_of_it_is_left() -> None:
    new = [asks(name, after=4, reopens=4) for name in "CD"]
    verdict = judge(new, REOPENED, (2, 2))
    assert seats(verdict) == "C D"
    assert isinstance(verdict, Publish)
    assert (verdict.record.number, verdict.record.before, verdict.record.closed) == (5, "hostB failed", "")
    assert waits(judge([asks("A"), *new], REOPENED, (2, 2)), None)


def test_only_those_that_have_seen_the_end_go_on_from_it() -> None:
    assert waits(judge(all_ask("C D"), REOPENED, (2, 2)), None)
    assert waits(judge([asks("C", reopens=4), asks("D", reopens=3)], REOPENED, (2, 2)), None)
    assert waits(judge([asks("C", reopens=4), asks("D", reopens=4)], REOPENED, (3, 3)), None)


@pytest.mark.parametrize(
    ("outcome", "restart", "goes_on"),
    [
        (FAILED, "failed", True),
        (FAILED, "never", False),
        (FINISHED, "failed", False),
        (FINISHED, "always", True),
        (CLOSED, "failed", False),
        (CLOSED, "always", True),
    ],
)
def test_which_runs_may_be_gone_on_from(outcome: str, restart: str, goes_on: bool) -> None:
    record = replace(REOPENED, outcome=outcome)
    assert may_reopen(record, restart) is goes_on  # type: ignore[arg-type]
    verdict = judge([asks(name, reopens=4) for name in "CD"], record, (2, 2), restart=restart)
    assert isinstance(verdict, Publish) is goes_on


# -- limits -----------------------------------------------------------------------------------------------------


def test_who_wants_other_limits_is_told_and_disturbs_nobody() -> None:
    odd = within((3, 3), asks("C").ask)
    there = [*all_ask("A B"), replace(asks("C"), ask=odd)]
    told = judge(there, None, (2, 2))
    assert isinstance(told, Publish)
    assert told.record == builders.round_(0, address="", port=0, limits=(2, 2))
    assert seats(judge(there, told.record, (2, 2))) == "A B"
    assert waits(judge(there, RUNNING, (2, 2)), None)
    assert outlook(told.record, "C", odd).standing is Standing.REFUSED


def test_the_oldest_member_says_what_the_limits_are() -> None:
    there = [replace(asks("C"), ask=within((3, 3), asks("C").ask)), *all_ask("A B")]
    told = judge(there, None, (2, 2))
    assert isinstance(told, Publish)
    assert told.record.limits == (3, 3)


def test_limits_that_nobody_alive_shares_bind_nobody() -> None:
    new = [asks("C"), asks("D")]
    told = judge(new, within((2, 3), RUNNING), (2, 2))
    assert isinstance(told, Publish)
    assert told.record == replace(within((2, 3), RUNNING), max_nodes=2)
    assert is_recall(judge(new, told.record, (2, 2)), told.record, "is gone", waiting=2)
    forms = judge(new, recalled("A B"), (2, 2))
    assert seats(forms) == "C D"
    assert isinstance(forms, Publish)
    assert forms.record.limits == (2, 2)


# -- taking seats -----------------------------------------------------------------------------------------------

DECIDED = a_round("A B", ready=False)


def test_a_round_is_not_ready_before_all_have_taken_their_seats() -> None:
    one = [asks("A", seated=1), asks("B")]
    assert waits(judge(one, DECIDED, (2, 2), previous_at=-1.0), LAST_CALL - 1.0)
    verdict = judge([asks("A", seated=1), asks("B", seated=1)], DECIDED, (2, 2))
    assert isinstance(verdict, Publish)
    assert verdict.record == within((2, 2), replace(DECIDED, ready=True))


def test_seats_that_are_not_taken_recall_the_round() -> None:
    one = [asks("A", seated=1), asks("B")]
    assert is_recall(judge(one, DECIDED, (2, 2), previous_at=-LAST_CALL), DECIDED, "hostB did not take its seat")


def test_a_short_last_call_leaves_time_to_take_seats() -> None:
    """Else a large round would be recalled and decided again and again."""
    one = [asks("A", seated=1), asks("B")]
    assert waits(judge(one, DECIDED, (2, 2), previous_at=-1.0, last_call_timeout=0.001), SEATING - 1.0)


@pytest.mark.parametrize("last_call", [LAST_CALL, 0.001])
@pytest.mark.parametrize(("size", "seconds"), [(2, 0.0), (64, 0.0), (500, 10.0), (4000, 80.0)])
def test_a_large_round_has_longer_to_take_its_seats(size: int, seconds: float, last_call: float) -> None:
    """Where etcd and the nodes share two cores, 4,000 take longer than any constant, and then would again and again."""
    assert seating_time(size, last_call) == max(last_call, SEATING, seconds)
    names = [f"m{number}" for number in range(size)]
    there = [replace(asks("A", seated=number > 0, node=name), id=name) for number, name in enumerate(names)]
    decided = replace(DECIDED, size=size, seats=tuple(Seat(name, name, "hostA") for name in names))
    limits, until = (size, size), seating_time(size, last_call)
    early = judge(there, decided, limits, previous_at=0.1 - until, last_call_timeout=last_call)
    assert isinstance(early, Wait)
    assert early.until == pytest.approx(0.1)
    late = judge(there, decided, limits, previous_at=-until, last_call_timeout=last_call)
    assert isinstance(late, Publish)
    assert late.record.recalled


@pytest.mark.parametrize("size", [1, 64, 125, 126, 1000, 4000, 10_000])
def test_however_large_a_round_its_seats_are_said_again_125_times_a_second(size: int) -> None:
    again = SAY_AGAIN * unhurried(size, 0.0)
    assert size / again <= 125.0
    assert (again == SAY_AGAIN) == (size <= 125), "of small rounds nothing changes"
    assert unhurried(size, 60.0) >= 10.0, "slow, whatever the size"


def test_who_took_its_seat_a_while_ago_may_be_dead() -> None:
    """Its lease would live on for longer; who lives says so again."""
    long_ago = [asks("A", seated=1, seen=-FRESH), asks("B", seated=1)]
    assert waits(judge(long_ago, DECIDED, (2, 2), previous_at=-4.0), LAST_CALL - 4.0)
    just_now = [asks("A", seated=1, seen=-FRESH + 0.1), asks("B", seated=1)]
    assert isinstance(judge(just_now, DECIDED, (2, 2), previous_at=-4.0), Publish)


def test_where_taking_seats_is_slow_a_seat_counts_for_longer() -> None:
    """Who repeats it every second where etcd takes ten for all of them is never done."""
    early = [asks("A", seated=1, seen=-FRESH * 2), asks("B", seated=1)]
    assert isinstance(judge(early, DECIDED, (2, 2), previous_at=-FRESH * 5), Publish), "in the second half of the time"
    assert waits(judge(early, DECIDED, (2, 2), previous_at=-FRESH * 3.9), LAST_CALL - FRESH * 3.9)


def test_a_seat_that_was_read_may_have_been_taken_long_ago() -> None:
    """Who begins to decide reads it: its member may have died since, and all would start to wait for it."""
    taken = [asks("A", seated=1, seen=-1.0), asks("B", seated=1, seen=-0.5)]

    def ready(read_at: float, decided_at: float) -> bool:
        there = situation(taken, 0.0, DECIDED, (2, 2), decided_at, read_at)
        return isinstance(decide(there, RoundOptions(LAST_CALL), 0.0), Publish)

    assert ready(read_at=-60.0, decided_at=-5.0), "it saw both being taken"
    assert not ready(read_at=-0.5, decided_at=-5.0), "it read both"
    assert not ready(read_at=-1.0, decided_at=-5.0), "it read the one, and saw the other being taken"


@pytest.mark.parametrize("recall_on_loss", [True, False])
def test_who_dies_before_it_took_its_seat_recalls_the_round(recall_on_loss: bool) -> None:
    """Nobody has started: without a recall the others would wait for it in torch's rank assignment."""
    verdict = judge([asks("A", seated=1)], DECIDED, (1, 2), recall_on_loss=recall_on_loss)
    assert is_recall(verdict, DECIDED, "hostB is gone")


def test_a_recall_leaves_a_round_ready() -> None:
    """Who hears late of a round that others have started starts it too."""
    late = asks("A", seated=1)
    recall = judge([late, asks("B", seated=1), asks("C")], RUNNING)
    assert isinstance(recall, Publish)
    assert recall.record.ready
    assert outlook(recall.record, "A", within((2, 3), late.ask)).standing is Standing.ANSWERED


def test_the_reason_of_who_left_is_in_the_recall() -> None:
    previous = a_round("A B")
    verdict = judge_lost([asks("A", seated=1)], previous, deaths={"B": "hostB was stopped by SIGTERM"})
    assert is_recall(verdict, previous, "hostB was stopped by SIGTERM")


def test_who_was_evicted_has_lost_its_seat_though_it_takes_another_lease() -> None:
    previous = a_round("A B")
    there = [asks("A", seated=1), back_in_seat("B'")]
    assert is_recall(judge_lost(there, previous, deaths={"B": "hostB was evicted"}), previous, "hostB was evicted")


def test_of_two_incarnations_of_one_node_the_newer_counts() -> None:
    assert seats(judge([asks("A", after=1), asks("B", after=1), asks("A'", after=1)], recalled("A B"), (2, 2))) == (
        "A' B"
    )
    assert waits(judge([asks("A"), asks("A'")], None, (2, 2)), None)
    assert is_recall(judge([asks("A"), asks("B"), asks("A'")], RUNNING, (2, 2)), RUNNING, "hostA came back for a new")


# -- the member's half ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "ask", "look"),
    [
        pytest.param(None, {}, Standing.PENDING, id="nothing was decided"),
        pytest.param(DECIDED, {}, Standing.SEATED, id="it has a seat"),
        pytest.param(DECIDED, {"seated": 1}, Standing.PENDING, id="it has taken it, others have not"),
        pytest.param(RUNNING, {"seated": 1}, Standing.ANSWERED, id="all have"),
        pytest.param(
            replace(RUNNING, recalled="x"), {"seated": 1}, Standing.ANSWERED, id="all have, and it hears late"
        ),
        pytest.param(replace(DECIDED, recalled="x"), {"seated": 1}, Standing.MISSED, id="not all did"),
        pytest.param(DECIDED, {"after": 1}, Standing.PENDING, id="it has a seat, and wants a later one"),
        pytest.param(a_round("B C"), {}, Standing.SPARE, id="others run"),
        pytest.param(recalled("B C"), {}, Standing.PENDING, id="others come back"),
        pytest.param(a_round("B", 2, away=(Away("A", 1),)), {}, Standing.MISSED, id="they went on without it"),
        pytest.param(REOPENED, {}, Standing.CLOSED, id="the run is over"),
        pytest.param(REOPENED, {"reopens": 4}, Standing.PENDING, id="it goes on from there"),
        pytest.param(
            within((9, 9), REOPENED), {"reopens": 4}, Standing.PENDING, id="it goes on from there with other limits"
        ),
        pytest.param(RUNNING, {"min_nodes": 9, "max_nodes": 9}, Standing.REFUSED, id="other limits"),
    ],
)
def test_outlook(record: Round | None, ask: dict[str, Any], look: Standing) -> None:
    mine = within((1, 2), asks("A", **{name: value for name, value in ask.items() if name != "after"}).ask)
    mine = replace(mine, after=ask.get("after", 0))
    assert outlook(record and within((1, 2), record), "A", mine).standing is look


@pytest.mark.parametrize(
    ("record", "called", "why"),
    [
        pytest.param(RUNNING, 0, "", id="it runs"),
        pytest.param(replace(RUNNING, recalled="C waits", waiting=2), 2, "C waits", id="a recall"),
        pytest.param(replace(RUNNING, closed="A finished", outcome=FINISHED), 0, "", id="others are done"),
        pytest.param(replace(RUNNING, closed="A failed", outcome=FAILED), 1, "A failed", id="a failure"),
        pytest.param(replace(RUNNING, closed="by hand", outcome=CLOSED), 1, "by hand", id="by hand"),
        pytest.param(a_round("A", 2), 1, "round 2 was formed without", id="they went on without it"),
        pytest.param(
            replace(a_round("A", 2), closed="A finished", outcome=FINISHED),
            1,
            "A finished",
            id="without it they are done",
        ),
        pytest.param(
            a_round("A B", token="f" * 16),
            1,
            "round 1 was formed without",
            id="etcd lost it, and gave its number again",
        ),
        pytest.param(a_round("A B", 0), 1, "etcd has lost", id="etcd has an older one"),
        pytest.param(None, 1, "etcd has lost", id="etcd has none"),
    ],
)
def test_call_back(record: Round | None, called: int, why: str) -> None:
    count, reason = call_back(record, RUNNING)
    assert count == called
    assert why in reason
    assert bool(reason) is bool(count)


# -- whatever the situation -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    situation: RoundSituation
    options: RoundOptions
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
    others = st.sampled_from([(low, high)] * 3 + [(1, 1), (2, 4)])
    names = [node + draw(st.sampled_from(["", "'"])) for node in nodes[: draw(st.integers(0, 6))]]
    members = []
    for name in names:
        said = {"seated": draw(st.integers(0, 4)), "reopens": draw(st.integers(-1, 4))}
        one = asks(name, draw(st.integers(0, 4)), draw(times), **said)
        members.append(replace(one, ask=within(draw(others), one.ask)))
    before = draw(st.permutations("ABCDEF"))[: draw(st.integers(1, high))]
    why = {
        "recalled": draw(st.sampled_from(["", "gone"])),
        "closed": draw(st.sampled_from(["", "", "", "done"])),
        "outcome": draw(st.sampled_from([FINISHED, FAILED])),
        "ready": draw(st.booleans()),
    }
    stated = within(draw(others), a_round(" ".join(before), draw(st.integers(1, 4)), **why))
    previous = draw(st.none() | st.just(stated))
    restart = draw(st.sampled_from(["failed", "always", "never"]))
    chosen = RoundOptions(LAST_CALL, SETTLE, draw(st.booleans()), restart)
    there = situation(members, draw(times), previous, (low, high), draw(times))
    return Case(there, chosen, 0.0)


@given(cases())
def test_at_the_time_that_was_named_there_is_a_decision(case: Case) -> None:
    verdict = case.verdict
    if isinstance(verdict, Wait) and verdict.until is not None:
        assert verdict.until > case.now
        assert isinstance(decide(case.situation, case.options, verdict.until), Publish)


@given(cases(), st.integers(0, 100).map(float))
def test_a_decision_does_not_expire(case: Case, later: float) -> None:
    """But that a round is ready: a seat counts as taken for a while only (R2), and then has to be taken again."""
    if not isinstance(case.verdict, Publish):
        return
    now = case.now + later
    then = decide(case.situation, case.options, now)
    is_fresh = all(member.seen > now - case.options.fresh for member in case.situation.members)
    if case.verdict.rule != SEATS or is_fresh or then == case.verdict:
        assert then == case.verdict
    elif isinstance(then, Wait):
        assert then.rule == SEATS
    else:
        assert is_recall(then, case.situation.previous, "did not take its seat")


# -- R9 reattaching ---------------------------------------------------------------------------------------------------


def back_in_seat(name: str, number: int = 1, seen: float = 0.0) -> RoundCandidate:
    """Node B's second incarnation, `B'`, which holds the seat of its first."""
    return asks(name, 0, seen, seated=number, holds=name[0])


def judge_lost(members: Sequence[RoundCandidate], previous: Round, ago: float = 1.0, **more: Any) -> Verdict:
    """With 10 s to come back, since the first was gone so long ago."""
    options = replace(RoundOptions(LAST_CALL, SETTLE), return_to_seat=10.0)
    there = replace(situation(members, 0.0, previous, (2, 3), AGO), gone_since=-ago, **more)
    verdict = decide(there, options, 0.0)
    if isinstance(verdict, Publish):
        check_round(there, verdict.record)
    return verdict


def test_all_that_lost_their_leases_come_back_and_nothing_happens() -> None:
    previous = a_round("A B C")
    names = ["A'", "B'", "C'"]
    for count in (1, 2):
        assert waits(judge_lost([back_in_seat(name) for name in names[:count]], previous), 9.0)
    assert waits(judge_lost([back_in_seat(name) for name in names], previous), None)


def test_most_that_are_gone_at_once_have_a_lease_s_time() -> None:
    previous = a_round("A B C")
    alive = [asks("A", seated=1)]
    assert waits(judge_lost(alive, previous), 9.0)
    assert is_recall(judge_lost(alive, previous, ago=10.0), previous, "hostB, hostC is gone (its lease ended)")


def test_one_of_three_that_is_gone_is_lost() -> None:
    previous = a_round("A B C")
    alive = [asks("A", seated=1), asks("B", seated=1)]
    assert waits(judge_lost(alive, previous, ago=0.1), MOMENT - 0.1)
    assert is_recall(judge_lost(alive, previous), previous, "hostC is gone (its lease ended)")


def test_nobody_waits_for_one_of_whom_it_is_known() -> None:
    previous = a_round("A B C")
    alive = [asks("A", seated=1)]
    verdict = judge_lost(alive, previous, deaths={"B": "hostB (pid 7) was killed by signal 9 (SIGKILL)"})
    why = "hostB (pid 7) was killed by signal 9 (SIGKILL); hostC is gone (its lease ended)"
    assert is_recall(verdict, previous, why)


def test_a_host_that_is_lost_long_after_others_took_their_seats_again_is_lost() -> None:
    """Seats that were taken again long ago say nothing of it."""
    previous = a_round("A B C")
    alive = [back_in_seat(name, seen=-60.0) for name in ("A'", "B'")]
    assert waits(judge_lost(alive, previous, ago=0.1), MOMENT - 0.1)
    assert is_recall(judge_lost(alive, previous), previous, "hostC is gone (its lease ended)")
    one_just_now = [back_in_seat("A'", seen=-10.0), alive[1]]
    assert waits(judge_lost(one_just_now, previous), 9.0)


def test_who_only_says_of_its_own_seat_that_a_worker_failed_has_lost_no_lease() -> None:
    previous = a_round("A B C")
    failed = asks("A", seated=1, holds="A", failed=(EXITED,))
    options = replace(RoundOptions(LAST_CALL, SETTLE, recall_on_loss=False), return_to_seat=10.0)
    there = situation([failed, asks("B", seated=1)], 0.0, previous, (2, 3), AGO)
    assert waits(decide(replace(there, gone_since=-0.1), options, 0.0), MOMENT - 0.1)


def test_a_newcomer_waits_while_those_that_lost_their_leases_come_back() -> None:
    """Also where nobody is replaced who is lost: the newcomer's turn comes when they are."""
    previous = a_round("A B C")
    options = replace(RoundOptions(LAST_CALL, SETTLE, recall_on_loss=False), return_to_seat=10.0)
    there = situation([back_in_seat("A'"), asks("D")], 0.0, previous, (2, 3), AGO)
    assert waits(decide(replace(there, gone_since=-1.0), options, 0.0), 9.0)
    verdict = decide(replace(there, gone_since=-10.0), options, 0.0)
    assert is_recall(verdict, previous, "hostD waits to join", 1)


def test_vacant_seats_are_those_that_nobody_has_or_holds() -> None:
    previous = a_round("A B C")
    assert vacant(previous, [asks("A", seated=1), back_in_seat("B'")]) == {"C"}
    assert vacant(previous, [asks("A", seated=1), back_in_seat("B'", number=2)]) == {"B", "C"}


@pytest.mark.parametrize("others", ["A C", "A' C'"])
def test_who_asks_for_another_round_through_another_lease_recalls_its_own_at_once(others: str) -> None:
    """Its worker failed while etcd was away. Nobody waits for it to come back to the seat that it has given up."""
    previous = a_round("A B C")
    seated = [back_in_seat(name) if "'" in name else asks(name, seated=1) for name in others.split()]
    verdict = judge_lost([*seated, asks("B'", 1)], previous, ago=0.0)
    assert is_recall(verdict, previous, "hostB came back for a new round")
    verdict = judge_lost([back_in_seat("B'"), *seated, asks("B*", 1)], previous, ago=0.0)
    assert is_recall(verdict, previous, "hostB came back for a new round"), "its lease before lives still"


@pytest.mark.parametrize(
    "pretender",
    [
        back_in_seat("B'", number=1),  # of another round
        asks("D", seated=2, holds="B"),  # another node
        asks("B'", seated=2, holds="X"),  # no such seat
    ],
)
def test_a_seat_is_held_by_its_own_node_in_its_own_round_only(pretender: RoundCandidate) -> None:
    previous = a_round("A B C", 2)
    alive = [asks("A", seated=2), asks("C", seated=2), pretender]
    assert is_recall(judge_lost(alive, previous), previous, "hostB is gone (its lease ended)")


def test_who_holds_a_seat_is_waited_for_when_the_round_is_recalled() -> None:
    """As any participant that has still to stop its workers; and it is away if it does not come in time."""
    previous = recalled("A B C")
    asking = all_ask("A C", 1, seen=AGO)
    assert waits(judge([*asking, back_in_seat("B'")], previous, changed_at=-5.0, previous_at=-5.0), RETURN - 5.0)
    verdict = judge([*asking, back_in_seat("B'")], previous, changed_at=AGO, previous_at=AGO)
    assert seats(verdict) == "A C"
    assert isinstance(verdict, Publish)
    assert verdict.record.away == (Away("B'", 1),)


def test_who_comes_back_for_a_round_from_a_seat_that_it_holds_keeps_its_rank() -> None:
    verdict = judge([*all_ask("B' A C", 1)], recalled("A B C"))
    assert seats(verdict) == "A B' C"


def test_a_run_is_not_reopened_before_a_holder_of_a_seat_has_left() -> None:
    closed = a_round("A B", closed="it failed", outcome=FAILED)
    new = [asks("C", reopens=1), asks("D", reopens=1)]
    assert waits(judge([back_in_seat("A'"), *new], closed, changed_at=AGO), None)


def test_a_worker_that_failed_recalls_the_round_before_its_node_is_back() -> None:
    previous = a_round("A B C")
    failing = asks("B", seated=1, holds="B", failed=(EXITED,))
    alive = [asks("A", seated=1), failing, asks("C", seated=1)]
    assert is_recall(judge(alive, previous), previous, "hostB: worker 7 exited with code 1")
    assert waits(judge(alive, previous, recall_on_loss=False), None)
    again = judge([*all_ask("A C", 1), failing], recalled("A B C"))
    assert waits(again, RETURN), "its node has still to come back"


def test_who_failed_first_counts_and_not_who_asked_again_last() -> None:
    failure = WorkerFailure(7, exit_code=3, fate="exited with code 3")
    first = builders.ask("a", address="a", host="hosta", seated=1, failed=(failure,), limits=(2, 3))
    again = builders.ask("a", address="a", after=1, host="hosta", failed=(failure,), limits=(2, 3))
    victim = builders.ask("b", address="b", host="hostb", seated=1, failed=(failure,), limits=(2, 3))
    members = [RoundCandidate("a1", again, 0.0, 40), RoundCandidate("b1", victim, 0.0, 20)]
    seats = Seat("a1", "a", "hosta"), Seat("b1", "b", "hostb")
    round_ = builders.round_(1, seats, address="a", port=1, ready=True)
    ends = note_ends(note_ends({}, round_, [(first, 10)], ()), round_, asks_of(members), ())
    assert {end.node: end.noted for end in ends.values()} == {"a": 10, "b": 20}
