"""What the history says of nodes without a seat, and how seldom."""

from __future__ import annotations

from dataclasses import replace

import builders

from ftcoord.core.bystanders import LONGEST_PAUSE, LOOK_INTERVAL, TELL_AFTER, Bystanders
from ftcoord.core.event_records import HistoryEvent
from ftcoord.core.rendezvous_records import Round, Seat
from ftcoord.core.round_situation import RoundCandidate, RoundSituation

RUNNING = builders.round_(
    3, (Seat("A", "A", "hostA"), Seat("B", "B", "hostB")), address="a", port=1, ready=True, limits=(1, 2)
)


def node(name: str, limits: tuple[int, int] = (1, 2)) -> RoundCandidate:
    return RoundCandidate(name, builders.ask(name, address=name, limits=limits), 0.0)


def situation(names: str, previous: Round | None = RUNNING, *more: RoundCandidate) -> RoundSituation:
    return RoundSituation([*map(node, names), *more], 0.0, previous, 0.0)


def told(events: list[HistoryEvent]) -> list[tuple[str, int, str, str]]:
    return [(one.kind, one.number, one.who, one.reason) for one in events]


def test_a_spare_is_told_of_once_and_not_at_once() -> None:
    by = Bystanders()
    assert by.look(situation("ABC"), 100.0) == ([], 100.0 + TELL_AFTER)
    events, again = by.look(situation("ABC"), 100.0 + TELL_AFTER)
    assert told(events) == [("waiting", 3, "hostC", "hostC waits as a spare: the round has all of its 2 nodes")]
    assert again is None
    assert by.look(situation("ABC"), 900.0) == ([], None)


def test_who_is_in_the_next_round_a_moment_later_is_not_told_of() -> None:
    by = Bystanders()
    by.look(situation("AB", None), 100.0)
    assert by.look(situation("AB"), 101.0) == ([], None)


def test_who_comes_back_is_told_of_again() -> None:
    by = Bystanders()
    for now in (100.0, 106.0):
        by.look(situation("ABC"), now)
    by.look(situation("AB"), 200.0)
    by.look(situation("ABC"), 300.0)
    assert len(by.look(situation("ABC"), 306.0)[0]) == 1


def test_nodes_that_contradict_the_run_are_told_of() -> None:
    by = Bystanders()
    there = situation("AB", RUNNING, node("X", (4, 4)), node("Y", (4, 4)))
    assert told(by.look(there, 100.0)[0]) == [  # at once: they end soon
        (
            "refused",
            3,
            "",
            "of 2 nodes (hostX, hostY) each was refused: its --nnodes is 4, this run's is 1:2",
        )
    ]


def test_a_refused_node_makes_nobody_told_of_who_has_just_come() -> None:
    by = Bystanders()
    there = situation("ABC", RUNNING, node("X", (4, 4)))
    events, again = by.look(there, 100.0)
    assert ([one.kind for one in events], again) == (["refused"], 100.0 + TELL_AFTER)
    assert [one.who for one in by.look(there, 105.0)[0]] == ["hostC"]


def test_a_refused_node_is_told_of_at_once_though_another_was_just_told_to_wait() -> None:
    by = Bystanders()
    by.look(situation("ABC"), 100.0)
    assert len(by.look(situation("ABC"), 105.0)[0]) == 1
    assert [one.kind for one in by.look(situation("ABC", RUNNING, node("X", (4, 4))), 106.0)[0]] == ["refused"]


def test_a_decider_to_which_thousands_come_looks_once_a_second() -> None:
    by = Bystanders()
    by.look(situation("AB"), 100.0)
    assert by.look(situation("ABC"), 100.5) == ([], 100.0 + LOOK_INTERVAL), "and no later than that"
    assert by.look(situation("ABC"), 101.0) == ([], 101.0 + TELL_AFTER)


def test_thousands_that_come_over_hours_leave_few_events() -> None:
    by = Bystanders()
    there, events, now = [node("A", (5000, 5000))], 0, 100.0
    while len(there) < 800:
        now += 4.0
        there.append(node(f"n{len(there)}", (5000, 5000)))
        events += len(by.look(RoundSituation(there, now, None, 0.0), now)[0])
    assert 5 < events < 30, f"in {now / 3600:.1f} hours"
    assert now > LONGEST_PAUSE


def test_of_a_run_that_is_over_nobody_is_told() -> None:
    by = Bystanders()
    over = replace(RUNNING, closed="hostA failed", outcome="failed")
    by.look(situation("ABC", over), 100.0)
    assert by.look(situation("ABC", over), 200.0) == ([], None)
