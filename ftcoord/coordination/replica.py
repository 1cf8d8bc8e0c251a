"""One replica's part in the quorums of a job: its signs of life, its requests, and what was decided."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from typing import Final

from ftcoord import concurrency
from ftcoord.coordination.address import Job
from ftcoord.coordination.policy import LEASE_FLOOR
from ftcoord.coordination.use import QuorumUse, asking, idle
from ftcoord.core.layout import members_span
from ftcoord.core.outlook import Standing
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest, ReplicaRecord
from ftcoord.errors import EtcdUnavailable, OutcomeUnknown
from ftcoord.etcd.api import Etcd, Get
from ftcoord.primitives.group.participant import LeaseKeeper, Left, Look, Participant, ParticipantOptions

RECORD_TTL: Final = 7 * 24 * 3600
"""Seconds that the last quorum is remembered when all replicas are gone, so that its id does not come again."""
DECIDER_PATIENCE: Final = 5.0
"""Seconds without a decision until a replica that waits decides too: the decider's interpreter may be stuck."""
PATIENCE_PER_REPLICA: Final = 0.1
"""Seconds more for each replica of the last quorum. Everyone waits a random part of them: few take over at a time."""
MOST_EXTRA_PATIENCE: Final = 10.0
TAKEOVER_TIME: Final = 2.0
"""Seconds for which it decides, too. It then waits again: the decider may well be right to wait."""


class TakeoverToken:
    """Lets one replica at a time take over, of all in this process: one is enough, and each costs a mirror of all
    members. Thread-safe."""

    def __init__(self) -> None:
        self._lock = concurrency.lock("TakeoverToken._lock")
        self._holder: object | None = None  # guarded by _lock

    def take(self, holder: object) -> bool:
        """Whether the holder has it now. Never waits."""
        with self._lock:
            if self._holder is None:
                self._holder = holder
            return self._holder is holder

    def give_back(self, holder: object) -> None:
        """Without effect for whoever does not have it."""
        with self._lock:
            if self._holder is holder:
                self._holder = None


class Replica:
    """A replica in a job. Thread-safe; nothing is written before the first sign of life or request.

    Ends with `leave()`, which revokes its lease, or `orphan()`, which lets it expire; both are for good.

    Args:
        etcd: the etcd client.
        job: the job and its rules.
        replica_id: its name. Of several members with one name the last one counts that came, or that asked.
        keeps_lease: whether its lease is kept alive between calls too. If not, each call is one sign of life.
        lease_keeper: keeps its leases alive while this interpreter is stuck.
        takeover: shared by all replicas of this process.
        timeout: seconds for each request to etcd.
    """

    def __init__(
        self,
        etcd: Etcd,
        job: Job,
        replica_id: str,
        *,
        keeps_lease: bool,
        lease_keeper: LeaseKeeper | None = None,
        takeover: TakeoverToken | None = None,
        timeout: float = 5.0,
    ) -> None:
        self.replica_id = replica_id
        self._etcd, self._job, self._timeout = etcd, job, timeout
        self._takeover = takeover or TakeoverToken()
        self._by_writing = job.heartbeat_timeout < LEASE_FLOOR
        self._participant: Participant[QuorumRecord, ReplicaRecord] = Participant(
            etcd,
            QuorumUse(job, replica_id, self._revisions),
            ParticipantOptions(
                max(math.ceil(job.heartbeat_timeout), 1), RECORD_TTL, timeout, keeps_lease=keeps_lease, batches=True
            ),
            lease_keeper=lease_keeper,
        )

    @property
    def quorum(self) -> QuorumRecord | None:
        """The last quorum of the job that is known here, whoever is in it."""
        return self._participant.record

    @property
    def lease(self) -> int:
        """The lease that it lives under now; 0 before its first sign of life. Keys of its own go under it too."""
        return self._participant.lease

    @property
    def joined(self) -> bool:
        """Whether it is a member of the job, as far as is known here."""
        return self._participant.joined

    def ask(self, request: QuorumRequest, deadline: float, gone: concurrency.Event | None = None) -> QuorumRecord:
        """The next quorum with this replica in it, decided after it asked.

        Raises TimeoutError after the monotonic `deadline`, or when the caller is `gone` (see `nudge`), and takes the
        request back; EtcdError if etcd refuses; StateError when the decided record cannot be read; ThreadFailed.
        """
        pace = _QuorumPace(self._participant, self._job, self._takeover, deadline, gone or concurrency.event())
        answered = False
        try:
            with _in_time():
                quorum = self._participant.ask(asking(request), pace).record
            assert quorum is not None
            answered = self._has_seat(quorum)
            return quorum
        finally:
            pace.end()
            if not answered:
                self._participant.withdraw(idle(request))

    def beat(self, deadline: float) -> None:
        """Show that it lives. Raises TimeoutError after the monotonic `deadline`, and EtcdError if etcd refuses."""
        nothing = QuorumRequest(
            replica_id=self.replica_id,
            address="",
            store_address="",
            step=0,
            world_size=0,
            shrink_only=False,
            data="",
            commit_failures=0,
            handles=(),
        )
        with _in_time():
            self._participant.touch(idle(nothing), deadline, by_writing=self._by_writing)

    def nudge(self) -> None:
        """Have those that wait look at once whether they are `gone`."""
        self._participant.nudge()

    def await_loss(self, timeout: float | None) -> None:
        """Wait until its lease is lost or it left, `timeout` seconds at most."""
        part = self._participant
        part.wait_for(lambda: part.member is None or part.member.lost, timeout)

    def leave(self, timeout: float) -> None:
        """Be gone at once. Idempotent; never raises for an etcd that is away for `timeout` seconds."""
        self._participant.stop()
        self._participant.leave(timeout)

    def orphan(self) -> None:
        """Take part no longer, but live on for the others until the lease expires by itself. Idempotent."""
        self._participant.stop()
        self._participant.orphan()

    def _has_seat(self, quorum: QuorumRecord) -> bool:
        """Whether it was answered as the member that it is now: an older one's seat leaves this one's request open."""
        member = self._participant.member
        return member is None or member.id in quorum.seated

    def _revisions(self) -> dict[str, int]:
        members = Get(members_span(self._job.prefix), keys_only=True)
        return {kv.key: kv.mod_revision for kv in self._etcd.range(members, timeout=self._timeout).kvs}


