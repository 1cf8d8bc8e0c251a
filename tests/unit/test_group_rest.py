"""How long a decider takes in what happens before it decides again."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ftcoord.primitives.group.group import REST, rest


def test_a_small_group_rests_for_a_moment() -> None:
    assert rest(64) == pytest.approx(64 * REST) == pytest.approx(0.32e-3)


def test_of_a_large_group_deciding_takes_less_of_the_time_the_larger_it_is() -> None:
    """Deciding takes as long as the members are many: a rest that grows only so leaves it the same part."""
    a_member = [rest(size) / size for size in (1000, 2000, 4000, 10_000)]
    assert all(more > less for less, more in pairwise(a_member))
    assert rest(4000) == pytest.approx(0.08), "far less than it takes until so many have come"
