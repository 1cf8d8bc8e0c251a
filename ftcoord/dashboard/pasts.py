"""What the dashboard shows of a job's past: the same as `ftcoord history` and `ftcoord why`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ftcoord.etcd.api import KeyValue
from ftcoord.operator.history import explain, tell_history
from ftcoord.operator.told import JobStatus, ToldEvent

NEWEST_EVENTS: Final = 100
"""Events of a history that are shown."""


@dataclass(frozen=True, slots=True)
class Past:
    """What happened to a job.

    Args:
        why: why it is in its present state; empty for nothing.
        events: the newest events, the last one first.
        total: how many events there are.
    """

    why: str
    events: tuple[ToldEvent, ...]
    total: int


def past_of(
    status: JobStatus, rounds: Sequence[KeyValue], quorums: Sequence[KeyValue], deaths: Sequence[KeyValue]
) -> Past:
    """The past of a job with this status, from the keys of its two histories and of its replicas' deaths."""
    events = tell_history(status.job, rounds, quorums).events
    why = explain(status, rounds, quorums, deaths).text if events else ""
    return Past(why, events[: -NEWEST_EVENTS - 1 : -1], len(events))
