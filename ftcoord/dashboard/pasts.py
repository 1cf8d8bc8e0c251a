"""What the dashboard shows of a job's past: the same as `ftcoord history` and `ftcoord why`. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ftcoord.etcd.api import KeyValue
from ftcoord.operator.job_keys import JobKeys
from ftcoord.operator.past import explain, tell_history
from ftcoord.operator.told import JobStatus, ToldEvent

NEWEST_EVENTS: Final = 100
"""Events of a history that are shown."""


@dataclass(frozen=True, slots=True)
class Past:
    """What happened to a job.

    Args:
        why: why it is in its present state; empty for nothing.
        events: the newest events, the last one first. The same object until there is another event.
        total: how many events there are.
    """

    why: str
    events: tuple[ToldEvent, ...]
    total: int


class PastTeller:
    """Computes a job's past whenever its status changes, and parses its history whenever that changes. Not thread-safe.

    Args:
        job: its id.
    """

    def __init__(self, job: str) -> None:
        self._job = job  # never changes
        self._kvs: tuple[tuple[KeyValue, ...], tuple[KeyValue, ...]] = (), ()
        self._past = Past("", (), 0)
        self._status: JobStatus | None = None  # that was explained last

    def hear(self, keys: JobKeys) -> None:
        """Note the keys that have just come; keys that were read without the history change nothing."""
        rounds, quorums = keys.rounds.events, keys.quorum.events
        if rounds is None or quorums is None or (rounds, quorums) == self._kvs:
            return
        self._kvs, self._status = (rounds, quorums), None
        events = tell_history(self._job, *self._kvs).events
        self._past = Past("", events[: -NEWEST_EVENTS - 1 : -1], len(events))

    def past(self, status: JobStatus) -> Past:
        """The past of a job with this status."""
        if self._past.total and status is not self._status:
            self._status = status
            self._past = Past(explain(status, *self._kvs).text, self._past.events, self._past.total)
        return self._past
