"""One replica's part in the quorums of a job: its signs of life, its requests, and the decisions."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from functools import partial
from typing import Final

from ftcoord import concurrency
from ftcoord.coordination.address import Job
from ftcoord.coordination.connection import REQUEST_TIMEOUT
from ftcoord.coordination.policy import QuorumUse, asking, idle, nothing_of
from ftcoord.core.death_records import Death
from ftcoord.core.quorum import FAILED_COMMITS, failing
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest, ReplicaRecord, encode
from ftcoord.core.strict import LARGEST
from ftcoord.core.verdict import Standing
from ftcoord.errors import EtcdError, EtcdUnavailable, LeaseLost, OutcomeUnknown, RequestRefused, ServerError
from ftcoord.escaping import named
from ftcoord.etcd.api import Etcd
from ftcoord.etcd.retry import TimeLimit
from ftcoord.logs import ending, log_change
from ftcoord.metrics import process as metrics
from ftcoord.primitives.deaths import causes_known, causes_of
from ftcoord.primitives.group.participant import TAKE_BACK_TIMEOUT, Left, Participant, ParticipantOptions
from ftcoord.primitives.group.use import Look

log = logging.getLogger(__name__)

RECORD_TTL: Final = 7 * 24 * 3600
"""Seconds that the last quorum outlives the last replica, so that its id is not given again."""
CAUSE_TIMEOUT: Final = 1.0
"""Seconds that a decided quorum may be delayed by reads for its log lines."""
WORD_TIMEOUT: Final = 0.5
"""Seconds that a leaving replica may take to write that it leaves."""
LARGEST_REQUEST: Final = 64 * 1024
"""Bytes of JSON of a request. The requests of all replicas are decided in one transaction, of 1.5 MiB at most, so one
that is too large would stop all others too."""
_MOST_BYTES: Final = 12
"""Bytes of JSON for one character."""
LEFT: Final = "its manager was closed"
FIRST_LINE: Final = 5.0
"""Seconds until a waiting call logs for the first time for what it waits."""
LINE_INTERVAL: Final = 30.0
"""Seconds between two such lines of a call."""


class Replica:
    """A replica in a job. Thread-safe; nothing is written before the first beat or request.

    It ends with `leave()`, which revokes its lease, or `orphan()`, which lets it expire; both are final.

    Args:
        etcd: the etcd client.
        job: the job and its rules.
        replica_id: its name. Several members with one name are one replica: the last request counts for all of them.
        keeps_lease: whether its lease is kept alive between calls. If not, each call counts as one beat.
        dies_with_process: whether it is gone when this process dies. If not, its lease expires.
    """

    def __init__(
        self, etcd: Etcd, job: Job, replica_id: str, *, keeps_lease: bool, dies_with_process: bool = True
    ) -> None:
        self.replica_id, self.job, self._etcd = replica_id, job, etcd  # never change
        # Any thread that asks: they only matter to log lines.
        self._warned = False
        """Whether commits failed when it asked last."""
        self._last: QuorumRecord | None = None
        causes = partial(causes_known, etcd, job.prefix, timeout=CAUSE_TIMEOUT)
        self._use = QuorumUse(job, replica_id, causes, self.nudge)
        self._participant: Participant[QuorumRecord, ReplicaRecord] = Participant(
            etcd,
            self._use,
            ParticipantOptions(
                math.ceil(job.heartbeat_timeout),
                RECORD_TTL,
                REQUEST_TIMEOUT,
                keeps_lease=keeps_lease,
                dies_with_process=dies_with_process,
            ),
        )

    @property
    def quorum(self) -> QuorumRecord | None:
        """The job's last quorum that is known here, with or without this replica."""
        return self._participant.record

    @property
    def joined(self) -> bool:
        """Whether it is a member of the job, as far as is known here."""
        return self._participant.joined

    def was(self, member: str) -> bool:
        """Whether it is the member with this id, or was before it lost a lease."""
        return self._participant.was(member)

    def ask(self, request: QuorumRequest, deadline: float, gone: concurrency.Event | None = None) -> QuorumRecord:
        """The next quorum that contains this replica, decided after it asked.

        Raises TimeoutError after the monotonic `deadline`, or when the caller is `gone` (see `nudge`), and withdraws
        the request; RequestRefused, before anything is written, for a request of more than `LARGEST_REQUEST` bytes;
        ServerError once it has left; EtcdError if etcd refuses; StateError when the decided record cannot be read;
        ThreadFailed.
        """
        check_request(request)
        if gone is not None and gone.is_set():
            raise TimeoutError("the caller went away")
        pace = _QuorumPace(self, request, deadline, gone or concurrency.event())
        answered, began = False, concurrency.now()
        try:
            with _in_time(self.replica_id):
                look = self._participant.ask(asking(request), pace)
            quorum = look.record
            assert quorum is not None
            self._use.takes(quorum, look.ask.asked)
            answered = self._is_answered(quorum)
            seconds = concurrency.now() - began
            metrics.note_quorum(self.job.name, quorum.id, len(quorum.seats), request.step, seconds)
            self._log_quorum(quorum)
            self._log_failures(quorum, request)
            return quorum
        finally:
            if not answered:
                metrics.QUORUM_FAILURES.add(self.job.name)
                self._participant.withdraw(idle(request))

    def beat(self, deadline: float) -> None:
        """Show that the replica is alive.

        Raises TimeoutError after the monotonic `deadline`, ServerError once it has left, and EtcdError if etcd refuses.
        """
        with _in_time(self.replica_id):
            self._participant.touch(idle(nothing_of(self.replica_id)), deadline, again=False)

    def nudge(self) -> None:
        """Make waiting calls check at once whether their callers are `gone`."""
        self._participant.nudge()

    def await_loss(self, timeout: float | None) -> None:
        """Wait, at most `timeout` seconds, until it is no member: its lease is lost, it left, or it could not
        rejoin."""
        self._participant.wait_for(lambda: not self._participant.joined, timeout)

    def leave(self, timeout: float, cause: str = "") -> None:
        """Leave at once, and write that it left; or with a `cause`, that it died of that. Idempotent; takes at most
        `timeout` seconds, and does not raise, if etcd is unreachable."""
        within = TimeLimit.of(timeout)
        self._participant.stop()
        if self._participant.joined:
            death = Death(cause or LEFT, int(concurrency.wall() * 1000), left=not cause)
            # The rest is for the lease: giving that up counts for more.
            word = TimeLimit(WORD_TIMEOUT, within.deadline - TAKE_BACK_TIMEOUT)
            self._participant.farewell(idle(nothing_of(self.replica_id)), death, word)
        self._participant.leave(within.left())
        self._use.leave()

    def orphan(self) -> None:
        """Stop taking part, without revoking: for the others it is alive until its lease expires. Idempotent."""
        self._participant.stop()
        self._participant.orphan()
        self._use.leave()

    def _log_quorum(self, quorum: QuorumRecord) -> None:
        """Log one line for each quorum with new members, and one for each member that died, which costs a read."""
        last, self._last = self._last, quorum
        if last is None or last.names != quorum.names:  # not after failed commits, without end
            self._log_members(quorum)
        gone = last.seated.keys() - quorum.seated.keys() if last is not None else set()
        if not gone:
            return
        assert last is not None
        names = {seat.member: seat.request.replica_id for seat in last.seats}
        try:
            causes = causes_of(self._etcd, self.job.prefix, gone, timeout=CAUSE_TIMEOUT)
        except EtcdError as error:
            log.debug("why members are gone cannot be told: %s", error)
            return
        run = self.job.name
        for member, cause in causes.items():
            text = f"job {run!r}: quorum {quorum.id} goes on without replica {names[member]}: {cause}"
            log_change(log, text, logging.WARNING, run=run, quorum=quorum.id, replica=names[member], reason=cause)

    def _log_members(self, quorum: QuorumRecord) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        run, me, member = self.job.name, self.replica_id, self._participant.member
        names = [seat.request.replica_id for seat in quorum.seats]
        rank = names.index(me) if me in names else None
        place = f"is rank {rank} of {len(names)}" if rank is not None else f"is not among the {len(names)}"
        text = f"job {run!r}, quorum {quorum.id}: replica {me} {place}: {named(names)}"
        id_, revision = (member.id, member.record_kv and member.record_kv.mod_revision) if member else (None, None)
        log_change(log, text, run=run, quorum=quorum.id, rank=rank, replica=me, member=id_, revision=revision)

    def _log_failures(self, quorum: QuorumRecord, request: QuorumRequest) -> None:
        """Warn once of commits that fail again and again."""
        warned, self._warned = self._warned, request.commit_failures >= FAILED_COMMITS
        if self._warned and not warned:
            run, trouble = self.job.name, failing(quorum, self.job.min_replicas)
            text = f"job {run!r}: {trouble}"
            log_change(log, text, logging.WARNING, run=run, quorum=quorum.id, replica=self.replica_id, reason=trouble)

    def _log_waiting(self, deadline: float) -> None:
        """Log for what a call waits."""
        run, me, why = self.job.name, self.replica_id, self._why()
        text = f"job {run!r}: replica {me} waits for a quorum{why and ': '}{why}; {ending(deadline)}"
        log_change(log, text, run=run, replica=me, reason=why)

    def _why(self) -> str:
        """Why a call gets no quorum, as this process or another one that decides has found; empty if nobody told."""
        return self._participant.reason or self._use.why

    def _ask_again(self, request: QuorumRequest, seconds: float) -> None:
        # Not in time: another call writes, or etcd is away. If the lease is lost the outlook says so, and the call
        # joins again in its own time, which is longer than this.
        with contextlib.suppress(TimeoutError, EtcdUnavailable, OutcomeUnknown, LeaseLost):
            self._participant.touch(idle(request), concurrency.now() + seconds, again=True)

    def _is_answered(self, quorum: QuorumRecord) -> bool:
        """Whether the present member was answered: a seat of an earlier one may leave this one's request open."""
        member = self._participant.member
        return member is None or member.id in quorum.answered


