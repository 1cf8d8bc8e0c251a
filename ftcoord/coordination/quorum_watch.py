"""Reports lost members of a quorum to another member, and costs etcd almost nothing while none is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Final, TypeAlias

from ftcoord import concurrency
from ftcoord.closing import Closing
from ftcoord.concurrency import StepThread
from ftcoord.coordination import checks
from ftcoord.coordination.address import Job
from ftcoord.coordination.connection import connect
from ftcoord.core.layout import decided_key, decided_span, member_of, members_span, roster_key
from ftcoord.core.losses import Loss, Losses
from ftcoord.core.quorum_head import parse_quorum
from ftcoord.core.quorum_records import parse_replica
from ftcoord.errors import RequestRefused
from ftcoord.etcd.api import Etcd, Get
from ftcoord.etcd.shared import SharedClient
from ftcoord.primitives.deaths import causes_of
from ftcoord.primitives.group.parse_cache import ParsedKeys
from ftcoord.primitives.mirror import Feed

log = logging.getLogger(__name__)

LOOKED_BACK: Final = 100
"""How many past quorums to search: a rank's quorum is almost always the last one."""

OnLost: TypeAlias = Callable[[int, str, str], object]
"""Called with a quorum's id, a replica id, and the cause, which may be empty."""
OnFailed: TypeAlias = Callable[[int, BaseException], object]
"""Called with the id of a quorum that is no longer watched, and the error that ended the watch."""


class QuorumWatch(Closing):
    """Watches for lost members of the quorum that a process is in. Thread-safe.

    An `Observer` gets every request and every decision of a job. This class is for every rank of a job: it reads the
    quorum once, at the start, and from then on etcd sends it only the members that are gone.

    Args:
        addr: the job's address, see `LighthouseClient`.
        connect_timeout: how long to wait for etcd, a timedelta.
        on_lost: called on a thread of this watch with the quorum's id, the replica id and the cause, when a member of
            the quorum has died; or, with an empty cause, when it is gone and no replica of its name is back after a
            heartbeat timeout. It may be called again for the same member.
        on_failed: called on a thread of this watch when it fails with an unexpected error, which is logged, or when its
            client is closed. Losses of this quorum are no longer reported; the next `follow` starts again.

    Raises TypeError and ValueError for bad arguments, and RuntimeError when etcd does not answer in time. While etcd is
    unreachable nothing is reported; losses are reported when it is back. A watch that nobody refers to is closed; the
    callbacks must not refer to it.
    """

    def __init__(self, addr: str, connect_timeout: timedelta, on_lost: OnLost, on_failed: OnFailed) -> None:
        limit = checks.seconds("connect_timeout", connect_timeout)
        self._job, self._etcd = connect(checks.string("addr", addr), limit)
        self._on_lost, self._on_failed = on_lost, on_failed  # never change
        self._lock = concurrency.lock("QuorumWatch._lock")  # guards the next two
        self._vigils: list[_Vigil] = []
        """The watch over the current quorum, if there is one."""
        self._closed = False
        self._cancel_finalizer = concurrency.when_forgotten(self, _end, self._vigils, self._etcd, last=True)

    def follow(self, quorum_id: int) -> None:
        """Watch this quorum from now on, and no other. Does nothing after `close()`.

        Raises ThreadNotStarted; the previous quorum is then still watched.
        """
        with self._lock:
            before = self._vigils.copy()
            if not self._closed:
                self._vigils[:] = [_Vigil(self._etcd, self._job, quorum_id, self._on_lost, self._on_failed)]
        for vigil in before:
            vigil.close()

    def close(self) -> None:
        """Stop reporting. Waits for a running call of `on_lost`, unless that calls this. Idempotent."""
        self._cancel_finalizer()
        with self._lock:
            self._closed = True
        _end(self._vigils, self._etcd)


class _Vigil:
    """The watch over one quorum; its thread ends with `close()`."""

    def __init__(self, etcd: Etcd, job: Job, quorum_id: int, on_lost: OnLost, on_failed: OnFailed) -> None:
        self._etcd, self._job, self._quorum_id, self._on_lost = etcd, job, quorum_id, on_lost  # never change
        self._feed = self._new_feed()  # replaced by the thread alone; `close()` wakes whichever there is
        # Only the thread:
        self._present: set[str] = set()
        self._losses: Losses | None = None
        self._replicas = ParsedKeys(parse_replica)
        self._thread = StepThread(
            self._step,
            f"ftcoord-vigil-{quorum_id}",
            wake=lambda: self._feed.wake(),
            end=lambda: self._feed.close(),
            failed=lambda error: on_failed(quorum_id, error),
        )
        self._thread.start()

    def close(self) -> None:
        self._thread.close()

    # -- the thread ---------------------------------------------------------------------------------------------

    def _step(self) -> None:
        if self._losses is None:
            self._losses = Losses(self._seats(), self._job.heartbeat_timeout)
        if self._feed.synced:
            self._note_gone(self._losses)
            if self._losses.due <= concurrency.now():
                self._judge(self._losses)
                return
        news = self._feed.next(min(self._losses.due - concurrency.now(), concurrency.LONGEST_WAIT))
        for change in news.changes if news is not None else ():
            if change.now is None:
                self._present.discard(member_of(change.key))
            else:
                self._present.add(member_of(change.key))

    def _note_gone(self, losses: Losses) -> None:
        gone = losses.gone(self._present)
        if not gone:
            return
        causes = causes_of(self._etcd, self._job.prefix, gone)
        for member in gone:
            loss = losses.note(member, causes.get(member, ""), concurrency.now())
            if loss is not None:
                self._tell(loss)

    def _judge(self, losses: Losses) -> None:
        found = self._etcd.range(Get(members_span(self._job.prefix))).kvs
        names = {one.request.replica_id for _, one in self._replicas.of(found)}
        now = concurrency.now()
        lost, back = losses.judge(names, causes_of(self._etcd, self._job.prefix, losses.over(now)), now)
        if back:  # under other member ids, which the feed does not know; and the next decision has them
            self._feed.close()
            self._feed, self._losses = self._new_feed(), None
            self._present.clear()
        for loss in lost:
            self._tell(loss)

    def _tell(self, loss: Loss) -> None:
        if not self._thread.closed:
            self._on_lost(self._quorum_id, loss.replica_id, loss.cause)

    def _seats(self) -> Mapping[str, str]:
        """The replica ids of the quorum's members, by member id; empty if etcd no longer has the quorum."""
        head, revision = decided_key(self._job.prefix), 0  # the newest
        for _ in range(LOOKED_BACK):
            try:
                kvs = self._etcd.range(Get(decided_span(self._job.prefix), revision=revision)).kvs
            except RequestRefused as error:
                log.debug("etcd's history ends: %s", error)
                break
            found = {kv.key: kv for kv in kvs}
            if head not in found:
                break
            roster = found.get(roster_key(head))
            quorum = parse_quorum(head, found[head].value, roster.value if roster else None)
            if quorum.id == self._quorum_id:
                return {seat.member: seat.request.replica_id for seat in quorum.seats}
            if quorum.id < self._quorum_id:
                break
            revision = found[head].mod_revision - 1
        log.warning("quorum %d is not in etcd's history: nobody is told of who is lost of it", self._quorum_id)
        return {}

    def _new_feed(self) -> Feed:
        return Feed(self._etcd, members_span(self._job.prefix), deletes_only=True)


def _end(vigils: list[_Vigil], etcd: SharedClient) -> None:
    for vigil in vigils:
        vigil.close()
    etcd.close()
