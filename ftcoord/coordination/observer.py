"""Follow a job without taking part: its quorums and lost members, for whoever asks and for each member of a quorum."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from typing import Any, Final, TypeAlias

from ftcoord import concurrency
from ftcoord.closing import Closing, weakly
from ftcoord.concurrency import StepThread
from ftcoord.coordination import checks
from ftcoord.coordination.address import Job
from ftcoord.coordination.connection import connect, torchft_errors
from ftcoord.coordination.types import Quorum as QuorumReply
from ftcoord.coordination.types import quorum_reply
from ftcoord.core.layout import decided_key, member_key, member_of, members_span, record_span
from ftcoord.core.quorum_records import QuorumRecord, parse_quorum, parse_replica
from ftcoord.errors import RequestRefused
from ftcoord.etcd.api import Etcd, Get, KeyValue
from ftcoord.etcd.client import SharedClient
from ftcoord.primitives.deaths import causes_of
from ftcoord.primitives.group.parse_cache import ParsedKeys
from ftcoord.primitives.mirror import Feed, Informer, Mirror

log = logging.getLogger(__name__)


class Observer:
    """Follows one job. Thread-safe.

        def abort(replica_id: str, cause: str) -> None:
            print(replica_id, "is lost:", cause)
            process_group.abort()  # collectives that wait for it end now, not when NCCL times out

        observer = Observer("etcd://h1:2379,h2:2379/job1", timedelta(seconds=10), on_lost=abort)

    With callbacks, etcd sends it every request and every quorum of the job, so use one per job, or per host.

    Args:
        addr: the job's address, see `LighthouseClient`.
        connect_timeout: how long to wait for etcd, a timedelta.
        on_quorum: called with the last quorum, if there is one, and then with every new one. After an interruption it
            may be called only with the last of several.
        on_lost: called with the replica id and the cause when a member of the current quorum dies, leaves or misses its
            heartbeat timeout: long before its peers' collectives time out. Once per quorum and member. The cause is one
            line such as "host7 (pid 4711) was killed by signal 9 (SIGKILL)", or empty if none is known.

    Callbacks run one at a time, on the observer's thread. Their exceptions are logged, and do not stop later callbacks.
    While etcd is unreachable nothing is reported; changes are reported when it is back. An observer that nobody refers
    to is closed. If its thread fails with an unexpected error, the error is logged, callbacks end, and each method
    raises RuntimeError.

    Raises TypeError and ValueError for bad arguments, and RuntimeError when etcd does not answer within
    `connect_timeout`.
    """

    def __init__(
        self,
        addr: str,
        connect_timeout: timedelta,
        *,
        on_quorum: Callable[[QuorumReply], object] | None = None,
        on_lost: Callable[[str, str], object] | None = None,
    ) -> None:
        limit = checks.seconds("connect_timeout", connect_timeout)
        self._job, self._etcd = connect(checks.string("addr", addr), limit)
        prefix = self._job.prefix
        self._on_quorum, self._on_lost, self._prefix = on_quorum, on_lost, prefix
        # Only the informer's thread:
        self._current: QuorumRecord | None = None
        self._reported_lost: set[str] = set()  # members of the current quorum
        # Set once by the informer's thread, read by any:
        self._failure: BaseException | None = None
        self._informers: list[Informer] = []
        if any((on_quorum, on_lost)):
            spans = [record_span(prefix), members_span(prefix)]
            # Weak references: the informer's thread must not keep this object alive.
            with contextlib.ExitStack() as undo:
                undo.callback(self._etcd.close)  # where no thread can be started
                informer = Informer(
                    self._etcd,
                    spans,
                    weakly(self._report),
                    "ftcoord-observer",
                    failed=weakly(self._note_failure),
                )
                self._informers.append(informer)
                undo.pop_all()
        self._cancel_finalizer = concurrency.when_forgotten(self, _end, self._informers, self._etcd, last=True)

    def quorum(self) -> QuorumReply | None:
        """The last quorum; None before the first. Costs one read. Raises RuntimeError when etcd does not answer."""
        with self._answering():
            found = self._etcd.range(Get(record_span(self._prefix)))
            decided = _quorum_in({kv.key: kv for kv in found.kvs}, self._prefix)
            return quorum_reply(decided) if decided is not None else None

    def close(self) -> None:
        """Stop following the job. No callback begins after this returns. Idempotent.

        It waits for a running callback, unless that callback calls it.
        """
        self._cancel_finalizer()
        _end(self._informers, self._etcd)

    # -- how ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Translates errors into torchft's. Raises RuntimeError if the observer's thread has failed."""
        if self._failure is not None:
            problem = f"{type(self._failure).__name__}: {self._failure}"
            raise checks.failed("Internal", f"this observer has failed ({problem}); close it and make a new one")
        with torchft_errors():
            yield

    def _note_failure(self, error: BaseException) -> None:
        self._failure = error

    def _report(self, quorum: Mirror, alive: Mirror) -> None:
        decided = _quorum_in(quorum.kvs, self._prefix)
        if decided is not None and decided != self._current:
            self._current, self._reported_lost = decided, set()
            if self._on_quorum is not None:
                _call(self._on_quorum, quorum_reply(decided))
        self._report_lost(alive.kvs)

    def _report_lost(self, alive: Mapping[str, KeyValue]) -> None:
        if self._on_lost is None or self._current is None:
            return
        for seat in self._current.seats:
            key = member_key(self._prefix, seat.member)
            if key in alive or seat.member in self._reported_lost:
                continue
            # The watch of the decision may be ahead of that of the members, so a new member may only seem to be lost.
            if self._etcd.get(key).one is None:
                cause = causes_of(self._etcd, self._prefix, [seat.member]).get(seat.member, "")
                self._reported_lost.add(seat.member)  # only now: where etcd does not answer, this is called again
                _call(self._on_lost, seat.request.replica_id, cause)