class _QuorumPace:
    """One call's wait for a quorum. For the thread that calls; `see` and `wake_at` run under the participant's lock."""

    def __init__(
        self,
        participant: Participant[QuorumRecord, ReplicaRecord],
        job: Job,
        token: TakeoverToken,
        deadline: float,
        gone: concurrency.Event,
    ) -> None:
        self.deadline, self.gone = deadline, gone
        self._participant, self._job, self._token = participant, job, token
        self._takes_over = False
        self._change_at = concurrency.now() + self._patience()

    def see(self, look: Look[QuorumRecord, ReplicaRecord]) -> Standing:
        return look.standing

    def wake_at(self, standing: Standing) -> float:
        return 0.0 if self.gone.is_set() else min(self.deadline, self._change_at)

    def tick(self, look: Look[QuorumRecord, ReplicaRecord]) -> None:
        """Raises TimeoutError."""
        now = concurrency.now()
        if now >= self.deadline or self.gone.is_set():
            raise TimeoutError("no quorum was decided in time")
        if now >= self._change_at:
            self._take_over(not self._takes_over and self._token.take(self))
            self._change_at = now + (TAKEOVER_TIME if self._takes_over else self._patience())

    def end(self) -> None:
        """Leave the decision to others again."""
        self._take_over(False)

    def _take_over(self, on: bool) -> None:
        if on != self._takes_over:
            self._takes_over = on
            self._participant.take_over(on)
        if not on:
            self._token.give_back(self)

    def _patience(self) -> float:
        """Seconds that it waits for the decider; others wait longer or shorter."""
        quorum = self._participant.record
        size = len(quorum.seats) if quorum else self._job.min_replicas
        return DECIDER_PATIENCE + random.uniform(0, min(PATIENCE_PER_REPLICA * size, MOST_EXTRA_PATIENCE))


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    """What keeps a call from being answered is a time-out to its caller."""
    try:
        yield
    except Left:
        raise TimeoutError("the replica left") from None
    except (EtcdUnavailable, OutcomeUnknown) as error:
        raise TimeoutError(str(error)) from None
