"""Quorums as a use of the group mechanism."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from ftcoord.coordination.address import Job
from ftcoord.coordination.policy import HighestSeen, QuorumPolicy
from ftcoord.core.death_records import KnownCause
from ftcoord.core.quorum import outlook
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest, ReplicaRecord, digest_of, encode
from ftcoord.core.verdict import Next, Outlook, Standing
from ftcoord.primitives.group.use import Use

UNNUMBERED: Final = -1
"""The `asked` of a new request, which gets its number when it is stamped."""


class QuorumUse(Use[QuorumRecord, ReplicaRecord]):
    """The quorums of one job, as one replica asks for them.

    A new request is written without its profile if the last quorum has the same one, and the request before was
    answered. If the outlook then says that the profile is unknown, the request is written in full. A request that waits
    is also written in full when it is repeated: others may have missed the quorum that has its
    profile, and somebody may have deleted that. If several calls wait, the last one's request counts for all of them:
    an earlier call that has to write again writes that one.

    Args:
        job: the job and its rules.
        replica_id: the replica's name.
        causes: see `QuorumPolicy`.
    """

    has_roster = True

    def __init__(
        self,
        job: Job,
        replica_id: str,
        causes: Callable[[Iterable[str]], Mapping[str, KnownCause]],
    ) -> None:
        self._job, self._replica_id, self._causes = job, replica_id, causes
        self._seen = HighestSeen()
        # The numbers of requests: the last one, written by `stamp`, and the last one that needs no answer any more,
        # written by `nobody_asks`. Both only grow, and no request is stamped before its call is counted.
        self._asked = self._closed = 0
        self._last: ReplicaRecord | None = None
        """The request with the number `_asked`; only `stamp`."""
        self._writes = 0

    @property
    def prefix(self) -> str:
        return self._job.prefix

    def policy(self) -> QuorumPolicy:
        job = self._job
        return QuorumPolicy(self.prefix, job.options, self._seen, self._causes)

    def parse(self, key: str, value: bytes) -> QuorumRecord:
        return self.parse_with_roster(key, value, None)

    def parse_with_roster(self, key: str, value: bytes, roster: bytes | None) -> QuorumRecord:
        return self._seen.read(key, value, roster)

    def takes(self, quorum: QuorumRecord, asked: int) -> None:
        """The replica takes part in this quorum, which answers its request number `asked`: its caller is told of it."""
        self._seen.takes(quorum, asked)

    # For each replica at each step: a record is made by its class, since `replace` takes several times as long.

    def stamp(self, ask: ReplicaRecord) -> ReplicaRecord:
        self._writes += 1
        if ask.asked == UNNUMBERED:
            is_known = self._seen.answered == self._asked and self._seen.has_profile_of(ask.request)
            self._asked += 1
            profile = digest_of(ask.request.profile) if is_known else ""
            now = self._seen.highest
            said = (self._asked, now.id, self._writes, profile, now.number, self._job.min_replicas)
            self._last = ReplicaRecord(ask.request, *said)
            return self._last
        if self._last is not None and 0 < ask.asked < self._asked:
            ask = self._last  # else nobody would know of the last request any longer
        now, profile = self._seen.highest, ask.profile if ask.asked <= self._closed else ""
        said = (ask.asked, now.id, self._writes, profile, now.number, self._job.min_replicas)
        return ReplicaRecord(ask.request, *said)

    def encode(self, ask: ReplicaRecord) -> bytes:
        """An answered request is encoded as none, also when a new member repeats it."""
        asked, now = ask.asked if ask.asked > self._closed else 0, self._seen.highest
        if (asked, now.id, now.number) != (ask.asked, ask.after, ask.heard):  # a record that is written again, later
            said = (asked, now.id, ask.beat, ask.profile, now.number, ask.min_replicas)
            ask = ReplicaRecord(ask.request, *said)
        return encode(ask)

    def nobody_asks(self) -> None:
        self._closed = self._asked

    def rank(self, record: QuorumRecord, me: Sequence[str]) -> int | None:
        return next((rank for rank, seat in enumerate(record.seats) if seat.member in me), None)

    def outlook(self, record: QuorumRecord | None, me: Sequence[str], ask: ReplicaRecord) -> Outlook[ReplicaRecord]:
        shortened = ask.request if ask.profile else None
        found = outlook(record, me, self._replica_id, ask.asked, shortened, self._seen.taken)
        if found.next is not Next.WRITE:
            return found
        again = replace(ask, asked=UNNUMBERED) if found.standing is Standing.MISSED else replace(ask, profile="")
        return Outlook(found.standing, found.next, again)


def idle(request: QuorumRequest) -> ReplicaRecord:
    """What a replica writes while it asks for nothing."""
    return ReplicaRecord(request, 0, 0, 0)


def nothing_of(replica_id: str) -> QuorumRequest:
    """The request of a replica that has none."""
    return QuorumRequest(
        replica_id=replica_id,
        address="",
        store_address="",
        step=0,
        world_size=0,
        shrink_only=False,
        data="",
        commit_failures=0,
        handles=(),
    )


def asking(request: QuorumRequest) -> ReplicaRecord:
    """What a replica writes to ask for the next quorum."""
    return ReplicaRecord(request, UNNUMBERED, 0, 0)
