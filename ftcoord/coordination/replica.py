"""One replica's part in the quorums of a job: its signs of life, its requests, the decisions, and orders to it."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from ftcoord import concurrency, errors
from ftcoord.coordination.address import REQUEST_TIMEOUT, Job
from ftcoord.coordination.policy import UNNUMBERED, QuorumUse
from ftcoord.core import layout
from ftcoord.core.death_records import Death
from ftcoord.core.elastic import FINISHED
from ftcoord.core.quorum import FAILED_COMMITS, failing
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest, ReplicaRecord, encode, parse_quorum, parse_replica
from ftcoord.core.strict import LARGEST
from ftcoord.core.verdict import Standing
from ftcoord.escaping import named
from ftcoord.etcd.api import Etcd, Get, KeyValue, Op, Put, Span, exists, unchanged
from ftcoord.etcd.retry import UNANSWERED, TimeLimit, retry_until_answered
from ftcoord.logs import ending, log_change
from ftcoord.metrics import process as metrics
from ftcoord.primitives.deaths import causes_known, causes_of
from ftcoord.primitives.group.participant import TAKE_BACK_TIMEOUT, Left, Participant, ParticipantOptions
from ftcoord.primitives.group.record import ordered
from ftcoord.primitives.group.use import Look
from ftcoord.primitives.mirror import Informer, Mirror
from ftcoord.primitives.write_once import write_once

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
        self._resting = ReplicaRecord(QuorumRequest(replica_id))
        # Any thread that asks: they only matter to log lines.
        self._warned = False
        """Whether commits failed when it asked last."""
        self._last: QuorumRecord | None = None
        causes = partial(causes_known, etcd, job.prefix, timeout=CAUSE_TIMEOUT)
        self._use = QuorumUse(job, replica_id, causes, lambda: self.participant.nudge())
        self.participant: Participant[QuorumRecord, ReplicaRecord] = Participant(
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

    def ask(self, request: QuorumRequest, deadline: float, gone: concurrency.Event | None = None) -> QuorumRecord:
        """The next quorum that contains this replica, decided after it asked.

        Raises TimeoutError after the monotonic `deadline`, or when the caller is `gone` and the participant was nudged,
        and withdraws the request; RequestRefused, before anything is written, for a request of more than
        `LARGEST_REQUEST` bytes; ServerError once it has left; EtcdError if etcd refuses; StateError when the decided
        record cannot be read; ThreadFailed.
        """
        check_request(request)
        if gone is not None and gone.is_set():
            raise TimeoutError("the caller went away")
        pace = _QuorumPace(self, request, deadline, gone or concurrency.event())
        answered, began = False, concurrency.now()
        try:
            with _in_time(self.replica_id):
                look = self.participant.ask(ReplicaRecord(request, UNNUMBERED), pace)
            quorum = look.record
            assert quorum is not None
            self._use.seen.takes(quorum, look.ask.asked)
            answered = self._is_answered(quorum)
            seconds = concurrency.now() - began
            metrics.note_quorum(self.job.name, quorum.id, len(quorum.seats), request.step, seconds)
            self._log_quorum(quorum)
            self._log_failures(quorum, request)
            return quorum
        finally:
            if not answered:
                metrics.QUORUM_FAILURES.add(self.job.name)
                self.participant.withdraw(ReplicaRecord(request))

    def beat(self, deadline: float) -> None:
        """Show that the replica is alive.

        Raises TimeoutError after the monotonic `deadline`, ServerError once it has left, and EtcdError if etcd refuses.
        """
        with _in_time(self.replica_id):
            self.participant.touch(self._resting, deadline, again=False)

    def await_loss(self, timeout: float | None) -> None:
        """Wait, at most `timeout` seconds, until it is no member: its lease is lost, it left, or it could not
        rejoin."""
        self.participant.wait_for(lambda: not self.participant.joined, timeout)

    def leave(self, timeout: float, cause: str = "") -> None:
        """Leave at once, and write that it left; or with a `cause`, that it died of that. Idempotent; takes at most
        `timeout` seconds, and does not raise, if etcd is unreachable."""
        within = TimeLimit.of(timeout)
        self.participant.stop()
        if self.participant.joined:
            death = Death(cause or LEFT, int(concurrency.wall() * 1000), left=not cause)
            # The rest is for the lease: giving that up counts for more.
            word = TimeLimit(WORD_TIMEOUT, within.deadline - TAKE_BACK_TIMEOUT)
            self.participant.farewell(self._resting, death, word)
        self.participant.leave(within.left())
        self._use.leave()

    def orphan(self) -> None:
        """Stop taking part, without revoking: for the others it is alive until its lease expires. Idempotent."""
        self.participant.stop()
        self.participant.orphan()
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
        except errors.EtcdError as error:
            log.debug("why members are gone cannot be told: %s", error)
            return
        for member, cause in causes.items():
            text = f": quorum {quorum.id} goes on without replica {names[member]}: {cause}"
            self._log(text, logging.WARNING, quorum=quorum.id, replica=names[member], reason=cause)

    def _log_members(self, quorum: QuorumRecord) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        me, member = self.replica_id, self.participant.member
        names = [seat.request.replica_id for seat in quorum.seats]
        rank = names.index(me) if me in names else None
        place = f"is rank {rank} of {len(names)}" if rank is not None else f"is not among the {len(names)}"
        text = f", quorum {quorum.id}: replica {me} {place}: {named(names)}"
        id_, revision = (member.id, member.record_kv and member.record_kv.mod_revision) if member else (None, None)
        self._log(text, quorum=quorum.id, rank=rank, replica=me, member=id_, revision=revision)

    def _log_failures(self, quorum: QuorumRecord, request: QuorumRequest) -> None:
        """Warn once of commits that fail again and again."""
        warned, self._warned = self._warned, request.commit_failures >= FAILED_COMMITS
        if self._warned and not warned:
            trouble = failing(quorum, self.job.min_replicas)
            self._log(f": {trouble}", logging.WARNING, quorum=quorum.id, replica=self.replica_id, reason=trouble)

    def _log_waiting(self, deadline: float) -> None:
        """Log for what a call waits."""
        me, why = self.replica_id, self._why()
        text = f": replica {me} waits for a quorum{why and ': '}{why}; {ending(deadline)}"
        self._log(text, replica=me, reason=why)

    def _log(self, text: str, level: int = logging.INFO, **fields: object) -> None:
        log_change(log, f"job {self.job.name!r}{text}", level, run=self.job.name, **fields)

    def _why(self) -> str:
        """Why a call gets no quorum, as this process or another one that decides has found; empty if nobody told."""
        return self.participant.reason or self._use.why

    def _ask_again(self, request: QuorumRequest, seconds: float) -> None:
        # Not in time: another call writes, or etcd is away. If the lease is lost the outlook says so, and the call
        # joins again in its own time, which is longer than this.
        with contextlib.suppress(TimeoutError, *UNANSWERED, errors.LeaseLost):
            self.participant.touch(ReplicaRecord(request), concurrency.now() + seconds, again=True)

    def _is_answered(self, quorum: QuorumRecord) -> bool:
        """Whether the present member was answered: a seat of an earlier one may leave this one's request open."""
        member = self.participant.member
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
        raise errors.RequestRefused(
            f"replica {request.replica_id[:100]!r} asks with a number that is not from {-LARGEST} to {LARGEST}: see its"
            " step, world_size and commit_failures"
        )
    texts = request.replica_id, request.address, request.store_address, request.data, *request.handles
    if sum(map(len, texts)) * _MOST_BYTES <= LARGEST_REQUEST:  # as nearly always
        return
    if (size := len(encode(ReplicaRecord(request, 0, 0, 0)))) > LARGEST_REQUEST:
        raise errors.RequestRefused(
            f"replica {request.replica_id[:100]!r} asks with {size} bytes of data, addresses and handles, of which all"
            f" members get a copy at each step; the limit is {LARGEST_REQUEST}: share where the data are, not the data"
        )


