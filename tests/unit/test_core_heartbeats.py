"""What a change of a heartbeat's key means."""

from __future__ import annotations

import pytest

from ftcoord.core.layout import heartbeat_key
from ftcoord.errors import StateError
from ftcoord.heartbeat import Beat, HeartbeatEvent, Roll, encode, parse_beat


def test_a_record_comes_back() -> None:
    beat = Beat("a", '{"x":1}')
    key = heartbeat_key("/run", "a", 0xAB)
    assert key == "/run/heartbeats/a/00000000000000ab"
    assert parse_beat(key, encode(beat)) == beat
    with pytest.raises(StateError, match="no JSON"):
        parse_beat(key, encode(Beat("a", "{")))


def test_one_comes_changes_and_goes() -> None:
    roll = Roll()
    assert roll.note("a/1", 5, Beat("a", "1")) == HeartbeatEvent("joined", "a", 1)
    assert roll.note("a/1", 5, Beat("a", "1")) is None
    assert roll.note("a/1", 5, Beat("a", "2")) == HeartbeatEvent("updated", "a", 2)
    assert roll.drop("a/1", "a") == HeartbeatEvent("lost", "a", 2, "expired")
    assert roll.drop("a/1", "a") is None
    assert roll.note("a/1", 9, Beat("a", "3")) == HeartbeatEvent("joined", "a", 3)


def test_one_that_leaves_is_lost_once() -> None:
    roll = Roll()
    roll.note("a/1", 5, Beat("a", "1"))
    assert roll.note("a/1", 5, Beat("a", "1", left=True)) == HeartbeatEvent("lost", "a", 1, "left")
    assert roll.drop("a/1", "a") is None
    assert roll.note("b/1", 6, Beat("b", "1", left=True)) is None


def test_the_newest_alone_counts() -> None:
    """A process that was started again lives beside the lease of the one that was killed."""
    roll = Roll()
    roll.note("a/1", 5, Beat("a", "1"))
    assert roll.note("a/2", 6, Beat("a", "2")) == HeartbeatEvent("updated", "a", 2)
    assert roll.note("a/1", 5, Beat("a", "old")) is None
    assert roll.note("a/1", 5, Beat("a", "old", left=True)) is None
    assert roll.note("a/2", 6, Beat("a", "2", left=True)) == HeartbeatEvent("lost", "a", 2, "left")
    assert roll.drop("a/1", "a") is None
    assert roll.note("a/3", 7, Beat("a", "3")) == HeartbeatEvent("joined", "a", 3)
    assert roll.drop("a/3", "a") == HeartbeatEvent("lost", "a", 3, "expired")
