"""Connects the pure decisions of `core.quorum` to the group: who is alive, who asks since when, what was decided."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from ftcoord import concurrency
from ftcoord.coordination.address import Job
from ftcoord.core.death_records import KnownCause
from ftcoord.core.history import NOT_ASKING, HistoryEvent, gone_seats, quorum_events, signed
from ftcoord.core.layout import decided_key, member_key, member_of, roster_key
from ftcoord.core.quorum import NOTHING_HEARD, Highest, QuorumCandidate, QuorumOptions, QuorumSituation, decide, outlook
from ftcoord.core.quorum_head import Roster, encode_quorum, parse_quorum, parse_roster
from ftcoord.core.quorum_records import (
    Profile,
    QuorumRecord,
    QuorumRequest,
    ReplicaRecord,
    digest_of,
    encode,
    parse_replica,
)
from ftcoord.core.strict import LARGEST_DECIDED_STEP, check_step
from ftcoord.core.verdict import Next, Outlook, Publish, Standing, Verdict, Wait
from ftcoord.errors import EtcdError
from ftcoord.etcd.api import KeyValue
from ftcoord.primitives.group.parse_cache import ParsedKeys
from ftcoord.primitives.group.policy import ReadBack, View
from ftcoord.primitives.group.use import Use

log = logging.getLogger(__name__)

_KEPT: Final = 4
"""Quorums that a process keeps, as last read or written."""


class _Quorums:
    """The last quorums of this process, by their values in etcd. A process may represent many replicas: each quorum is
    parsed once per process, and never in the process that decided it. Thread-safe."""

    def __init__(self) -> None:
        # Any thread, one step of a dict at a time; if two parse the same, the last one stays.
        self._known: dict[tuple[str, bytes, bytes | None], QuorumRecord] = {}

    def read(self, key: str, value: bytes, roster: bytes | None) -> QuorumRecord:
        """As `parse_quorum`. Raises StateError."""
        quorum = self._known.get((key, value, roster))
        if quorum is None:
            quorum = parse_quorum(key, value, roster)
            self.note(key, value, roster, quorum)
        return quorum

    def note(self, key: str, value: bytes, roster: bytes | None, quorum: QuorumRecord) -> None:
        """Note the quorum that `parse_quorum` would return for these values."""
        for known in [*self._known.values()]:
            quorum.share_names(known)
        self._known[key, value, roster] = quorum
        for old in [*self._known][:-_KEPT]:
            self._known.pop(old, None)


_quorums: Final = _Quorums()


class HighestSeen:
    """What a replica remembers of all quorums that it has seen, in records or in the requests of members that know
    them, whatever etcd and its leases forget. Thread-safe."""

    def __init__(self) -> None:
        self._lock = concurrency.lock("HighestSeen._lock")  # two threads may read a record at the same time
        self.highest: Highest = NOTHING_HEARD
        self._tried: Highest = NOTHING_HEARD
        self._last: QuorumRecord | None = None
        self.taken: QuorumRecord | None = None
        """The last quorum that this replica took part in, as its caller was told."""
        self.answered = -1
        """The number of the request that it answered; -1 before there is one."""

    def read(self, key: str, value: bytes, roster: bytes | None) -> QuorumRecord:
        """Parse a decided record, and remember it. Raises StateError."""
        quorum = _quorums.read(key, value, roster)
        with self._lock:
            if self.highest != NOTHING_HEARD:
                check_step(key, max(quorum.number, quorum.id), self.highest.either, LARGEST_DECIDED_STEP)
            self.highest = self.highest.and_of(quorum)
            if quorum.contradicts(self._last) or (self.taken is not self._last and quorum.contradicts(self.taken)):
                # Of another history of etcd. Its id is not kept, or this replica would take it for its own quorum's.
                self.highest = self.highest.and_(0, quorum.id + 1)
            self._last = quorum
        return quorum

    def takes(self, quorum: QuorumRecord, asked: int) -> None:
        """Remember that this replica takes part in a quorum, which answers its request number `asked`: no other
        replicas may get its id. Of two calls that end at the same time the later request counts."""
        with self._lock:
            if asked > self.answered:
                self.taken, self.answered = quorum, asked

    def note(self, member: ReplicaRecord) -> None:
        """Remember what a member knows, too: it may be gone when the next quorum is decided."""
        known = self.highest
        if member.heard > known.number or member.after > known.id:
            with self._lock:
                self.highest = self.highest.and_(member.heard, member.after)

    def tries(self, quorum: QuorumRecord) -> None:
        """Remember what this replica is about to decide: it may learn neither that it succeeded, nor of the quorum."""
        with self._lock:
            self._tried = self._tried.and_of(quorum)

    @property
    def perhaps(self) -> Highest:
        """The highest values, including what this replica has tried to decide: others may have seen that."""
        with self._lock:
            return self.highest.and_(self._tried.number, self._tried.id)

    def has_profile_of(self, request: QuorumRequest) -> bool:
        """Whether the quorum that was read last has a seat for this replica, with the same profile."""
        last = self._last
        return last is not None and last.has_profile_of(request)


class _Heard(NamedTuple):
    """A member's key, its record, and the member that they make."""

    kv: KeyValue
    record: ReplicaRecord
    candidate: QuorumCandidate


