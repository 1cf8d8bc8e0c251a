"""Where the page's viewers get their reports: one feed for each viewed job, for all of its viewers.

A viewer is not sent each change. It is woken, and takes the newest state. So a slow viewer delays nobody, and nothing
piles up. A feed ends with its last viewer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from ftcoord import concurrency
from ftcoord.closing import Closing
from ftcoord.concurrency import StepThread
from ftcoord.errors import ClientClosed, EtcdError, FtcoordError, ThreadNotStarted
from ftcoord.etcd.api import Etcd
from ftcoord.operator.history import explain, history_of
from ftcoord.operator.reading import JobWatch, read_jobs, with_leases
from ftcoord.operator.report import JobHistory, JobList, JobStatus, paragraph
from ftcoord.operator.status import JobKeys, Rules

MOST_VIEWERS: Final = 200
"""The most viewers of all jobs together."""
MOST_JOBS: Final = 50
"""The most jobs that are followed at a time."""
SHARE: Final = 2
"""One client address gets at most this part of each limit: behind a proxy all viewers have one address, and others get
in too."""
FEED_REST: Final = 0.1
"""The fewest seconds between two reports about a job that changes all the time; longer after a report that took
long."""
LIST_INTERVAL: Final = 3.0
"""The fewest seconds between two reads of the list of jobs."""
LEASE_AGE: Final = 3.0
"""Seconds for which a lease's time is reused for other viewers, and for which an etcd that did not answer is not asked
again."""
LEASE_TIMEOUT: Final = 1.0
"""Seconds that etcd may take for all the leases of one request: others wait for their turn."""
ROWS: Final = 50
"""Rows of each list that one viewer is sent."""
PAGED: Final = {"members", "replicas", "jobs"}
"""The lists whose later rows a viewer can ask for. Of others only the first rows are sent."""


@dataclass(frozen=True, slots=True)
class Shown:
    """The present state of a job, or of the list.

    Args:
        report: as `ftcoord status` or `ftcoord ls` has it; None before etcd has ever answered.
        error: why etcd does not answer, while `report` is the last known one; empty while it does.
        why: as `ftcoord why` explains it; empty without a history.
        history: as `ftcoord history` has it; None before it is known, and for the list.
        is_last: whether the feed has failed, and nothing follows.
    """

    report: JobStatus | JobList | None
    error: str = ""
    why: str = ""
    history: JobHistory | None = None
    is_last: bool = False


def part_of(report: Any, find: str = "", offset: int = 0) -> tuple[Any, dict[str, Any]]:
    """The report with at most `ROWS` rows in each of its lists, also in those of its parts; and how many rows there
    are, by the names of its lists and parts.

    Args:
        find: only rows that contain this text, in any case; empty for all.
        offset: how many of those rows to skip in lists that are paged.
    """
    rest, counts = {**report}, dict[str, Any]()
    for name, value in report.items():
        if isinstance(value, list):
            found = [row for row in value if _has(row, find.casefold())] if find else value
            start = offset if name in PAGED and offset < len(found) else 0
            rest[name] = found[start : start + ROWS]
            states = Counter(row.get("standing", row.get("state", "")) for row in value)
            counts[name] = {"total": len(value), "found": len(found), "offset": start, "states": states}
        elif isinstance(value, dict):
            rest[name], counts[name] = part_of(value, find, offset)
    return rest, counts


def _has(row: Mapping[str, Any], text: str) -> bool:
    return any(isinstance(value, str) and text in value.casefold() for value in row.values())


class TooManyViewers(FtcoordError):
    """The dashboard already has as many viewers as it serves."""


class Board(Closing):
    """The feeds of all viewers. Thread-safe.

    Args:
        etcd: the client; not closed here.
        key_prefix: the prefix of the jobs' keys.
        rules: the rules to judge all jobs by.
    """

    def __init__(self, etcd: Etcd, key_prefix: str, rules: Rules) -> None:
        self._etcd, self._key_prefix, self._rules = etcd, key_prefix, rules  # never change
        # Guards what follows. A feed is made with the lock held, and closed without it: that waits for its thread.
        self._lock = concurrency.lock("Board._lock")
        self.feeds: dict[str | None, PageFeed] = {}  # by their jobs; None stands for the list
        self._closed = False

    def view(self, job: str | None, wake: Callable[[], None], client: str = "") -> PageFeed:
        """View a job, or the list of jobs, until `leave`. `client` is the viewer's address.

        `wake` is called on a thread of ftcoord's when there may be something new. It must not block, and not raise.
        Raises TooManyViewers, ThreadNotStarted and ClientClosed.
        """
        with self._lock:
            if self._closed:
                raise ClientClosed("the page is closing")
            feed = self.feeds.get(job)
            is_new = feed is None or feed.has_ended
            for share, what in ((1, "at the same time"), (SHARE, "from your address")):
                viewers = [[*one.viewers.values()] for one in self.feeds.values()]
                theirs = [len(one) if share == 1 else one.count(client) for one in viewers]
                if sum(theirs) >= MOST_VIEWERS // share or (is_new and sum(map(bool, theirs)) >= MOST_JOBS // share):
                    raise TooManyViewers(f"too many look at this page {what}: close some, and reload")
            if feed is None or is_new:
                feed = self.feeds[job] = PageFeed(self._etcd, self._key_prefix, job, self._rules)
            feed.viewers[wake] = client
            return feed

    def leave(self, feed: PageFeed, wake: Callable[[], None]) -> None:
        """View it no longer. The last viewer ends the feed, and waits for its thread. Idempotent."""
        with self._lock:
            is_over = feed.viewers.pop(wake, None) is not None and not feed.viewers
            if is_over:
                self.feeds = {job: one for job, one in self.feeds.items() if one is not feed}
        if is_over:
            feed.close()

    def close(self) -> None:
        """End all feeds, and wake the viewers. Idempotent."""
        with self._lock:
            self._closed = True
            feeds, self.feeds = [*self.feeds.values()], {}
        for feed in feeds:
            feed.end("the page is closing")
            feed.close()


class PageFeed(Closing):
    """One thread that reads etcd for all viewers of a job, or of the list of jobs if `job` is None.

    A job is reported when it, or its history, changes, with whether etcd answers. The list is read again and again:
    following all jobs at once has no bound. Raises ThreadNotStarted.
    """

    def __init__(self, etcd: Etcd, key_prefix: str, job: str | None, rules: Rules) -> None:
        self._read_jobs = partial(read_jobs, etcd, key_prefix)  # never changes
        # These two change in single steps, by any thread:
        self.news: Shown | None = None  # the newest state; None while there is none yet
        self.viewers: dict[Callable[[], None], str] = {}  # their addresses, by what wakes them
        self._ending = concurrency.event()
        self._watch: JobWatch | None = None  # never changes
        if job is not None:
            self._watch = JobWatch(etcd, key_prefix, job, rules, every_timer=True, with_history=True)
        name = "ftcoord-job-list" if job is None else "ftcoord-job-feed"
        self._thread = StepThread(self._step, name, self._wake, lambda: None, self._failed)
        try:
            self._thread.start()
        except ThreadNotStarted:
            self.close()
            raise

    @property
    def has_ended(self) -> bool:
        return self.news is not None and self.news.is_last

    def close(self) -> None:
        self._thread.close()
        if self._watch is not None:
            self._watch.close()

    def end(self, why: str) -> None:
        """Report that nothing follows, and why."""
        self._publish(replace(self.news or Shown(None), error=why, is_last=True))

    def _publish(self, news: Shown) -> None:
        if self.has_ended or (news.report is None and news == self.news):
            return
        self.news = news
        for wake in list(self.viewers):
            wake()

    def _step(self) -> None:
        keys = self._watch.wait() if self._watch is not None else None
        if self._thread.closed:
            return
        began, rest = concurrency.now(), 0.0
        try:
            if self._watch is None:
                rest = LIST_INTERVAL
                self._publish(Shown(self._read_jobs()))
            else:
                rest = FEED_REST if keys is not None else 0.0
                self._report(self._watch, keys)
        except ClientClosed:
            raise
        except EtcdError as error:  # of a job: it never answered yet
            self._publish(replace(self.news or Shown(None), error=str(error)))
        if rest:
            self._ending.wait(max(rest, 4 * (concurrency.now() - began)))

    def _report(self, watch: JobWatch, keys: JobKeys | None) -> None:
        has_changed, now, known = watch.take(keys) is not None, watch.last, watch.keys
        if now is None or known is None:
            return
        history = history_of(known)
        why = paragraph(explain(now["status"], known)) if history["events"] else ""
        if has_changed or self.news is None or (self.news.why, self.news.history) != (why, history):
            self._publish(Shown(now["status"], now["error"], why, history))

    def _wake(self) -> None:
        self._ending.set()
        if self._watch is not None:
            self._watch.wake()

    def _failed(self, error: BaseException) -> None:
        self.end(f"the page's watch has ended: {error}")


class LeaseBook:
    """The times that members' leases have left: read from etcd once for all viewers. Thread-safe.

    Args:
        time_left: etcd's, with a timeout; called by one thread at a time.
    """

    def __init__(self, time_left: Callable[..., tuple[int, int]]) -> None:
        self._time_left = time_left  # never changes
        self._lock = concurrency.lock("LeaseBook._lock")  # guards what follows, and is held while etcd is asked
        self._known: dict[int, tuple[float, tuple[int, int]]] = {}
        self._asks_until = self._rests_until = -math.inf

    def lease(self, report: JobStatus) -> JobStatus:
        """The report with its members' leases, up to `LEASE_AGE` old; without those that are gone, or that etcd did not
        return in time. An etcd that has just not answered is not asked."""
        with self._lock:
            now = concurrency.now()
            self._known = {one: known for one, known in self._known.items() if now - known[0] < LEASE_AGE}
            self._asks_until = now + LEASE_TIMEOUT
            return with_leases(self._known_time, report)

    def _known_time(self, lease_id: int) -> tuple[int, int]:
        """With the lock held."""
        now = concurrency.now()
        if lease_id not in self._known and now >= self._rests_until:
            try:
                left = self._time_left(lease_id, timeout=max(self._asks_until - now, 0))
                self._known[lease_id] = now, left
            except EtcdError:  # the job's feed reports that etcd is away
                self._rests_until = concurrency.now() + LEASE_AGE
        return self._known.get(lease_id, (now, (-1, 0)))[1]