@contextlib.contextmanager
def _in_time(replica_id: str) -> Iterator[None]:
    """Reports everything that delays an answer as a timeout to the caller, except that the replica was closed."""
    try:
        yield
    except Left:
        raise errors.ServerError(
            f"replica {replica_id} left the job meanwhile: its client or its manager was closed"
        ) from None
    except (*UNANSWERED, errors.LeaseLost) as error:  # the last one again and again, until the deadline
        raise TimeoutError(str(error)) from None


# -- orders: to end a manager's process, and to stop an elastic run ----------------------------------------------------

# An order is one key, `kill/<member>`. A manager that reads one for a member that it is, or was, exits. Who gave the
# order watches whether that member goes: nobody answers an order. The other is `run/stop` in an elastic run's store,
# until all of its members have stopped at an agreed step (see `ftcoord.stop`).

LONGEST_REQUEST: Final = 5.0
"""Seconds that one request of an order may take."""
ORDER_TTL: Final = 60
"""Seconds that an order lives: a manager that cannot reach etcd for so long does not end."""
_STILL_THERE: Final = (
    f"it is still a member, and may end yet: the order stands for {ORDER_TTL} s. Only a ManagerServer obeys one, or a "
    "manager behind a gateway, while etcd can be reached: see its log"
)


def watch_kills(
    etcd: Etcd, prefix: str, obey: Callable[[KeyValue], object], failed: Callable[[BaseException], None]
) -> Informer:
    """Call `obey` with each order of the job, on the watch's thread, after each change of any.

    All orders are watched, because there are hardly any; so a member that changes its lease needs no new watch.
    `failed` is called when the watch fails.
    """

    def look(orders: Mirror) -> None:
        for order in orders.kvs.values():
            obey(order)

    return Informer(etcd, [layout.kills_span(prefix)], look, "ftcoord-kills", failed)