class QuorumPolicy:
    """Decides the quorums of one job. Implements `ftcoord.primitives.group.policy.Policy`.

    A member is alive as long as its lease.

    Args:
        prefix: the group's prefix.
        options: the job's rules.
        seen: numbers and ids that it knows are not given again.
        causes: returns why members are gone, by id, if a cause is known, and at which revision of etcd. Raises
            EtcdError.
        wall_clock: for people.
    """

    def __init__(
        self,
        prefix: str,
        options: QuorumOptions,
        seen: HighestSeen,
        causes: Callable[[Iterable[str]], Mapping[str, KnownCause]] = lambda members: {},
        wall_clock: Callable[[], float] = concurrency.wall,
    ) -> None:
        self._prefix, self._options, self._seen, self._wall_clock = prefix, options, seen, wall_clock
        self._causes = causes
        self._members = ParsedKeys(parse_replica)
        self._decided: tuple[KeyValue, KeyValue | None] | None = None
        self._last: tuple[QuorumRecord | None, Roster | None] = None, None
        """The last result of `_read_decided`."""
        self._known: dict[str, _Heard] = {}
        self._said = ""
        self._readable = ReadBack()

    def decide(self, view: View, me: str, now: float) -> Verdict[bytes]:
        """Raises StateError when the decided record cannot be read by this version, and EtcdError."""
        previous, roster = self._read_decided(view)
        self._note(view, previous.profiles if previous else {})
        alive = [known.candidate for known in self._known.values()]
        highest = self._highest(view)
        created = self._wall_clock()
        unreadable = len(self._members.unreadable)
        situation = QuorumSituation(alive, previous, view.decided_at, highest, created, me, unreadable)
        verdict = decide(situation, self._options, now)
        self._say(verdict.reason)
        if isinstance(verdict, Publish):
            record = verdict.record
            encoded = self._encoded(verdict, roster)
            published = self._readable.passed(encoded, lambda one: self._read_back(one, view, record), now)
            if isinstance(published, Wait):
                return published
            self._seen.tries(record)
            return replace(published, events=signed(self._events(previous, record), me, int(created * 1000)))
        return Wait(verdict.reason, verdict.until, verdict.rule)

    def _highest(self, view: View) -> Highest:
        """The highest values that may have been given. As long as the record is there its revision tells what was
        decided.

        If it was deleted, others may have decided what is not known here, and each decision had a revision of its own,
        before the one at which the record was missing. So what is counted from there was never given. Only a job's
        first quorum has nothing to count from: nobody has heard of one, and etcd has no era.
        """
        highest = self._seen.perhaps if view.vanished else self._seen.highest
        is_first = not view.has_era and highest == NOTHING_HEARD
        return highest if is_first or not view.missing_at else highest.and_(view.missing_at, view.missing_at)

    def _events(self, previous: QuorumRecord | None, new: QuorumRecord) -> list[HistoryEvent]:
        """The events for the history of a decision: none, at the cost of no request, in a step of the same members."""
        gone = [seat.member for seat in gone_seats(previous, new)]
        return quorum_events(previous, new, self._causes_of(gone), self._words_of(gone))

    def _causes_of(self, gone: Sequence[str]) -> Mapping[str, KnownCause]:
        try:
            return self._causes(gone) if gone else {}
        except EtcdError as error:  # nothing is decided by it, and a step may be waiting
            log.debug("the causes of death of members that are gone cannot be read: %s", error)
            return {}

    def _words_of(self, gone: Iterable[str]) -> dict[str, str]:
        """Of members that are not in the next quorum, those that are there."""
        return {member: NOT_ASKING for member in gone if member_key(self._prefix, member) in self._known}

    def _encoded(self, decision: Publish[QuorumRecord], known: Roster | None) -> Publish[bytes]:
        """The same decision, encoded for etcd."""
        head, changed = encode_quorum(decision.record, known)
        puts = [] if changed is None else [(roster_key(decided_key(self._prefix)), changed)]
        return Publish(head, decision.reason, decision.rule, puts, nothing_follows=decision.nothing_follows)

    def _read_back(self, decision: Publish[bytes], view: View, quorum: QuorumRecord) -> None:
        """Raises StateError if the others could not read this decision."""
        key = decided_key(self._prefix)
        roster = dict(decision.puts).get(roster_key(key), view.roster.value if view.roster else None)
        parse_quorum(key, decision.record, roster)
        _quorums.note(key, decision.record, roster, quorum)

    def _read_decided(self, view: View) -> tuple[QuorumRecord | None, Roster | None]:
        """The last quorum, and its roster as stored in etcd. Raises StateError."""
        decided, roster = view.decided, view.roster
        if decided is None:
            return None, None
        if (decided, roster) != self._decided:
            quorum = self._seen.read(decided.key, decided.value, roster.value if roster else None)
            self._last = quorum, parse_roster(roster.key, roster.value) if roster else None
            self._decided = decided, roster
        return self._last

    def _note(self, view: View, profiles: Mapping[str, Profile]) -> None:
        """The members, and what each was when it asked. A repeated write does not change since when it asks."""
        before, self._known = self._known, {}
        for kv, record in self._members.of(view.members, self._seen.highest.either):
            known = before.get(kv.key)
            # The whole value counts: an etcd that lost writes gives their revisions to others.
            if known is None or known.kv != kv:
                same = known.candidate if known and known.record.asked == record.asked else None
                since, asked_at = (same.joined, same.asked_at) if same else (view.seen[kv.key], kv.mod_revision)
                known = _Heard(kv, record, _candidate(kv, record, profiles, since, asked_at))
                self._seen.note(record)
            elif not known.candidate.is_whole:  # there may be another roster now
                one = known.candidate
                known = known._replace(candidate=_candidate(kv, record, profiles, one.joined, one.asked_at))
            self._known[kv.key] = known

    def _say(self, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            log.debug("%s", reason)


def _candidate(
    kv: KeyValue, record: ReplicaRecord, profiles: Mapping[str, Profile], since: float, asked_at: int
) -> QuorumCandidate:
    member = member_of(kv.key)
    return QuorumCandidate.of(member, record, profiles, since, kv.create_revision, asked_at, kv.mod_revision)


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
