"""When a waiter looks for itself: soon, seldom, and one after the other."""

from __future__ import annotations

import random

import pytest

from ftcoord.core.takeover import FIRST_LOOK_DELAY, LONGEST_LOOK_DELAY, SLOT, Looking, look_delay, stagger

SIZES = (2, 8, 64, 1000)


def looks(seats: int, seconds: float, seed: int = 1) -> list[float]:
    """The times of all looks of so many waiters that ask at 0, and find nothing to decide."""
    chance = random.Random(seed).random
    times = []
    for _ in range(seats):
        looking = Looking.begin(0.0, seats, chance())
        while looking.due < seconds:
            times.append(looking.due)
            looking = looking.looked(looking.due, seats, chance()).told(None)
    return sorted(times)


@pytest.mark.parametrize("seats", SIZES)
def test_the_first_of_all_waiters_looks_soon(seats: int) -> None:
    first = [looks(seats, 10.0, seed)[0] for seed in range(20)]
    assert min(first) >= FIRST_LOOK_DELAY
    assert sorted(first)[len(first) // 2] < FIRST_LOOK_DELAY + 2 * stagger(seats) / seats


@pytest.mark.parametrize("seats", SIZES)
def test_a_job_looks_about_once_in_a_slot(seats: int) -> None:
    slot = stagger(seats) / seats
    assert slot >= SLOT
    seconds = 600.0
    steady = [at for at in looks(seats, seconds) if at > seconds / 2]
    # Each waits for half of the stagger on average: so two looks in a slot are the most.
    assert len(steady) <= (seconds / 2) * min(2 / slot, seats / LONGEST_LOOK_DELAY) * 1.1
    assert len(steady) >= (seconds / 2) / (LONGEST_LOOK_DELAY + stagger(seats)), "somebody does look"


def test_a_waiter_looks_less_and_less_often() -> None:
    times = [look_delay(attempt) for attempt in range(2000)]
    assert times[:4] == [FIRST_LOOK_DELAY, 2 * FIRST_LOOK_DELAY, 4 * FIRST_LOOK_DELAY, 8 * FIRST_LOOK_DELAY]
    assert times[4:] == [LONGEST_LOOK_DELAY] * 1996


def test_a_time_that_a_look_told_is_met() -> None:
    looking = Looking.begin(0.0, 2, 0.5)
    looked = looking.looked(looking.due, 2, 0.5)
    for until in (
        looked.since + FIRST_LOOK_DELAY,
        (looked.since + looked.at) / 2,
        looked.at,
        looked.at + FIRST_LOOK_DELAY / 2,
    ):
        assert looked.told(until).due == max(until, looked.since + FIRST_LOOK_DELAY), (
            "before the next look, or in its place"
        )
    assert looked.told(looked.at + 10).due == looked.at, "there are looks before that"


def test_a_look_after_the_other_is_not_too_soon() -> None:
    looking = Looking.begin(0.0, 64, 0.9)
    for _ in range(20):
        before, gap = looking.due, look_delay(max(looking.attempt, 0))
        looking = looking.looked(before, 64, 0.0).told(before + 0.001)
        assert looking.due - before >= gap - 1e-9


@pytest.mark.parametrize("until", [None, -1.0, 0.0])
def test_a_time_that_is_over_changes_nothing(until: float | None) -> None:
    looking = Looking.begin(0.0, 8, 0.5)
    assert looking.told(until).due == looking.at


def test_a_long_wait_ends_at_the_time_that_was_told() -> None:
    """Such as a join time-out of a minute."""
    looking, chance = Looking.begin(0.0, 2, 0.3), random.Random(3).random
    while looking.due < 60.0:
        looking = looking.looked(looking.due, 2, chance()).told(60.0)
    assert looking.due == 60.0