def _quorum_in(kvs: Mapping[str, KeyValue], prefix: str) -> QuorumRecord | None:
    """The decided quorum; None if there is none. Raises StateError."""
    decided = kvs.get(decided_key(prefix))
    if decided is None:
        return None
    return parse_quorum(decided.key, decided.value)


def _call(callback: Callable[..., object], *arguments: Any) -> None:
    try:
        callback(*arguments)
    except Exception:  # a user's: its failure must not end the thread that runs the other callbacks
        log.exception("an observer's callback failed")


LOOKED_BACK: Final = 100
"""How many past quorums to search: a rank's quorum is almost always the last one."""

OnLost: TypeAlias = Callable[[int, str, str], object]
"""Called with a quorum's id, a replica id, and the cause, which may be empty."""
OnFailed: TypeAlias = Callable[[int, BaseException], object]
"""Called with the id of a quorum that is no longer watched, and the error that ended the watch."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A lost member.

    Args:
        member: its id.
        replica_id: its name.
        cause: one line such as "host7 (pid 4711) was killed by signal 9 (SIGKILL)"; empty if no cause is known.
    """

    member: str
    replica_id: str
    cause: str


class Losses:
    """What happened to the members of one quorum.

    A member with a known cause of death is lost. A member that is gone without a cause may have left after its part, or
    may only have lost its lease: it is lost if no replica of its name is back after `timeout` seconds.

    Args:
        seats: the replica ids of the quorum's members, by member id.
        timeout: in seconds.
    """

    def __init__(self, seats: Mapping[str, str], timeout: float) -> None:
        self._timeout = timeout  # never changes
        self._there = dict(seats)
        self._waited_for: dict[str, tuple[str, float]] = {}  # by member id: the replica id, and until when

    @property
    def due(self) -> float:
        """When `judge` has a member to judge; infinite for never."""
        return min((until for _, until in self._waited_for.values()), default=inf)

    def gone(self, present: Collection[str]) -> list[str]:
        """The members that are not present, and that were not passed to `note` yet."""
        return [member for member in self._there if member not in present]

    def note(self, member: str, cause: str, now: float) -> Loss | None:
        """Note that a member is gone; returns the loss, if it is already certain."""
        replica_id = self._there.pop(member)
        if cause:
            return Loss(member, replica_id, cause)
        self._waited_for[member] = (replica_id, now + self._timeout)
        return None

    def over(self, now: float) -> list[str]:
        """The members whose time is over, for `judge`."""
        return [member for member, (_, until) in self._waited_for.items() if until <= now]

    def judge(self, names: Collection[str], causes: Mapping[str, str], now: float) -> tuple[list[Loss], list[str]]:
        """Of the members whose time is over: which are lost, and which are back, because a live member has their name.

        Args:
            names: the replica ids of the live members.
            causes: why members died after they had come back under another lease, by member id.
            now: monotonic seconds.
        """
        replicas = {member: self._waited_for.pop(member)[0] for member in self.over(now)}
        lost = [Loss(member, one, causes.get(member, "")) for member, one in replicas.items() if one not in names]
        return lost, [one for one in replicas.values() if one in names]


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
                kvs = self._etcd.range(Get(record_span(self._job.prefix), revision=revision)).kvs
            except RequestRefused as error:
                log.debug("etcd's history ends: %s", error)
                break
            found = {kv.key: kv for kv in kvs}
            if head not in found:
                break
            quorum = parse_quorum(head, found[head].value)
            if quorum.id == self._quorum_id:
                return {seat.member: seat.request.replica_id for seat in quorum.seats}
            if quorum.id < self._quorum_id:
                break
            revision = found[head].mod_revision - 1
        log.warning("quorum %d is not in etcd's history: nobody is told of who is lost of it", self._quorum_id)
        return {}

    def _new_feed(self) -> Feed:
        return Feed(self._etcd, members_span(self._job.prefix), deletes_only=True)


def _end(watches: Sequence[Informer | _Vigil], etcd: SharedClient) -> None:
    for watch in watches:
        watch.close()
    etcd.close()
