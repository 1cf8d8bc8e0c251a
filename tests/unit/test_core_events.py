"""The records of a job's history."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcoord.core.event_records import (
    LONGEST_LINE,
    LONGEST_TRACEBACK,
    HistoryEvent,
    WorkerFailure,
    encode,
    parse_event,
    read_history,
)
from ftcoord.core.layout import event_key, event_revision, events_span
from ftcoord.errors import StateError

PREFIX = "/ftcoord/v1/run"
RAISED = WorkerFailure(7, 3, 1, 1, 0, "exited with code 1", "ValueError: no such file", "Traceback (most recent ...")
FAILED = HistoryEvent("failed", 4, "host7", "node7", "worker 7 ...", (RAISED,), 812, "member", 1_700_000_000_000)
KEY = event_key(PREFIX, 812, "694d8c2b1a3f5e01", 0)


def test_an_event_is_read_as_it_was_written() -> None:
    assert parse_event(KEY, encode(FAILED)) == FAILED
    recalled = HistoryEvent("recalled", 4, reason="host7 is gone (its lease ended)")
    assert parse_event(KEY, encode(recalled)) == recalled


LONG_TEXTS = st.text(min_size=1).map(lambda part: part * -(-2000 // len(part)))
"""Of 2,000 characters or more. To draw each of them takes a hundred times as long as the rest of a test."""


@given(LONG_TEXTS, st.text())
def test_an_event_has_a_bounded_size(long: str, short: str) -> None:
    worker = replace(RAISED, exception=long, traceback=long, fate=long, timer=short)
    event = HistoryEvent("failed", 4, long, long, long, (worker, worker), 0, long)
    value = encode(event)
    assert len(value) < 12 * (7 * LONGEST_LINE + LONGEST_TRACEBACK) + 1000
    read = parse_event(KEY, value)
    assert len(read.failures) == 1
    assert len(read.reason) == LONGEST_LINE
    assert read.reason.endswith("...")


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"garbage",
        b"[]",
        encode(FAILED).replace(b'"v":1', b'"v":9'),
        encode(FAILED).replace(b'"kind":"failed"', b'"kind":"exploded"'),
        encode(FAILED).replace(b'"pid":7', b'"pid":"7"'),
        encode(FAILED).replace(b'"number":4', b'"number":4,"more":1'),
        encode(FAILED).replace(b'"failures":[{', b'"failures":[3,{'),
    ],
)
def test_what_is_no_event_is_left_out(value: bytes) -> None:
    assert value != encode(FAILED)
    with pytest.raises(StateError):
        parse_event(KEY, value)
    (only,) = read_history([(KEY, encode(FAILED), 900), (f"{KEY}x", value, 901)])
    assert (only.event, only.revision) == (FAILED, 900)


def test_events_come_in_etcds_order_whatever_clocks_say() -> None:
    late = replace(FAILED, node="other", wall_ms=1)
    found = read_history([("b", encode(late), 901), ("c", encode(FAILED), 900), ("a", encode(late), 902)])
    assert [one.event for one in found] == [FAILED, late], "an end that is told again counts once"


def test_what_happened_twice_is_told_twice() -> None:
    first, again = (HistoryEvent("limits", 4, reason="--nnodes is 2", wall_ms=at) for at in (1, 2))
    twice = [("a", encode(first), 900), ("b", encode(again), 910), ("c", encode(first), 911)]
    assert [one.event for one in read_history(twice)] == [first, again], "but for one whose answer was lost"


def test_keys_are_in_the_order_of_revisions() -> None:
    keys = [event_key(PREFIX, revision, writer, 0) for revision, writer in ((9, "z"), (10, "b"), (2**40, "a"))]
    assert keys == sorted(keys)
    assert all(key in events_span(PREFIX) for key in keys)
    assert [event_revision(key) for key in keys] == [9, 10, 2**40]
    assert event_revision(f"{PREFIX}/events/zzz") is event_revision(f"{PREFIX}/events/10-x") is None


@pytest.mark.parametrize(
    ("worker", "line"),
    [
        (RAISED, "worker 7 (rank 3, local rank 1) raised ValueError: no such file"),
        (replace(RAISED, exception=""), "worker 7 (rank 3, local rank 1) exited with code 1"),
        (WorkerFailure(7, fate="exited with code 1"), "worker 7 exited with code 1"),
        (
            replace(RAISED, timer="step"),
            "worker 7 (rank 3, local rank 1) was killed, since its timer 'step' had expired",
        ),
    ],
)
def test_what_became_of_a_worker_is_one_line(worker: WorkerFailure, line: str) -> None:
    assert worker.line == line