def order_kill(
    etcd: Etcd, prefix: str, replica_id: str, message: str, deadline: float, also: Sequence[Op] = ()
) -> None:
    """End the process of the newest manager with this replica id; returns when its member is gone. A later manager of
    that id is left alone. The operations in `also` are part of the order's transaction, which may be repeated.

    Raises NotInQuorum if there is no such replica, and EtcdError. Raises TimeoutError after the monotonic `deadline`:
    the order stands until its lease ends, so the process may end yet.
    """
    within = TimeLimit(LONGEST_REQUEST, deadline)
    member = _newest(etcd, prefix, replica_id, within)
    if member is None:
        raise errors.NotInQuorum(replica_id)
    there = layout.member_key(prefix, member)
    try:
        order = Put(layout.kill_key(prefix, member), message.encode(), etcd.grant(ORDER_TTL, timeout=within.left()).id)
        # Only while the member is there. To write the order twice does no harm: a successor is another member.
        write = partial(etcd.txn, [exists(there)], [order, *also])
        retry_until_answered(lambda left: write(timeout=left), deadline, concurrency.event())
    except UNANSWERED as error:
        raise TimeoutError(f"etcd did not answer, and may have the order: {error}") from None
    ends: concurrency.Queue[BaseException | None] = concurrency.inbox()

    def look(found: Mirror) -> None:
        if not found.kvs:
            ends.put(None)

    with Informer(etcd, [Span(there)], look, "ftcoord-killing", ends.put):
        try:
            failure = ends.get(timeout=max(deadline - concurrency.now(), 0))
        except concurrency.Empty:
            failure = TimeoutError(_STILL_THERE)
    if failure is not None:
        raise failure


def _newest(etcd: Etcd, prefix: str, replica_id: str, within: TimeLimit) -> str | None:
    """The newest member with that replica id."""
    for kv in etcd.range(Get(layout.members_span(prefix), order="newest"), timeout=within.left()).kvs:
        with contextlib.suppress(errors.StateError):  # no member
            if parse_replica(kv.key, kv.value).request.replica_id == replica_id:
                return layout.member_of(kv.key)
    return None


def order_stop(etcd: Etcd, prefix: str, reason: str, *, by: str, timeout: float) -> str:
    """Ask the members of an elastic run to stop at an agreed step. Returns why that was not done; empty if it was.

    Args:
        prefix: of the run's quorums.
        by: who asks, for the history.
        timeout: in seconds.

    Raises EtcdError and StateError.
    """
    within, key = TimeLimit(timeout), layout.elastic_stop_key(prefix)
    while True:
        record = etcd.range(Get(Span(layout.decided_key(prefix))), timeout=within.left()).one
        if record is None:
            return "the run has had no group yet"
        ending = layout.elastic_end_key(prefix, parse_quorum(record.key, record.value).number)
        end = etcd.range(Get(Span(ending)), timeout=within.left()).one
        if end is not None and end.value == FINISHED:
            return "the run is over"
        # Else what was asked as the run ended would stop the next one under this id.
        guards = [unchanged(record.key, record.mod_revision), unchanged(ending, end.mod_revision if end else 0)]
        put, also = Put(key, reason.encode(), record.lease), ordered(etcd, prefix, reason, target="", by=by)
        outcome = write_once(etcd, put, None, guards=guards, also=also, timeout=within.left())
        if outcome.done:
            return ""
        if outcome.kv is not None:
            return f"it is to stop already: {outcome.kv.value.decode(errors='replace')}"
