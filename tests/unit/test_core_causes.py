"""Which end of a round came first: injected failures, and what follows from each as real systems do it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ftcoord.core.causes import first_failure, in_causal_order, told_ends, why_ended
from ftcoord.core.event_records import HistoryEvent, WorkerFailure

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


def test_an_abort_may_be_the_first_of_all() -> None:
    """An assertion in C++, a heap that is found corrupt: not only the watchdog of a backend calls it."""
    aborted = replace(failed("node1", killed(6)), noted=10)
    peer = replace(failed("node2", raised(PEER_ERRORS[0])), noted=9)
    assert in_causal_order([peer, aborted])[0] == aborted
    lost = replace(end("lost", "node3", "is gone"), noted=20)
    assert in_causal_order([aborted, lost])[0] == lost


@pytest.mark.parametrize("what", [exited(3), raised(PEER_ERRORS[0]), killed(6)])
def test_a_host_that_was_lost_long_after_something_ended_is_not_to_blame(what: WorkerFailure) -> None:
    first = replace(failed("node1", what), noted=10, wall_ms=1_000_000)
    lost = replace(end("lost", "node2", "is gone"), noted=20, wall_ms=1_600_000, since_ms=1_585_000)
    assert in_causal_order([lost, first])[0] == first
    at_once = replace(lost, wall_ms=1_010_000, since_ms=995_000)
    assert in_causal_order([at_once, first])[0] == at_once
    by_another = replace(lost, by="whose clock is another")
    assert in_causal_order([by_another, first])[0] == by_another, "no clocks of two hosts are compared"


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
