"""A job's history: which end of a round came first, the records of events, and the events of decisions.

`tests/sim/test_first_cause_in_memory.py` plays 200 failures as a whole."""

from __future__ import annotations

from dataclasses import replace

import builders
import pytest
from hypothesis import given, strategies as st

from ftcoord.core.death_records import KnownCause
from ftcoord.core.history import (
    HistoryEvent,
    encode,
    first_failure,
    in_causal_order,
    parse_event,
    quorum_events,
    read_history,
    round_events,
    told_ends,
    why_ended,
)
from ftcoord.core.layout import event_key, events_span, is_event_key
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest, QuorumSeat
from ftcoord.core.rendezvous_records import LONGEST_LINE, LONGEST_TRACEBACK, Round, Seat, WorkerFailure
from ftcoord.errors import StateError

PEER_ERRORS = [
    "RuntimeError: [third_party/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:2390",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error: Connection reset by peer",
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2272, remote process exited or there was a"
    " network error, NCCL version 2.27.5 ncclRemoteError: A call failed possibly due to a network error",
    "torch.distributed.DistBackendError: [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)",
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed",
    "RuntimeError: NCCL communicator was aborted on rank 3.",
    "BrokenPipeError: [Errno 32] Broken pipe",
]
OWN_ERRORS = [
    "ValueError: loss is nan",
    "FileNotFoundError: [Errno 2] No such file or directory: '/data/7'",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "AssertionError",
    "KeyError: 'input_ids'",
]


def worker(**more: object) -> WorkerFailure:
    return replace(WorkerFailure(4711, 3, 1), **more)  # type: ignore[arg-type]


def exited(code: int) -> WorkerFailure:
    return worker(exit_code=code, fate=f"exited with code {code}")


def killed(number: int) -> WorkerFailure:
    return worker(signal=number, fate=f"was killed by signal {number}")


def raised(text: str) -> WorkerFailure:
    return worker(exit_code=1, fate="exited with code 1", exception=text)


def failed(node: str, failure: WorkerFailure) -> HistoryEvent:
    return HistoryEvent("expired" if failure.timer else "failed", 3, f"host of {node}", node, failure.line, (failure,))


def end(kind: str, node: str, what: str) -> HistoryEvent:
    return HistoryEvent(kind, 3, f"host of {node}", node, f"host of {node} {what}")


@pytest.mark.parametrize("text", PEER_ERRORS)
def test_what_a_worker_raises_about_a_lost_peer_follows_from_that(text: str) -> None:
    peer = replace(failed("node1", raised(text)), noted=9)
    for first in (end("died", "node2", "was killed"), end("lost", "node2", "is gone"), failed("node2", exited(3))):
        later = replace(first, noted=10)
        assert in_causal_order([peer, later]) == [later, peer]


@pytest.mark.parametrize("text", OWN_ERRORS)
def test_what_a_worker_raises_of_its_own_is_a_first_cause(text: str) -> None:
    own, lost = replace(failed("node1", raised(text)), noted=9), replace(end("lost", "node2", "is gone"), noted=10)
    assert in_causal_order([lost, own]) == [own, lost]
    earlier = replace(lost, noted=8)
    assert in_causal_order([own, earlier]) == [earlier, own], "of two that begin, the first that was reported"


def test_an_abort_may_be_the_first_of_all() -> None:
    """An assertion in C++, a heap that is found corrupt: not only the watchdog of a backend calls it."""
    aborted = replace(failed("node1", killed(6)), noted=10)
    peer = replace(failed("node2", raised(PEER_ERRORS[0])), noted=9)
    assert in_causal_order([peer, aborted])[0] == aborted
    lost = replace(end("lost", "node3", "is gone"), noted=20)
    assert in_causal_order([aborted, lost])[0] == lost


def test_a_worker_that_ends_since_its_agent_stops_it_is_no_cause() -> None:
    """It may handle SIGTERM, and end with whatever code it likes."""
    left = replace(end("left", "node1", "node1 was stopped by SIGTERM"), noted=20)
    for what in (killed(15), exited(143), exited(1)):
        stopped = replace(failed("node1", what), noted=10)
        assert in_causal_order([stopped, left])[0] == left
    peer = replace(failed("node2", exited(3)), noted=15)
    assert in_causal_order([peer, left])[0] == peer, "of another node it counts"


def test_an_agent_that_gives_up_follows_its_worker() -> None:
    gave_up = replace(end("left", "node1", "left (ChildFailedError)"), noted=10)
    worker_of_it = replace(failed("node1", exited(3)), noted=20)
    assert in_causal_order([gave_up, worker_of_it])[0] == worker_of_it


def test_what_only_follows_is_told_where_nothing_else_is_known() -> None:
    aborted = failed("node1", killed(6))
    assert told_ends([aborted]) == "host of node1: worker 4711 (rank 3, local rank 1) was killed by signal 6"
    assert told_ends([]) == ""


