"""The states for all viewers of the dashboard: one follower per job for all of its viewers, and none without a viewer.

A viewer is not sent each change. It is woken, and takes the newest state. So a slow viewer delays nobody, and nothing
piles up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from ftcoord import concurrency
from ftcoord.closing import Closing
from ftcoord.concurrency import StepThread
from ftcoord.dashboard.pasts import Past, past_of
from ftcoord.errors import ClientClosed, EtcdError, FtcoordError, ThreadNotStarted
from ftcoord.etcd.api import Etcd, KeyValue
from ftcoord.operator.following import follow_job
from ftcoord.operator.job_keys import JobKeys, LeaseTime
from ftcoord.operator.reading import ReadsLeases, read_lease
from ftcoord.operator.status import Rules
from ftcoord.operator.summary import read_jobs
from ftcoord.operator.told import JobList, JobStatus, Watched
from ftcoord.operator.watching import JobWatch, TimerLook, newest, probe

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

Publish = Callable[["Shown"], None]


@dataclass(frozen=True, slots=True)
class Shown:
    """What is shown now.

    Args:
        told: a job's status or the list of jobs; None before etcd has ever answered.
        error: why etcd does not answer, while `told` is the last known state; empty while it does.
        past: what happened to the job; None before it is known, and for the list.
        is_last: whether the feed has failed, and nothing follows.
    """

    told: JobStatus | JobList | None
    error: str = ""
    past: Past | None = None
    is_last: bool = False


class TooManyViewers(FtcoordError):
    """The dashboard already has as many viewers as it serves."""


class Board(Closing):
    """Feeds of jobs, each as long as it has viewers. Thread-safe.

    Args:
        etcd: the client; not closed here.
        key_prefix: the prefix of the jobs' keys.
        rules: the rules to judge all jobs by.
    """

    def __init__(self, etcd: Etcd, key_prefix: str, rules: Rules) -> None:
        self._etcd, self._key_prefix, self._rules = etcd, key_prefix, rules  # never change
        # Guards what follows. A feed is made with the lock held, and closed without it: that waits for its thread.
        self._lock = concurrency.lock("Board._lock")
        self._channels: dict[str | None, _Channel] = {}
        self._viewers = 0
        self._closed = False

    def view(self, job: str | None, wake: Callable[[], None], client: str = "") -> Viewing:
        """View a job, or the list of jobs, until the view is closed. `client` is the viewer's address.

        `wake` is called on a thread of ftcoord's when there may be something new. It must not block, and not raise.
        Raises TooManyViewers, ThreadNotStarted and ClientClosed.
        """
        with self._lock:
            if self._closed:
                raise ClientClosed("the page is closing")
            channel = self._channels.get(job)
            if channel is None or channel.has_ended:
                channel = None
            self._check_room(channel, client)
            if channel is None:
                channel = _Channel()
                channel.feed = self._feed(job, channel.publish)
                self._channels[job] = channel
            self._viewers += 1
            return Viewing(channel, wake, client, partial(self._leave, job, channel))

    def _check_room(self, channel: _Channel | None, client: str) -> None:
        """With the lock held. Raises TooManyViewers."""
        their = [sum(one.client == client for one in open_.viewers) for open_ in self._channels.values()]
        if self._viewers >= MOST_VIEWERS or (channel is None and len(self._channels) >= MOST_JOBS):
            raise TooManyViewers("too many look at this page at the same time: close some, and reload")
        jobs = sum(count > 0 for count in their)
        if sum(their) >= MOST_VIEWERS // SHARE or (channel is None and jobs >= MOST_JOBS // SHARE):
            raise TooManyViewers("too many look at this page from your address: close some, and reload")

    @property
    def followed(self) -> set[str | None]:
        """The jobs that are followed now; None stands for the list."""
        with self._lock:
            return set(self._channels)

    def close(self) -> None:
        """End all feeds, and wake the viewers. Idempotent."""
        with self._lock:
            self._closed = True
            channels, self._channels = [*self._channels.values()], {}
        for channel in channels:
            channel.end("the page is closing")

    def _feed(self, job: str | None, publish: Publish) -> Closing:
        if job is None:
            return _JobListFeed(self._etcd, self._key_prefix, publish)
        return _JobFeed(self._etcd, self._key_prefix, job, self._rules, publish)

    def _leave(self, job: str | None, channel: _Channel, view: Viewing) -> None:
        with self._lock:
            if channel.viewers.pop(view, None) is None:
                return
            self._viewers -= 1
            is_empty = not channel.viewers
            if is_empty and self._channels.get(job) is channel:
                del self._channels[job]
        if is_empty:
            channel.end("nobody looks")


class Viewing(Closing):
    """One viewer's view of a job, or of the list."""

    def __init__(
        self, channel: _Channel, wake: Callable[[], None], client: str, leave: Callable[[Viewing], None]
    ) -> None:
        self._channel, self.client, self._leave = channel, client, leave  # never change
        channel.viewers[self] = wake

    @property
    def news(self) -> Shown | None:
        """The newest state; None while there is none yet."""
        return self._channel.news

    def close(self) -> None:
        """Close the view. Closing the last one ends the feed, and waits for its thread. Idempotent."""
        self._leave(self)


