"""What a watch reports about a job: from the keys that arrive, and from whether etcd answers while none arrive."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from ftcoord import concurrency
from ftcoord.core.layout import run_prefix, run_span
from ftcoord.errors import EtcdError, EtcdUnavailable
from ftcoord.etcd.api import EtcdCalls, Get, KeyValue
from ftcoord.operator.job_keys import JobKeys
from ftcoord.operator.reading import read_job, read_timers
from ftcoord.operator.status import Rules, tell_job
from ftcoord.operator.told import FORMAT, JobStatus, Watched

log = logging.getLogger(__name__)

PROBE: Final = 2.0
"""Seconds without a change after which etcd is probed; and seconds that it may take to answer."""
TIMERS_INTERVAL: Final = 2.0
"""The fewest seconds between two reads of a job's timers,"""
TIMERS_REST: Final = 10
"""and the pause after a read, as a multiple of the time that it took."""


def newest(inbox: concurrency.Queue[JobKeys | BaseException | None]) -> JobKeys | None:
    """The last keys from a follower; None if none came for a while, or None did. Raises the error that ended the
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
    """Check whether etcd answers; if it was lost, also read the job, since it is unknown what was missed.

    Raises EtcdError.
    """
    etcd.range(Get(run_span(run_prefix(key_prefix, job)), limit=1, keys_only=True), timeout=PROBE)
    return read_job(etcd, key_prefix, job) if lost else None


class TimerLook:
    """Reads a job's expiration timers from time to time. Not thread-safe.

    They are not watched: each worker may write one at each of its steps, and a job may have ten thousand workers.
    """

    def __init__(self, etcd: EtcdCalls, key_prefix: str, job: str) -> None:
        self._read = partial(read_timers, etcd, key_prefix, job, PROBE)  # never changes
        self._kvs: tuple[KeyValue, ...] = ()
        self._rests_until = -math.inf

    def newest(self) -> tuple[KeyValue, ...]:
        """Their keys as of the last read; none if etcd refuses to read them.

        Raises EtcdUnavailable, within `PROBE` seconds.
        """
        began = concurrency.now()
        if began >= self._rests_until:
            try:
                self._kvs = self._read()
            except EtcdUnavailable:
                raise
            except EtcdError as error:
                log.debug("the timers are not told: %s", error)
                self._kvs = ()
            now = concurrency.now()
            self._rests_until = now + max(TIMERS_INTERVAL, TIMERS_REST * (now - began))
        return self._kvs


class JobWatch:
    """What was last reported about a job, and what to report next. Not thread-safe.

    Args:
        job: its id.
        rules: the rules to judge it by.
        timers: returns the present keys of its expiration timers. Raises EtcdUnavailable if etcd does not answer.
        every_timer: whether the start or release of a timer is a change too; else only an expiry is.
    """

    def __init__(
        self, job: str, rules: Rules, timers: Callable[[], tuple[KeyValue, ...]], *, every_timer: bool
    ) -> None:
        self._job, self._rules, self._find_timers, self._every_timer = job, rules, timers, every_timer  # never change
        self._keys: JobKeys | None = None
        self._timers: tuple[KeyValue, ...] = ()
        self._told: JobKeys | None = None  # what the last status rests on
        self.last: Watched | None = None

    def next(self, keys: JobKeys | None, probe: Callable[[bool], JobKeys | None]) -> Watched | None:
        """What has changed: the job, or whether etcd answers; None if neither has.

        Raises EtcdError if etcd does not answer and never did.

        Args:
            keys: the keys that have just come from etcd; None if none did for a while.
            probe: probes etcd; called with whether etcd was lost: it must then return the present keys.
        """
        error = ""
        try:
            if keys is None:
                keys = probe(self.last is not None and not self.last.connected)
            self._keys = keys or self._keys  # which are true, though the timers may not be found
            if self._keys is not None:
                self._timers = self._find_timers()
        except EtcdError as problem:
            if self._keys is None:
                raise
            error = str(problem)
        if self._keys is None:
            return None  # etcd answers, and the keys are on their way
        last, self.last = self.last, Watched(FORMAT, self._job, not error, error, self._status(self._keys))
        is_news = last is None or self._gist(last) != self._gist(self.last)
        return self.last if is_news else None

    def _status(self, keys: JobKeys) -> JobStatus:
        """The status, computed again only if a key differs: a job may have ten thousand members."""
        now = replace(keys, timers=self._timers)
        if self.last is None or now != self._told:
            self._told = now
            return tell_job(now, self._rules)
        return self.last.status

    def _gist(self, one: Watched) -> object:
        """What is compared: all but etcd's revision, and the text of an error. Leases are not followed."""
        status = one.status
        timers = [timer for timer in status.timers if self._every_timer or timer.standing != "running"]
        return one.connected, status.rounds, status.quorum, status.unreadable, timers