def test_of_one_nodes_workers_the_one_that_raised_something_comes_first() -> None:
    aborted, own, peer = killed(6), raised(OWN_ERRORS[0]), raised(PEER_ERRORS[0])
    assert first_failure([aborted, peer, own]) == own
    assert first_failure([peer, aborted]) == aborted, "a library may have, of itself"
    assert first_failure([peer, killed(13)]) == peer, "the first that was seen"
    assert first_failure([]) is None


def test_a_round_that_was_recalled_for_a_newcomer_ended_for_that() -> None:
    """Its workers are stopped then, and some of them may call that a failure."""
    after = replace(failed("node1", raised(PEER_ERRORS[0])), noted=20)
    assert why_ended("host9 waits to join", 15, [after]) == "host9 waits to join"
    assert why_ended("host9 waits to join", 15, []) == "host9 waits to join"


def test_a_cause_that_is_told_after_the_recall_is_told_all_the_same() -> None:
    peer = replace(failed("node1", raised(PEER_ERRORS[0])), noted=10)
    lost = replace(end("lost", "node2", "is gone (its lease ended)"), noted=20)
    ended = why_ended(told_ends([peer]), 15, [peer, lost])
    assert ended == "host of node2 is gone (its lease ended); 1 more node followed"
    assert why_ended(told_ends([peer]), 15, [peer]) == told_ends([peer])


def test_a_worker_that_its_agent_kills_since_that_was_told_to_stop_is_no_cause() -> None:
    """It did not heed SIGTERM, and the agent says only at its end that it was told to."""
    killed = WorkerFailure(11, 0, 0, -1, 9, "was killed by signal 9 (SIGKILL)")
    failed = HistoryEvent("failed", 1, "host1", "a", failures=(killed,), noted=10)
    left = HistoryEvent("left", 1, "host1", "a", "host1 was stopped by SIGTERM", noted=20)
    assert in_causal_order([failed, left]) == [left, failed]
    assert in_causal_order([failed]) == [failed]


# -- the records ------------------------------------------------------------------------------------------------------

PREFIX = "/ftcoord/v2/run"
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


def test_decisions_that_look_alike_are_told_each() -> None:
    event = HistoryEvent("recalled", 4, reason="node9 waits to join")
    assert [one.event for one in read_history([("a", encode(event), 900), ("b", encode(event), 910)])] == [event, event]


def test_keys_are_in_the_order_of_revisions() -> None:
    keys = [event_key(PREFIX, revision, writer, 0) for revision, writer in ((9, "z"), (10, "b"), (2**40, "a"))]
    assert keys == sorted(keys)
    assert all(key in events_span(PREFIX) for key in keys)
    assert all(map(is_event_key, keys))
    assert not is_event_key(f"{PREFIX}/events/zzz")
    assert not is_event_key(f"{PREFIX}/events/10-x")


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


# -- what a decision shows --------------------------------------------------------------------------------------------


def seated(id_: int, *members: str) -> QuorumRecord:
    """Each member's replica is called by its first letter."""
    seats = tuple(QuorumSeat(one, 1, QuorumRequest(one[0], "", "", 0, 1, False, "", 0, ())) for one in members)
    return QuorumRecord(id_, id_, seats, (), 0.0, "me")


def test_a_quorum_tells_who_came_and_how_others_ended() -> None:
    first, then = seated(3, "a1", "b1", "c1", "d1"), seated(4, "a1", "e1")
    (formed,) = quorum_events(None, first, {}, {})
    assert (formed.kind, formed.number, formed.reason) == ("quorum", 3, "4 replicas")
    *ends, last = quorum_events(first, then, {"b1": KnownCause("b was killed", 7)}, {"c1": "it was closed"})
    assert [(one.kind, one.number, one.node, one.member) for one in ends] == [
        ("died", 3, "b", "b1"),
        ("left", 3, "c", "c1"),
        ("lost", 3, "d", "d1"),
    ]
    assert (ends[0].reason, ends[0].noted, ends[1].reason) == ("b: b was killed", 7, "c left (it was closed)")
    assert last.reason == "2 replicas; new: e; without b, c, d"


def test_a_round_tells_each_of_its_states_once() -> None:
    def kinds(before: Round | None, new: Round) -> list[tuple[str, str]]:
        return [(one.kind, one.reason) for one in round_events(before, new, ())]

    one, other = Seat("a1", "a", "hosta"), Seat("b1", "b", "hostb")
    formed = builders.round_(1, (one,))
    assert kinds(None, formed) == [("round", "1 node; new: hosta")]
    assert kinds(formed, replace(formed, ready=True)) == [("started", "round 1 is ready on 1 node")]
    recalled = replace(formed, ready=True, recalled="hostb waits to join")
    assert kinds(replace(formed, ready=True), recalled) == [("recalled", "hostb waits to join")]
    assert kinds(recalled, replace(recalled, min_nodes=1, max_nodes=2)) == []
    after = builders.round_(2, (other,), before="hosta left")
    assert kinds(recalled, after) == [
        ("round", "1 node; new: hostb; without hosta; the round before ended: hosta left")
    ]
    closed = replace(after, closed="hostb failed", outcome="failed")
    assert kinds(after, closed) == [("closed", "failed: hostb failed")]
