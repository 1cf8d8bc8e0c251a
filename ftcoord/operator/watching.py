"""What a watch says of a job: from the keys that come of it, and from whether etcd answers while none come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ftcoord import concurrency
from ftcoord.core.layout import run_prefix, run_span
from ftcoord.errors import EtcdError
from ftcoord.etcd.api import EtcdCalls, Get
from ftcoord.operator.job_keys import JobKeys
from ftcoord.operator.reading import read_job
from ftcoord.operator.status import Rules, tell_job
from ftcoord.operator.told import FORMAT, Watched

PROBE: Final = 2.0
"""Seconds without a change after which etcd is asked whether it is there; and seconds that it may take to answer."""


def newest(inbox: concurrency.Queue[JobKeys | BaseException | None]) -> JobKeys | None:
    """The last of what a follower has put, None if nothing came for a while, or None did. Raises what ended the
    follower."""
    try:
        found = inbox.get(timeout=PROBE)
        while not inbox.empty():
            found = inbox.get()
    except concurrency.Empty:
        return None
    if isinstance(found, BaseException):
        raise found
    return found


def probe(etcd: EtcdCalls, key_prefix: str, job: str, *, lost: bool) -> JobKeys | None:
    """See whether etcd answers; if it was lost, also what it has now: nobody knows yet what was missed.

    Raises EtcdError.
    """
    etcd.range(Get(run_span(run_prefix(key_prefix, job)), limit=1, keys_only=True), timeout=PROBE)
    return read_job(etcd, key_prefix, job) if lost else None


class JobWatch:
    """What is told of a job, and was last. For one thread."""

    def __init__(self, job: str, rules: Rules) -> None:
        self._job, self._rules = job, rules  # never change
        self.last: Watched | None = None

    def next(self, keys: JobKeys | None, probe: Callable[[bool], JobKeys | None]) -> Watched | None:
        """What has changed: the job, or whether etcd answers; None if neither has.

        Raises EtcdError if etcd does not answer and never did.

        Args:
            keys: what has just come from etcd; None if nothing did for a while.
            probe: asks etcd, and is told whether etcd was lost: then it has to return what etcd has now.
        """
        error, status = "", self.last.status if self.last else None
        if keys is None:
            try:
                keys = probe(self.last is not None and not self.last.connected)
            except EtcdError as problem:
                if self.last is None:
                    raise
                error = str(problem)
        if keys is not None:
            status = tell_job(keys, self._rules)
        if status is None:
            return None  # etcd answers, and the keys are on their way
        last, self.last = self.last, Watched(FORMAT, self._job, not error, error, status)
        return None if _says_the_same(last, self.last) else self.last


def _says_the_same(last: Watched | None, now: Watched) -> bool:
    """Whether only etcd's revision, or the words of an error, differ. Leases are not followed."""
    if last is None or last.connected != now.connected:
        return False
    one, other = last.status, now.status
    return (one.rounds, one.quorum, one.unreadable) == (other.rounds, other.quorum, other.unreadable)
