"""Which of several ends of one round came first, and so explains the others. Pure.

Clocks of different hosts are not compared. etcd's revisions show in which order the ends were reported. That is not
always the order in which they happened: a lost host is reported when its lease expires, and a process that raised an
exception may take longer to end than those that lose their connection to it. So the kind of an end counts first.

  BEGINS   needs no earlier end: a worker raised an exception of its own, or was killed by a signal; an agent died, was
           evicted or asked to stop; a host was lost.
  UNCLEAR  an exit code without an exception, abort() (a library's assertion, or a backend's watchdog), or an expired
           timer: a first cause, or a peer that waited in vain. In the order of revisions it counts like BEGINS, unless
           a host was lost: that happened before it was reported.
  FOLLOWS  what processes do when a peer is lost: a connection ends, or a collective times out; an agent that has used
           up its restarts; and a host that was lost after another end, by one writer's clock.
  STOPPED  what an agent does to its workers: SIGTERM, and SIGKILL if it was asked to stop itself; or what they do then.

The first cause is the one with the lowest revision among those of the strongest kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final

from ftcoord.core.event_records import HistoryEvent, WorkerFailure

_SIGABRT, _SIGKILL, _SIGPIPE, _SIGTERM = 6, 9, 13, 15
_PEERS: Final = (
    "connection reset",
    "connection closed",
    "connection refused",
    "connection aborted",
    "closed by peer",
    "broken pipe",
    "socket closed",
    "socket timeout",
    "remote process exited",
    "remote error",
    "ncclremoteerror",
    "communicator was aborted",
    "collective operation timeout",
    "watchdog caught",
    "wait timeout",
    "timed out waiting",
    "timed out after",
    "caused pair closure",
    "distnetworkerror",
    "distbackenderror",
    "roundovererror",
    "brokenpipeerror",
    "connectionreseterror",
)
"""Texts of torch, NCCL and Gloo about a lost peer, in lower case."""
OBEYED: Final = "was stopped by "
"""The beginning of the reason of an agent that leaves because it was asked to stop, before the signal's name."""
_SPENT: Final = "ChildFailedError"
"""The reason of an agent that leaves because its workers have failed too often."""


UNKNOWN_PEER: Final = "a peer was lost, and nobody knows yet which"
"""The text if the first known cause is only a consequence of another."""


class Weight(IntEnum):
    """What an end can be: see above."""

    BEGINS = 0
    UNCLEAR = 1
    FOLLOWS = 2
    STOPPED = 3


def weight_of(event: HistoryEvent) -> Weight:
    """The weight of one end alone."""
    if event.failures:
        return _weight_of_failure(event.failures[0])
    return Weight.FOLLOWS if event.kind == "left" and _SPENT in event.reason else Weight.BEGINS


def _weight_of_failure(failure: WorkerFailure) -> Weight:
    if failure.timer:
        return Weight.UNCLEAR
    if failure.exception:
        text = failure.exception.lower()
        return Weight.FOLLOWS if any(words in text for words in _PEERS) else Weight.BEGINS
    if failure.signal == _SIGPIPE:
        return Weight.FOLLOWS
    if failure.signal == _SIGABRT:
        return Weight.UNCLEAR
    if failure.signal == _SIGTERM or failure.exit_code == 128 + _SIGTERM:
        return Weight.STOPPED
    return Weight.BEGINS if failure.signal else Weight.UNCLEAR


def in_causal_order(ends: Sequence[HistoryEvent]) -> list[HistoryEvent]:
    """The ends, the first cause first. Ends written at the same revision stay in the given order."""
    stopping = {end.node for end in ends if end.kind == "left" and OBEYED in end.reason}
    first_seen = _first_seen(ends)
    has_lost = any(end.kind == "lost" and not _is_late(end, first_seen) for end in ends)

    def place(end: HistoryEvent) -> tuple[int, int]:
        weight = Weight.FOLLOWS if _is_late(end, first_seen) else weight_of(end)
        if end.node in stopping and (weight is Weight.UNCLEAR or _was_just_killed(end)):
            weight = Weight.STOPPED
        elif weight is Weight.UNCLEAR and not has_lost:
            weight = Weight.BEGINS
        return weight, end.noted

    return sorted(ends, key=place)


def _was_just_killed(end: HistoryEvent) -> bool:
    """Whether a worker got SIGKILL, and neither a timer nor a lack of memory explains it."""
    return any(
        one.signal == _SIGKILL and not one.exception and not one.timer and "SIGKILL" in one.fate
        for one in end.failures[:1]
    )


def _first_seen(ends: Sequence[HistoryEvent]) -> dict[str, int]:
    """When each writer saw its first end, on its own clock."""
    found: dict[str, int] = {}
    for end in ends:
        if end.wall_ms:
            found[end.by] = min(found.get(end.by, end.wall_ms), end.wall_ms)
    return found


def _is_late(end: HistoryEvent, first_seen: Mapping[str, int]) -> bool:
    """Whether a host was certainly lost only after its writer had seen another end."""
    return first_seen.get(end.by, end.since_ms) < end.since_ms


def first_failure(failures: Sequence[WorkerFailure]) -> WorkerFailure | None:
    """The first cause among the workers of one node, given in the order in which their agent saw them end; None for
    none."""
    return min(failures, key=_weight_of_failure, default=None)


def follows(failure: WorkerFailure) -> bool:
    """Whether a failure is probably a consequence of another; that includes abort(), which backends' watchdogs call."""
    return failure.signal == _SIGABRT or _weight_of_failure(failure) >= Weight.FOLLOWS


def told_leaving(hosts: str, why: str) -> str:
    """Who left, and why, in one line."""
    return f"{hosts} {why}" if why.startswith(OBEYED) else f"{hosts} left ({why})"


def told_end(end: HistoryEvent) -> str:
    """The end in one line, for people."""
    if end.failures:
        return f"{end.who}: {end.failures[0].line}"
    return end.reason


def is_consequence(end: HistoryEvent) -> bool:
    """Whether a worker ended because it had lost a peer."""
    return bool(end.failures) and weight_of(end) is Weight.FOLLOWS


def told_first(first: HistoryEvent) -> str:
    """The first known cause, in one line; and that it is no cause, if it is only a consequence."""
    return f"{UNKNOWN_PEER}: {told_end(first)}" if is_consequence(first) else told_end(first)


def told_ends(ends: Sequence[HistoryEvent]) -> str:
    """The first cause, and how many more ends there are; empty for none."""
    ordered = in_causal_order(ends)
    if not ordered:
        return ""
    more = len({end.node for end in ordered} - {ordered[0].node})
    return told_first(ordered[0]) + (f"; {more} more {'node' if more == 1 else 'nodes'} followed" if more else "")


def why_ended(recalled: str, recalled_at: int, ends: Sequence[HistoryEvent]) -> str:
    """Why a round ended.

    If a round was recalled for another reason (a node waits to join), that reason ended it, whatever happens to its
    workers while they are stopped.

    Args:
        recalled: why it was recalled.
        recalled_at: etcd's revision then.
        ends: how its members' parts ended, as far as is known.
    """
    if not any(end.noted <= recalled_at for end in ends) or told_end(in_causal_order(ends)[0]) in recalled:
        return recalled
    return told_ends(ends)