class _QuorumPace:
    """One call's wait for a quorum. For the calling thread; `see` and `wake_at` run under the participant's lock."""

    def __init__(self, replica: Replica, request: QuorumRequest, deadline: float, gone: concurrency.Event) -> None:
        self.deadline, self.gone, self._replica, self._request = deadline, gone, replica, request
        self._every, now = replica.job.heartbeat_timeout, concurrency.now()
        self._again_at, self._line_at = now + self._every, now + FIRST_LINE

    def see(self, look: Look[QuorumRecord, ReplicaRecord]) -> Standing:
        return look.standing

    def wake_at(self, standing: Standing) -> float:
        return 0.0 if self.gone.is_set() else min(self.deadline, self._again_at, self._line_at)

    def tick(self, look: Look[QuorumRecord, ReplicaRecord]) -> None:
        """Raises TimeoutError."""
        now = concurrency.now()
        if now >= self.deadline or self.gone.is_set():
            why = "" if self.gone.is_set() else self._replica._why()
            raise TimeoutError(f"no quorum was decided in time{why and ': '}{why}")
        if now >= self._again_at:
            # A later member of the same name that does not ask hides this request until it comes again.
            self._again_at = now + self._every
            self._replica._ask_again(self._request, min(self._every, self.deadline - now))
        if now >= self._line_at:
            self._line_at = now + LINE_INTERVAL
            if look.standing is Standing.PENDING:
                self._replica._log_waiting(self.deadline)


