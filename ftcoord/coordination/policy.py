"""Connects the pure decisions of `core.quorum` to the group: who is alive, who asks since when, what was decided."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from ftcoord import concurrency
from ftcoord.coordination.address import Job
from ftcoord.coordination.ask_desk import AskDesk
from ftcoord.coordination.ask_line import line_of, release
from ftcoord.core import quorum_records as records
from ftcoord.core.asks import Ask, OpenAsk
from ftcoord.core.death_records import KnownCause
from ftcoord.core.history import NOT_ASKING, HistoryEvent, gone_seats, quorum_events, signed
from ftcoord.core.layout import decided_key, member_key, member_of
from ftcoord.core.quorum import Highest, QuorumCandidate, QuorumOptions, QuorumSituation, decide, outlook
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest, ReplicaRecord, parse_quorum, parse_replica
from ftcoord.core.strict import LARGEST_DECIDED_STEP, LARGEST_STEP, check_step
from ftcoord.core.verdict import Next, Outlook, Publish, Verdict, Wait
from ftcoord.errors import EtcdError
from ftcoord.etcd.api import KeyValue
from ftcoord.primitives.group.use import Asking, ParsedKeys, ReadBack, Use, View

log = logging.getLogger(__name__)

GATHERS: Final = 0.3
"""Seconds for which a new decider waits for those that asked the one before,"""
GATHERS_PER_SEAT: Final = 0.001
"""and for each seat of the last quorum: so long takes it until all have connected."""


@lru_cache(maxsize=4)
def read_quorum(key: str, value: bytes) -> QuorumRecord:
    """A decided record. A process may represent many replicas: each quorum is parsed once, whoever reads or decides it.
    Raises StateError."""
    return parse_quorum(key, value)


class HighestSeen:
    """What a replica remembers of all quorums that it has seen, in records or in the requests of members that know
    them, whatever etcd and its leases forget. Thread-safe."""

    def __init__(self) -> None:
        self._lock = concurrency.lock("HighestSeen._lock")  # two threads may read a record at the same time
        self.highest = Highest()
        self._last: QuorumRecord | None = None
        self.taken: QuorumRecord | None = None
        """The last quorum that this replica took part in, as its caller was told."""
        self.answered = -1
        """The number of the request that it answered; -1 before there is one."""

    def read(self, key: str, value: bytes) -> QuorumRecord:
        """Parse a decided record, and remember it. Raises StateError."""
        quorum = read_quorum(key, value)
        with self._lock:
            if self.highest.either:
                check_step(key, max(quorum.number, quorum.id), self.highest.either, LARGEST_DECIDED_STEP)
            self.highest = self.highest.and_(quorum.number, quorum.id)
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

    def heard(self, number: int, id_: int) -> None:
        """Remember what a member knows."""
        known = self.highest
        if number > known.number or id_ > known.id:
            with self._lock:
                self.highest = self.highest.and_(number, id_)


class QuorumPolicy:
    """Decides the quorums of one job. Implements `ftcoord.primitives.group.use.Policy`.

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
        self._decided: KeyValue | None = None
        self._last: QuorumRecord | None = None
        """The quorum in `_decided`."""
        self._known: dict[str, tuple[KeyValue, QuorumCandidate]] = {}
        """Each member's key, and what it asks by that."""
        self._asked: dict[str, tuple[OpenAsk, QuorumCandidate, QuorumCandidate]] = {}
        """By member: what it asked by port at the last look, what it asks by key, and what both made."""
        self._readable = ReadBack()

    def decide(self, view: View, me: str, now: float) -> Verdict[bytes]:
        """Raises StateError when the decided record cannot be read by this version, and EtcdError."""
        decided = view.decided
        if decided != self._decided:
            self._last = self._seen.read(decided.key, decided.value) if decided is not None else None
            self._decided = decided
        previous = self._last
        self._note(view)
        situation = QuorumSituation(
            [*self._candidates(view.asks)],
            previous,
            view.decided_at,
            self._seen.highest,
            created=self._wall_clock(),
            decider=me,
            unreadable=len(self._members.unreadable),
            gathers_until=view.took_at + GATHERS + GATHERS_PER_SEAT * (len(previous.seats) if previous else 0),
        )
        verdict = decide(situation, self._options, now)
        if isinstance(verdict, Wait):
            return verdict
        encoded = Publish(
            records.encode_quorum(verdict.record), verdict.reason, verdict.rule, nothing_follows=verdict.nothing_follows
        )
        key = decided_key(self._prefix)
        published = self._readable.passed(encoded, lambda one: read_quorum(key, one.record), now)
        if isinstance(published, Wait):
            return published
        events = self._events(previous, verdict.record)
        return replace(published, events=signed(events, me, int(situation.created * 1000)))

    def _events(self, previous: QuorumRecord | None, new: QuorumRecord) -> list[HistoryEvent]:
        """The events for the history of a decision: none, at the cost of no request, in a step of the same members."""
        gone = [seat.member for seat in gone_seats(previous, new)]
        there = {member: NOT_ASKING for member in gone if member_key(self._prefix, member) in self._known}
        causes: Mapping[str, KnownCause] = {}
        try:
            causes = self._causes(gone) if gone else {}
        except EtcdError as error:  # nothing is decided by it, and a step may be waiting
            log.debug("the causes of death of members that are gone cannot be read: %s", error)
        return quorum_events(previous, new, causes, there)

    def _note(self, view: View) -> None:
        """The members, and what each was when it asked. A repeated write does not change since when it asks."""
        before, self._known = self._known, {}
        for kv, record in self._members.of(view.members, self._seen.highest.either):
            known = before.get(kv.key)
            # The whole value counts: an etcd that lost writes gives their revisions to others.
            if known is None or known[0] != kv:
                same = known[1] if known and known[1].asked == record.asked else None
                since, asked_at = (same.joined, same.asked_at) if same else (view.seen[kv.key], kv.mod_revision)
                when = {"came_at": kv.create_revision, "asked_at": asked_at, "wrote_at": kv.mod_revision}
                known = kv, QuorumCandidate.of(member_of(kv.key), record, joined=since, **when)
                self._seen.heard(record.heard, record.after)  # it may be gone when the next quorum is decided
            self._known[kv.key] = known

    def _candidates(self, asks: Mapping[str, OpenAsk]) -> Iterator[QuorumCandidate]:
        """Each member with what it asks: by its key, or the decider itself, whatever it asked last."""
        before, self._asked = self._asked, {}
        for kv, by_key in self._known.values():
            one = asks.get(by_key.member)
            # Whoever has written its key since then has asked, or withdrawn, by that: its connection is lost.
            if one is None or kv.mod_revision > one.ask.since or one.ask.serial <= by_key.asked:
                yield by_key
                continue
            made = before.get(by_key.member)
            if made is None or made[0] is not one or made[1] is not by_key:  # many come one by one
                made = one, by_key, self._asking(kv, one)
            self._asked[by_key.member] = made
            yield made[2]

    def _asking(self, kv: KeyValue, one: OpenAsk) -> QuorumCandidate:
        ask = one.ask
        if ask.highest <= self._seen.highest.either + LARGEST_STEP:  # else nobody has counted to it
            self._seen.heard(ask.heard, ask.after)
        return QuorumCandidate(
            ask.member,
            ask.request,
            ask.serial,
            after=0,
            joined=one.first_at,
            came_at=kv.create_revision,
            asked_at=max(one.first_seen_at, ask.since),  # who asks has seen its own join
            wrote_at=max(one.seen_at, ask.since),
            order=one.order,
        )


