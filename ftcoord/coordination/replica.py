"""One replica's part in the quorums of a job: its beats, its requests, and what was decided."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from ftcoord import concurrency
from ftcoord.coordination.address import Job
from ftcoord.coordination.policy import LEASE_FLOOR, Heard, QuorumPolicy
from ftcoord.core.quorum import QuorumRecord, QuorumRequest
from ftcoord.core.quorum_records import ReplicaRecord, encode
from ftcoord.errors import EtcdError, LeaseLost
from ftcoord.etcd.api import Etcd, Get, Span
from ftcoord.etcd.retry import UNANSWERED, retry
from ftcoord.primitives.group.membership import Membership
from ftcoord.primitives.lease_keeper import LeaseKeeper
from ftcoord.primitives.write_once import SHORTEST_WRITE_ATTEMPT

log = logging.getLogger(__name__)

RECORD_TTL: Final = 7 * 24 * 3600
"""Seconds that the last quorum is remembered when all replicas are gone, so that its id does not come again."""
WITHDRAW_TIMEOUT: Final = 0.5
"""Seconds that a caller whose time is over waits for its request to be taken back."""
IMPATIENCE: Final = 5.0
"""Seconds without a decision until a replica that waits decides too: the decider's interpreter may be stuck."""
SPREAD: Final = 0.1
"""Seconds more for each replica of the last quorum. Everyone waits a random part of them: few look at a time."""
LONGEST_SPREAD: Final = 10.0
LOOK: Final = 2.0
"""Seconds that it decides, too. It then waits again: the decider may well be right to wait."""
_TRANSIENT: Final = (*UNANSWERED, LeaseLost)