class _Channel:
    """Connects one feed to its viewers. `news` and `viewers` change in single steps, by any thread."""

    def __init__(self) -> None:
        self.news: Shown | None = None
        self.viewers: dict[Viewing, Callable[[], None]] = {}
        self.feed: Closing | None = None

    @property
    def has_ended(self) -> bool:
        return self.news is not None and self.news.is_last

    def publish(self, news: Shown) -> None:
        if self.has_ended or (news.told is None and news == self.news):
            return
        self.news = news
        for wake in list(self.viewers.values()):
            wake()

    def end(self, why: str) -> None:
        self.publish(replace(self.news or Shown(None), error=why, is_last=True))
        if self.feed is not None:
            self.feed.close()


class _JobFeed(Closing):
    """Reports one job when it, or its history, changes, and whether etcd answers."""

    def __init__(self, etcd: Etcd, key_prefix: str, job: str, rules: Rules, publish: Publish) -> None:
        self._etcd, self._key_prefix, self._job, self._publish = etcd, key_prefix, job, publish  # never change
        timers = TimerLook(etcd, key_prefix, job)
        # Only the thread:
        self._watch = JobWatch(job, rules, timers.newest, every_timer=True)
        self._history: tuple[Sequence[KeyValue], Sequence[KeyValue]] = (), ()
        self._past: Past | None = None  # that was told last
        self._inbox: concurrency.Queue[JobKeys | BaseException | None] = concurrency.inbox()
        self._ending = concurrency.event()
        self._thread = StepThread(self._step, "ftcoord-job-feed", self._wake, lambda: None, self._failed)
        self._follower = follow_job(etcd, key_prefix, job, self._inbox.put, self._inbox.put, with_history=True)
        try:
            self._thread.start()
        except ThreadNotStarted:
            self._follower.close()
            raise

    def close(self) -> None:
        self._thread.close()
        self._follower.close()

    def _step(self) -> None:
        keys = newest(self._inbox)
        if self._thread.closed:
            return
        began = concurrency.now()
        try:
            has_changed = self._watch.next(keys, self._probe) is not None
        except ClientClosed:
            raise
        except EtcdError as error:  # it never answered yet
            self._publish(Shown(None, str(error)))
            return
        if keys is not None and keys.rounds.events is not None and keys.quorum.events is not None:
            self._history = keys.rounds.events, keys.quorum.events
        if self._watch.last is not None:
            self._tell(self._watch.last, has_changed)
        if keys is not None:
            self._ending.wait(max(FEED_REST, 2 * (concurrency.now() - began)))

    def _tell(self, now: Watched, has_changed: bool) -> None:
        past = past_of(now.status, *self._history)
        if has_changed or past != self._past:
            self._past = past
            self._publish(Shown(now.status, now.error, past))

    def _probe(self, lost: bool) -> JobKeys | None:
        return probe(self._etcd, self._key_prefix, self._job, lost=lost)

    def _wake(self) -> None:
        self._ending.set()
        self._inbox.put(None)

    def _failed(self, error: BaseException) -> None:
        status = self._watch.last.status if self._watch.last else None
        self._publish(Shown(status, f"the page's watch has ended: {error}", self._past, is_last=True))


class _JobListFeed(Closing):
    """Reports the list of jobs, by reading it again and again: following all jobs at once has no bound."""

    def __init__(self, etcd: Etcd, key_prefix: str, publish: Publish) -> None:
        self._etcd, self._key_prefix, self._publish = etcd, key_prefix, publish  # never change
        self._last: JobList | None = None  # only the thread
        self._ending = concurrency.event()
        self._thread = StepThread(self._step, "ftcoord-job-list", self._ending.set, lambda: None, self._failed)
        self._thread.start()

    def close(self) -> None:
        self._thread.close()

    def _step(self) -> None:
        began = concurrency.now()
        try:
            self._last = read_jobs(self._etcd, self._key_prefix)
        except ClientClosed:
            raise
        except EtcdError as error:
            self._publish(Shown(self._last, str(error)))
        else:
            self._publish(Shown(self._last))
        self._ending.wait(max(LIST_INTERVAL, 5 * (concurrency.now() - began)))

    def _failed(self, error: BaseException) -> None:
        self._publish(Shown(self._last, f"the page's reading has ended: {error}", is_last=True))


class LeaseBook:
    """The times that members' leases have left: read from etcd once for all viewers. Thread-safe.

    Args:
        etcd: used by one thread at a time.
    """

    def __init__(self, etcd: ReadsLeases) -> None:
        self._etcd = etcd  # never changes
        self._lock = concurrency.lock("LeaseBook._lock")  # guards what follows, and is held while etcd is asked
        self._known: dict[str, tuple[float, LeaseTime | None]] = {}
        self._rests_until = -math.inf

    def of(self, members: list[str]) -> dict[str, LeaseTime]:
        """The leases of these members, up to `LEASE_AGE` old, without those that are gone, or that etcd did not return
        in time. An etcd that has just not answered is not asked."""
        with self._lock:
            now = concurrency.now()
            self._known = {one: known for one, known in self._known.items() if now - known[0] < LEASE_AGE}
            if now >= self._rests_until:
                self._ask((one for one in members if one not in self._known), now)
            asked = {one: self._known[one][1] for one in members if one in self._known}
        return {one: lease for one, lease in asked.items() if lease is not None}

    def _ask(self, members: Iterable[str], now: float) -> None:
        """With the lock held."""
        try:
            for one in members:
                left = max(now + LEASE_TIMEOUT - concurrency.now(), 0)
                self._known[one] = now, read_lease(self._etcd, one, left)
        except EtcdError:  # whoever follows the job says that etcd is away
            self._rests_until = concurrency.now() + LEASE_AGE