def check_request(request: QuorumRequest) -> None:
    """Raises RequestRefused for a request that is too large, or that nobody could read: the decider would close the
    connection of all replicas of this process."""
    if not -LARGEST <= min(request.step, request.commit_failures) <= max(request.step, request.world_size) <= LARGEST:
        raise RequestRefused(
            f"replica {request.replica_id[:100]!r} asks with a number that is not from {-LARGEST} to {LARGEST}: see its"
            " step, world_size and commit_failures"
        )
    texts = request.replica_id, request.address, request.store_address, request.data, *request.handles
    if sum(map(len, texts)) * _MOST_BYTES <= LARGEST_REQUEST:  # as nearly always
        return
    if (size := len(encode(ReplicaRecord(request, 0, 0, 0)))) > LARGEST_REQUEST:
        raise RequestRefused(
            f"replica {request.replica_id[:100]!r} asks with {size} bytes of data, addresses and handles, of which all"
            f" members get a copy at each step; the limit is {LARGEST_REQUEST}: share where the data are, not the data"
        )


@contextlib.contextmanager
def _in_time(replica_id: str) -> Iterator[None]:
    """Reports everything that delays an answer as a timeout to the caller, except that the replica was closed."""
    try:
        yield
    except Left:
        raise ServerError(
            f"replica {replica_id} left the job meanwhile: its client or its manager was closed"
        ) from None
    except (EtcdUnavailable, OutcomeUnknown, LeaseLost) as error:  # the last one again and again, until the deadline
        raise TimeoutError(str(error)) from None