class Replica:
    """A replica in a job. Thread-safe; nothing is written before the first beat or request.

    Args:
        etcd: the door to etcd.
        job: the job and its rules.
        replica_id: its name; of several members with one name the last one counts that came, or that asked.
        kept: whether its lease is kept alive between calls too. If not, each call is one beat.
        lease_keeper: what keeps its leases alive while this interpreter is stuck.
        impatience: held by the one that has become impatient, of all replicas in this process: one is enough, and
            each costs a mirror of all members.
    """

    def __init__(
        self,
        etcd: Etcd,
        job: Job,
        replica_id: str,
        *,
        kept: bool,
        lease_keeper: LeaseKeeper | None = None,
        impatience: concurrency.Lock | None = None,
        timeout: float = 5.0,
    ) -> None:
        self.replica_id = replica_id
        self._etcd, self._job, self._kept, self._timeout = etcd, job, kept, timeout
        self._lease_keeper = lease_keeper
        self._impatience = impatience or threading.Lock()
        self._impatient = False
        self._by_beats = job.heartbeat_timeout < LEASE_FLOOR
        self._writing = threading.Lock()
        self._changed = threading.Condition()
        self._member: Membership[QuorumRecord] | None = None
        self._ids: set[str] = set()
        self._record = ReplicaRecord(QuorumRequest(replica_id, "", "", 0, 0, False, "", 0, ()), 0, 0, 0)
        self._asked = self._answered = 0
        self._heard = Heard()
        self._left = self._unwritten = False
        self._waiting = 0

    @property
    def quorum(self) -> QuorumRecord | None:
        """The last quorum of the job that is known here, whoever is in it."""
        member = self._member
        return member.record if member else None

    @property
    def lease(self) -> int:
        """The lease that it lives under now; 0 before its first beat. Keys of its own go under it too."""
        member = self._member
        return member.session.lease_id if member else 0

    @property
    def joined(self) -> bool:
        """Whether it is a member of the job, as far as is known here."""
        member = self._member
        return member is not None and member.entered and not member.lost

    def ask(self, request: QuorumRequest, deadline: float, gone: concurrency.Event | None = None) -> QuorumRecord:
        """The next quorum with this replica in it, decided after it asked.

        Raises TimeoutError after the monotonic `deadline`, or when the caller is `gone` (see `nudge`), and takes the
        request back; EtcdError if etcd refuses; and StateError when what was decided is not ours to read.
        """
        gone = gone or threading.Event()
        with self._changed:
            self._waiting += 1
        answered = False
        try:
            asked = self._put(request, deadline, gone)
            quorum = self._await(asked, deadline, gone)
            answered = self._is_seated(quorum)
            return quorum
        finally:
            if not answered:
                self._withdraw()
            self._rest()

    def beat(self, deadline: float) -> None:
        """Show that it lives. Raises TimeoutError after the monotonic `deadline`, and EtcdError if etcd refuses."""
        with self._turn(deadline):
            self._insist(self._beat, deadline, threading.Event())

    def nudge(self) -> None:
        """Have those that wait look at once whether they are `gone`."""
        with self._changed:
            self._changed.notify_all()

    def await_loss(self, timeout: float | None) -> None:
        """Until its lease is lost or it left; at most for so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._member is None or self._member.lost, timeout)

    def leave(self, timeout: float) -> None:
        """Be gone at once, for good. Idempotent; never raises for an etcd that is away for `timeout` seconds."""
        member = self._part()
        if member is not None:
            self._forget(member)
            member.leave(timeout)

    def abandon(self) -> None:
        """Take part no more, for good, but live on for others until the lease expires by itself. Idempotent."""
        member = self._part()
        if member is not None:
            self._forget(member)
            member.lose()

    def _part(self) -> Membership[QuorumRecord] | None:
        with self._changed:
            self._left = True
            member, self._member = self._member, None
            self._changed.notify_all()
        return member

    # -- writing ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _turn(self, deadline: float) -> Iterator[None]:
        """One writes at a time, and others wait no longer than they want to."""
        left = max(deadline - time.monotonic(), 0)
        if not self._writing.acquire(timeout=min(left, threading.TIMEOUT_MAX)):
            raise TimeoutError("another call of this replica was not done in time")
        try:
            yield
        finally:
            self._writing.release()

    def _put(self, request: QuorumRequest, deadline: float, gone: concurrency.Event) -> int:
        with self._turn(deadline):
            self._asked += 1
            self._record = ReplicaRecord(request, self._asked, 0, self._record.beat)
            if not self._write_soon(deadline):
                self._insist(self._write, deadline, gone)
            return self._asked

    def _write_soon(self, deadline: float) -> bool:
        """Write without waiting for the outcome, as a member that is there already may: `_await` sees to a failure."""
        member = self._member
        if member is None or member.lost or not member.entered:
            return False
        self._unwritten = False
        member.session.wake()
        timeout = min(self._timeout, max(deadline - time.monotonic(), SHORTEST_WRITE_ATTEMPT))
        member.enter_soon(self._value(), timeout, lambda written: self._note_written(member, written))
        return True

    def _note_written(self, member: Membership[QuorumRecord], written: bool) -> None:
        if written:
            return  # whoever waits, waits on
        with self._changed:
            if member is self._member:
                self._unwritten = True
            self._changed.notify_all()

    def _insist(self, attempt: Callable[[], None], deadline: float, gone: concurrency.Event) -> None:
        """Until etcd answers. A lost lease is replaced by a new one."""
        try:
            retry(attempt, _TRANSIENT, deadline, gone)
        except UNANSWERED as error:
            raise TimeoutError(str(error)) from None

    def _beat(self) -> None:
        member = self._live()
        self._record = replace(self._record, beat=self._record.beat + 1)
        if self._by_beats or not member.entered:
            member.enter(self._value())
        else:
            try:
                member.session.renew(self._timeout)
            except LeaseLost:
                member.lose()
                raise

    def _write(self) -> None:
        self._live().enter(self._value())
        self._unwritten = False

    def _value(self) -> bytes:
        """What it asks, if that is open still: what was answered is no request, also of a new member's."""
        asked = self._record.asked if self._record.asked > self._answered else 0
        return encode(replace(self._record, asked=asked, after=self._heard.highest.id))

    def _live(self) -> Membership[QuorumRecord]:
        """This replica's membership, with its lease kept if somebody waits: a new one if the last is lost."""
        member = self._member
        if member is None or member.lost:
            if member is not None:
                self._forget(member)  # first: etcd may be away for as long as its lease would be kept alive for nobody
                self._give_up(member)
            job = self._job
            member = Membership(
                self._etcd,
                job.prefix,
                QuorumPolicy(job.options, job.heartbeat_timeout, self._look, self._heard),
                self._heard.read,
                self._changed,
                ttl=max(math.ceil(job.heartbeat_timeout), 1),
                record_ttl=RECORD_TTL,
                timeout=self._timeout,
                restless=True,
            )
            self._adopt(member)
            if not self._kept and not self._waiting:
                member.session.rest()
        elif self._kept or self._waiting:
            member.session.wake()
        return member

    def _adopt(self, member: Membership[QuorumRecord]) -> None:
        """Raises TimeoutError if the replica left meanwhile: nobody would end this membership."""
        with self._changed:
            left = self._left
            if not left:
                self._member = member
                self._ids.add(member.id)
        if left:
            member.leave(WITHDRAW_TIMEOUT)
            raise TimeoutError("the replica left")
        if self._lease_keeper is not None:
            self._lease_keeper.keep(int(member.id, 16), member.session.ttl)

    def _look(self) -> dict[str, int]:
        members = Get(Span(f"{self._job.prefix}/members/", is_prefix=True), keys_only=True)
        return {kv.key: kv.mod_revision for kv in self._etcd.range(members, timeout=self._timeout).kvs}

    def _forget(self, member: Membership[QuorumRecord]) -> None:
        if self._lease_keeper is not None:
            self._lease_keeper.drop(int(member.id, 16))

    def _give_up(self, member: Membership[QuorumRecord]) -> None:
        """A member can be lost while its lease lives on: others would wait for it, or for what it decides."""
        try:
            self._etcd.revoke(member.session.lease_id, timeout=WITHDRAW_TIMEOUT)
        except EtcdError as error:
            log.debug("the lease of a lost member expires by itself: %s", error)

    def _withdraw(self) -> None:
        """Nobody asks any more, unless there is another caller of the same replica."""
        with self._changed:
            if self._waiting > 1:
                return
            self._answered = self._asked
            member = self._member
        if member is None or member.lost or not self._writing.acquire(timeout=WITHDRAW_TIMEOUT):
            return
        try:
            self._record = replace(self._record, beat=self._record.beat + 1)
            member.enter(self._value(), WITHDRAW_TIMEOUT)
        except EtcdError as error:
            log.info("a request of replica %s was not taken back: %s", self.replica_id, error)
        finally:
            self._writing.release()

    def _rest(self) -> None:
        with self._changed:
            self._waiting -= 1
            member = self._member
            if self._waiting:
                return
            if self._impatient:
                self._impatient = False
                self._impatience.release()
            if member is None:
                return
            member.group.hurry(False)
            if not self._kept:
                member.session.rest()

    # -- waiting ------------------------------------------------------------------------------------------------

    def _await(self, asked: int, deadline: float, gone: concurrency.Event) -> QuorumRecord:
        hurry_at = time.monotonic() + self._patience()
        while True:
            with self._changed:
                member = self._member
                if member is None:
                    raise TimeoutError("the replica left")
                if member.problem is not None:
                    raise member.problem
                if member.record is not None and self._is_answered(member.record, asked):
                    self._answered = max(self._answered, asked)
                    return member.record
                missed = member.record is not None and self._was_missed(member.record, asked)
                now = time.monotonic()
                if now >= deadline or gone.is_set():
                    raise TimeoutError("no quorum was decided in time")
                if not (member.lost or missed or self._unwritten):
                    self._changed.wait(min(deadline, max(hurry_at, now + 1)) - now)
            if missed:
                asked = self._put(self._record.request, deadline, gone)
            elif member.lost or self._unwritten:
                with self._turn(deadline):
                    self._insist(self._write, deadline, gone)
            elif time.monotonic() >= hurry_at:
                hurry_at = time.monotonic() + self._hurry_or_rest(member)

    def _patience(self) -> float:
        """Seconds that it waits for the decider; others wait longer or shorter."""
        quorum = self.quorum
        size = len(quorum.seats) if quorum else self._job.min_replicas
        return IMPATIENCE + random.uniform(0, min(SPREAD * size, LONGEST_SPREAD))

    def _hurry_or_rest(self, member: Membership[QuorumRecord]) -> float:
        """Decide too, or no more; seconds until the other."""
        with self._changed:
            if self._impatient:
                self._impatient = False
                self._impatience.release()
            else:
                self._impatient = self._impatience.acquire(blocking=False)
            member.group.hurry(self._impatient)
            return LOOK if self._impatient else self._patience()

    def _is_answered(self, quorum: QuorumRecord, asked: int) -> bool:
        return any(quorum.seated.get(member, 0) >= asked for member in self._ids)

    def _is_seated(self, quorum: QuorumRecord) -> bool:
        """Whether it was answered as the member that it is now: an older one's seat leaves this one's request open."""
        member = self._member
        return member is None or member.id in quorum.seated

    def _was_missed(self, quorum: QuorumRecord, asked: int) -> bool:
        """Whether the quorum that answered this was replaced before it was seen here."""
        return any(quorum.answered.get(member, 0) >= asked for member in self._ids)
