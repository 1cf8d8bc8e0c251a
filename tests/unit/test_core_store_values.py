"""Values come back as they were given, and a counter is what its adders added."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ftcoord.core.store_values import counter, counts_by, plain, stored

MARK = b"\0ftcoord"
values = st.binary() | st.binary().map(lambda tail: MARK + tail) | st.sampled_from([MARK + b"+1:1", MARK + b"=x", b"7"])
numbers = st.integers(-(2**70), 2**70)
versions = st.integers(1, 2**40)


@given(values, versions)
def test_a_value_comes_back_at_any_version(value: bytes, version: int) -> None:
    assert plain(stored(value), version) == value
    assert not counts_by(stored(value), 1)


@given(values)
def test_different_values_lie_differently(value: bytes) -> None:
    assert stored(value + b"x") != stored(value)
    assert stored(value) == value or value.startswith(MARK)


@given(numbers, numbers, versions, st.integers(0, 1000))
def test_a_counter_grows_by_its_step_with_each_put(step: int, number: int, version: int, puts: int) -> None:
    made = counter(step, number, version)
    assert plain(made, version + puts) == b"%d" % (number + step * puts)
    assert counts_by(made, step)
    assert not counts_by(made, step + 1)


def test_a_new_counter_holds_what_was_added_first() -> None:
    assert plain(counter(-3, 0, 0), 1) == b"-3"