UNNUMBERED: Final = -1
"""The `asked` of a new request, which gets its number when it is stamped."""


class QuorumUse(Use[QuorumRecord, ReplicaRecord]):
    """The quorums of one job, as one replica asks for them.

    If several calls wait, the last one's request counts for all of them:
    an earlier call that has to write again writes that one.

    Args:
        job: the job and its rules.
        replica_id: the replica's name.
        causes: see `QuorumPolicy`.
        wake: has waiting calls look again; called on any thread.
    """

    def __init__(
        self,
        job: Job,
        replica_id: str,
        causes: Callable[[Iterable[str]], Mapping[str, KnownCause]],
        wake: Callable[[], None],
    ) -> None:
        self._job, self._replica_id, self._causes = job, replica_id, causes
        self.seen, self._wake = HighestSeen(), wake
        self._newest_lock = concurrency.lock("QuorumUse._newest_lock")
        self._newest: QuorumRecord | None = None  # guarded by it
        # The numbers of requests: the last one, written by `stamp`, and the last one that needs no answer any more,
        # written by `nobody_asks`. Both only grow, and no request is stamped before its call is counted.
        self._asked = self._closed = 0
        self._last: QuorumRequest | None = None
        """The request with the number `_asked`; only `stamp`."""
        self._writes = 0
        self._line = line_of(job, read_quorum)
        self._asking: Asking | None = None  # any thread, as the next ones; only `call` changes it
        self._answered = 0
        """The number of the last request that is known to be answered; only grows."""
        self._must_write = False
        """Whether the last request is to be written, since there is no other way to the decider."""
        self.why = ""
        """Why nothing is decided, as the decider has told last; empty if it has not."""
        self._has_left = False

    @property
    def prefix(self) -> str:
        return self._job.prefix

    def policy(self) -> QuorumPolicy:
        job = self._job
        return QuorumPolicy(self.prefix, job.options, self.seen, self._causes)

    def parse(self, key: str, value: bytes) -> QuorumRecord:
        """The record; or a later one, if that was read before: an answer and a watch may overtake each other."""
        record, self.why = self.seen.read(key, value), ""
        with self._newest_lock:
            if self._newest is None or record.number >= self._newest.number:
                self._newest = record
            return self._newest

    def stamp(self, ask: ReplicaRecord) -> ReplicaRecord:
        self._writes += 1
        asked, request = ask.asked, ask.request
        if asked == UNNUMBERED:
            self._asked, self._last = self._asked + 1, request
        if asked and self._last is not None:  # an earlier call writes again: else nobody would know of the last request
            asked, request = self._asked, self._last
        now = self.seen.highest  # by its class: `replace` takes several times as long, for each replica at each step
        return ReplicaRecord(request, asked, now.id, self._writes, now.number, self._job.min_replicas)

    def encode(self, ask: ReplicaRecord) -> bytes:
        """An answered request is encoded as none, also when a new member repeats it."""
        now = self.seen.highest
        return records.encode(replace(ask, asked=ask.asked if self._asks(ask) else 0, after=now.id, heard=now.number))

    def _asks(self, ask: ReplicaRecord) -> bool:
        """Whether a call still waits for an answer to it."""
        return ask.asked > self._closed

    # -- asking the decider itself ------------------------------------------------------------------------------------

    def desk(self) -> AskDesk:
        return AskDesk(self._job, self._line, read_quorum)

    def is_by_key(self, ask: ReplicaRecord) -> bool:
        by_key = self._asks(ask) and self._line.is_by_key
        self._must_write &= not by_key
        return by_key

    def resting(self, ask: ReplicaRecord) -> ReplicaRecord:
        return replace(ask, asked=0)

    def call(self, ask: ReplicaRecord, asking: Asking) -> bool:
        if not self._asks(ask):
            return True
        self._must_write = False  # before the line has the ask, and may give it back
        now, self._asking = self.seen.highest, asking
        return self._line.ask(self, Ask(asking.id, asking.since, ask.asked, now.number, now.id, ask.request))

    def nobody_asks(self) -> None:
        self._closed = self._asked
        self._line.end(self, withdraws=self._asked > self._answered)
        self._must_write = False

    def leave(self) -> None:
        """The replica asks no more, for good. Idempotent."""
        with self._newest_lock:  # two threads may leave at the same time
            had_left, self._has_left = self._has_left, True
        if not had_left:
            self._line.end(self, withdraws=True)
            release(self._job, self._line)

    def answered(self, value: bytes, revision: int, lease: int) -> None:
        """See `ask_line.Caller`, as the next ones."""
        if self._asking is not None:
            self._asking.answered(value, revision, lease)

    def by_key(self) -> None:
        self._must_write = True
        self._wake()

    def gone(self, member: str) -> None:
        if self._asking is not None and self._asking.id == member:
            self._asking.gone()

    def waits(self, why: str) -> None:
        self.why = why

    def rank(self, record: QuorumRecord, me: Sequence[str]) -> int | None:
        return next((rank for rank, seat in enumerate(record.seats) if seat.member in me), None)

    def outlook(self, record: QuorumRecord | None, me: Sequence[str], ask: ReplicaRecord) -> Outlook[ReplicaRecord]:
        found = outlook(record, me, self._replica_id, ask.asked, self.seen.taken)
        if found.next is Next.WAIT and self._must_write:
            return Outlook(found.standing, Next.WRITE, ask)
        if found.next is Next.RETURN:
            self._answered = max(self._answered, ask.asked)
        if found.next is not Next.WRITE:
            return found
        return Outlook(found.standing, found.next, replace(ask, asked=UNNUMBERED))
