"""Rounds as a use of the group: the pure decisions of `core.rendezvous` on one side, keys and bytes on the other."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from math import inf
from typing import Final

from ftcoord import concurrency
from ftcoord.core import layout, rendezvous
from ftcoord.core import rendezvous_records as records
from ftcoord.core.death_records import KnownCause
from ftcoord.core.history import (
    MOST_ENDS,
    UNKNOWN_PEER,
    Ends,
    HistoryEvent,
    VacantSeat,
    in_causal_order,
    lost_ends,
    note_ends,
    round_events,
    signed,
    told_leaving,
)
from ftcoord.core.layout import Span
from ftcoord.core.rendezvous import decide
from ftcoord.core.rendezvous_records import AnyRound, HeardRound, JoinRequest, RollChunk, RollSizes, Round, RoundHead
from ftcoord.core.round_situation import MOMENT, RoundCandidate, RoundOptions, RoundSituation, held_seats, vacant
from ftcoord.core.strict import LARGEST_DECIDED_STEP, check_step
from ftcoord.core.verdict import Outlook, Publish, Verdict, Wait
from ftcoord.errors import StateError
from ftcoord.etcd.api import Etcd, Get, KeyValue, read_snapshot
from ftcoord.primitives.deaths import causes_known
from ftcoord.primitives.group.parse_cache import ParsedKey, ParsedKeys
from ftcoord.primitives.group.policy import ReadBack, View
from ftcoord.primitives.group.use import Use
from ftcoord.rendezvous.run_record import highest_round

log = logging.getLogger(__name__)

LEASE_GRACE: Final = 5.0
"""Seconds that a lease may live on after its TTL: etcd checks twice a second, and a new leader later."""
TELL_AFTER: Final = 5.0
"""Seconds without a change after which ends are written that no decision carries; MOMENT once the run is over."""


class RoundUse(Use[AnyRound, JoinRequest]):
    """The rounds of one run.

    Args:
        prefix: the run's prefix.
        options: its user's settings.
        etcd: for a decider that takes over: it reads the last round's roll.
        rolls: when a roll is stored beside its head.
        mine: returns the last round that this node has started. Called on any thread.
    """

    def __init__(
        self,
        prefix: str,
        options: RoundOptions,
        etcd: Etcd,
        rolls: RollSizes = records.ROLLS,
        mine: Callable[[], AnyRound | None] = lambda: None,
    ) -> None:
        self._prefix, self._options, self._etcd, self._rolls = prefix, options, etcd, rolls  # these never change
        self._mine = mine
        self._read: tuple[str, RollChunk, int] | None = None  # replaced as a whole, by any thread
        """The roll of which a chunk was last read, the chunk, and its number: all records of a round have the same
        roll."""
        self._highest = 0  # any thread
        """The highest number of a record."""

    @property
    def prefix(self) -> str:
        return self._prefix

    def policy(self) -> RendezvousPolicy:
        return RendezvousPolicy(self._prefix, self._options, self._etcd, self._rolls, mine=self._mine)

    def parse(self, key: str, value: bytes) -> AnyRound:
        record = records.parse_decided(key, value)
        if self._highest:
            check_step(key, record.number, self._highest, LARGEST_DECIDED_STEP)
        self._highest = max(self._highest, record.number)
        if not isinstance(record, RoundHead):
            return record
        read = self._read
        if read is None or read[0] != record.roll:
            return HeardRound.of(record)
        return HeardRound.of(record, read[1], read[2])

    def part_of(self, record: AnyRound, me: str) -> str | None:
        if not isinstance(record, RoundHead):
            return None
        return layout.roll_key(self._prefix, record.roll, record.chunk_of(me))

    def with_part(self, record: AnyRound, me: str, part: KeyValue | None) -> AnyRound:
        assert isinstance(record, RoundHead)
        if part is None:
            return HeardRound.of(record, gone=True)
        chunk, at = records.parse_chunk(part.key, part.value), record.chunk_of(me)
        self._read = record.roll, chunk, at
        return HeardRound.of(record, chunk, at)

    def stamp(self, ask: JoinRequest) -> JoinRequest:
        return replace(ask, nonce=uuid.uuid4().hex)

    def encode(self, ask: JoinRequest) -> bytes:
        return records.encode(ask)

    def rank(self, record: AnyRound, me: Sequence[str]) -> int | None:
        return next((rank for one in reversed(me) if (rank := record.rank_of(one)) is not None), None)

    def outlook(self, record: AnyRound | None, me: Sequence[str], ask: JoinRequest) -> Outlook[JoinRequest]:
        return rendezvous.outlook(record, me[-1], ask)


def _is_explained(round_: Round) -> bool:
    """Whether a run is over, and no later event explains better why."""
    return bool(round_.closed) and UNKNOWN_PEER not in round_.closed


class _LastRecord:
    """The decided record as a decider reads it, and what it remembers of earlier ones."""

    def __init__(self) -> None:
        self._parsed = ParsedKey(records.parse_decided)
        self.highest = 0
        """The highest round seen: an etcd that lost its last writes may show an older record."""
        self._state: tuple[object, ...] = ()
        self._since: tuple[float, int] = 0.0, 0
        self._tried: tuple[KeyValue | None, ...] = ()
        """The record that a decision was to replace which fences may forbid; empty if the last one was another."""
        self._looked_for: tuple[KeyValue | None, ...] = ()
        """The record that was missing when this looked for fences; empty since there is one."""
        self.missing_at = 0
        """Etcd's revision at which it had no record, and up to which fences are known: members look for them when they
        join. 0 while there is a record."""

    def tries(self, view: View, decision: Publish[bytes]) -> None:
        """Remember what is about to be decided: etcd may refuse it."""
        self._tried = (view.decided,) if decision.no_newer else ()

    def look_for_lost(self, view: View, look: Callable[[], tuple[int, int]]) -> None:
        """If there is no record, or etcd has refused to replace it, take the highest round that has a fence for one
        whose record was lost. Nobody who lives need know of that round. Raises what `look` raises."""
        if not view.missing_at or self._looked_for != (view.decided,):
            self._looked_for, self.missing_at = (), view.missing_at
        is_missed = view.missing_at != 0 and not self._looked_for
        if is_missed or self._tried == (view.decided,):
            number, revision = look()
            self.highest, self._tried = max(self.highest, number), ()
            if view.missing_at:
                self._looked_for, self.missing_at = (view.decided,), revision

    def of(self, view: View) -> AnyRound | None:
        """Raises StateError when the record cannot be read by this version."""
        record = self._parsed.of(view.decided) if view.decided else None
        self.highest = max(self.highest, record.number if record else 0)
        return record

    def since(self, record: AnyRound | None, view: View) -> tuple[float, int]:
        """When this round entered its state, as first seen here, and at which revision of etcd. An operator who drains
        another node changes the record, but does not restart timeouts."""
        if record is None or view.decided is None:
            return view.decided_at, 0
        state = record.roll, record.ready, record.recalled, record.closed
        if state != self._state:
            self._state, self._since = state, (view.decided_at, view.decided.mod_revision)
        return self._since


class RendezvousPolicy:
    """Decides the rounds of one run. Implements `ftcoord.primitives.group.policy.Policy`.

    Args:
        prefix: the run's prefix.
        options: its user's settings.
        etcd: for reading the roll of a round that another member decided, why members are gone, and the fences of
            rounds when there is no record, or a new round was refused.
        rolls: when a roll is stored beside its head.
        wall_clock: for people.
        mine: returns the last round that this node has started. The policy may have seen nothing of it: it is made for
            each lease, and etcd may have lost the record before.
    """

    def __init__(
        self,
        prefix: str,
        options: RoundOptions,
        etcd: Etcd,
        rolls: RollSizes = records.ROLLS,
        wall_clock: Callable[[], float] = concurrency.wall,
        mine: Callable[[], AnyRound | None] = lambda: None,
    ) -> None:
        self._prefix, self._options, self._etcd = prefix, options, etcd
        self._rolls = Rolls(prefix, etcd, rolls)
        self._wall_clock, self._mine = wall_clock, mine
        self._members = ParsedKeys(records.parse_join_request)
        self._candidates: dict[str, RoundCandidate] = {}
        """By key, as they were at the last decision."""
        self._last = _LastRecord()
        self._gone: dict[str, tuple[float, VacantSeat]] = {}
        """Members with a seat in the last round that are gone: when this decider saw it, and what is known."""
        self._held: dict[str, bool] = {}
        """The members whose seats are held under other leases, and whether they were evicted."""
        self._ends: tuple[str, Ends] = "", {}
        """How parts in the last round ended: its roll, and the ends."""
        self._written: set[tuple[str, str]] = set()
        """The kinds and nodes of those that this decider has written."""
        self._read_back = ReadBack()

    def decide(self, view: View, me: str, now: float) -> Verdict[bytes]:
        """Raises StateError when the decided record cannot be read by this version, EtcdError when its roll, or the
        fences, cannot be read."""
        record = self._last.of(view)
        self._last.look_for_lost(view, lambda: highest_round(self._etcd, self._prefix))
        since = self._last.since(record, view)
        try:
            previous = self._rolls.of(record, view) if isinstance(record, RoundHead) else record
        except RollReplaced:
            return Wait("another record has replaced the one that is known: it is on its way")
        situation = self._situation(view, previous, since, now)
        verdict = decide(situation, self._options, now)
        if isinstance(verdict, Wait):
            return self._with_late_ends(verdict, situation, view, me, now)
        head = record if isinstance(record, RoundHead) and previous and previous.seats else None
        decision = self._publish(verdict, previous, head, me, again=view.vanished)
        published = self._read_back.passed(decision, lambda one: read_round(self._prefix, one), now)
        if isinstance(published, Wait):
            return published
        self._last.tries(view, published)
        return replace(published, events=self._events(round_events(previous, verdict.record, situation.ends), me))

    def _with_late_ends(self, verdict: Wait, situation: RoundSituation, view: View, me: str, now: float) -> Wait:
        """Add the ends of parts in the last round that no decision carries, nor soon will: others go on
        (on_member_loss=ignore), no node comes, or the run is over. They are written once, when nothing has changed
        for a while."""
        fresh = [end for end in situation.ends if (end.kind, end.node) not in self._written]
        if not fresh:
            return verdict
        is_over = situation.previous is not None and situation.previous.closed  # all leave it soon
        due = view.changed_at + (MOMENT if is_over else TELL_AFTER)
        if any(end.kind == "lost" for end in fresh):  # it may come back to its seat
            due = max(due, situation.gone_since + self._options.return_to_seat)
        if now < due:
            return replace(verdict, until=min(due, inf if verdict.until is None else verdict.until))
        return replace(verdict, events=self._events(in_causal_order(fresh)[:MOST_ENDS], me))

    def _events(self, events: Sequence[HistoryEvent], me: str) -> list[HistoryEvent]:
        """The same events, of which this decider writes no end alone any more."""
        self._written |= {(one.kind, one.node) for one in events if one.is_end}
        return signed(events, me, int(self._wall_clock() * 1000))

    def _situation(self, view: View, previous: Round | None, since: tuple[float, int], now: float) -> RoundSituation:
        before, self._candidates = self._candidates, {}
        for kv, ask in self._members.of(view.members, self._last.highest):
            seen, one = view.seen[kv.key], before.get(kv.key)
            if one is None or one.ask is not ask or one.seen != seen:
                one = RoundCandidate(layout.member_of(kv.key), ask, seen, kv.mod_revision)
            self._candidates[kv.key] = one
        members = list(self._candidates.values())
        deaths, gone_since = self._gone_of(previous, members, view, now)
        return RoundSituation(
            members=members,
            changed_at=view.changed_at,
            previous=previous,
            previous_at=since[0],
            vanished=view.vanished,
            highest=self._last.highest,
            read_at=view.read_at,
            deaths=deaths,
            gone_since=gone_since,
            ends=self._ends_of(previous, members, since[0]),
            decided_revision=since[1],
            unreadable=self._unreadable(),
            mine=self._mine(),
        )

    def _unreadable(self) -> frozenset[str]:
        """The live members whose records cannot be read, as far as this has seen."""
        return frozenset(map(layout.member_of, self._members.unreadable))

    def _gone_of(
        self, previous: Round | None, members: Sequence[RoundCandidate], view: View, now: float
    ) -> tuple[Mapping[str, str], float]:
        """Why members with a seat are gone, if it is known, and since when the first of them is.

        Each cause is read once: a sentinel writes it before its member goes.
        """
        gone: Set[str] = frozenset()
        if previous is not None and not _is_explained(previous):
            gone = vacant(previous, members, self._unreadable()) | self._evicted(previous, members)
        # Of one that was gone and came back to its seat, another cause counts when it is gone again.
        self._gone = {member: known for member, known in self._gone.items() if member in gone}
        if previous is not None and (new := gone - self._gone.keys()):
            causes = causes_known(self._etcd, self._prefix, new)
            for member in new:
                cause, noted, left = causes.get(member, KnownCause("", view.revision))
                last = view.departed.get(layout.member_key(self._prefix, member))
                seat, word = previous.seats[previous.ranks[member]], self._last_word(last)
                said_at = last.mod_revision if last is not None else 0
                why = told_leaving(seat.host, cause) if left else cause
                self._gone[member] = now, VacantSeat(seat, why, noted, word, said_at, left)
        first = min((since for since, _ in self._gone.values()), default=now)
        return {member: known.cause for member, (_, known) in self._gone.items() if known.cause}, first

    def _evicted(self, previous: Round, members: Sequence[RoundCandidate]) -> Set[str]:
        """The members whose seats are held under other leases though they were evicted: a cause was written. It is read
        once for each."""
        held = held_seats(previous, members).keys()
        self._held = {member: is_over for member, is_over in self._held.items() if member in held}
        if new := held - self._held.keys():
            causes = causes_known(self._etcd, self._prefix, new)
            self._held |= {member: member in causes for member in new}
        return {member for member, is_over in self._held.items() if is_over}

    def _ends_of(
        self, previous: Round | None, members: Sequence[RoundCandidate], since: float
    ) -> tuple[HistoryEvent, ...]:
        """How parts in the last round have ended, as far as is known. `since`: when it entered its state."""
        if previous is None or not previous.seats or _is_explained(previous):
            return ()
        if self._ends[0] != previous.roll:
            self._ends, self._written = (previous.roll, {}), set()
        asks = ((member.ask, member.revision) for member in members)
        ends = note_ends(self._ends[1], previous, asks, (known for _, known in self._gone.values()))
        self._ends = previous.roll, ends
        # A host whose lease ends later than a lease may live on did not end the round: it was lost after that.
        is_over = self._options.return_to_seat and (previous.recalled or previous.closed)
        until = since + self._options.return_to_seat + LEASE_GRACE if is_over else inf
        gone = [known for at, known in self._gone.values() if at <= until]
        lost = lost_ends(previous, gone, ends, {member.ask.node for member in members}) if gone else []
        # All leave a run that is over.
        return *(end for end in ends.values() if end.kind != "left" or not previous.closed), *lost

    @staticmethod
    def _last_word(departed: KeyValue | None) -> JoinRequest | None:
        try:
            return records.parse_join_request(departed.key, departed.value) if departed is not None else None
        except StateError:
            return None

    # -- a decision as keys and bytes -----------------------------------------------------------------------------

    def _publish(
        self, decision: Publish[Round], previous: Round | None, head: RoundHead | None, me: str, *, again: bool
    ) -> Publish[bytes]:
        """A new round opens its empty store, and closes earlier ones, in the same transaction. Its number is given
        once: if another decider gave it, and the record was deleted, that round's fence is there.

        If there is no record, no fence may have come since this decider looked: others may have decided meanwhile, and
        somebody has deleted that. A decision that comes late would else take it for the same absence.

        The previous round is that of the record; if the record was lost, the number before this one. Keys in the new
        round's store are left from a run that was forgotten since. A node of that one may still write under the same
        number, so the fence holds the name of the roll. All rolls but the new one are deleted, including those of
        deciders that were too late. If the record vanished and is written `again`, so is its roll.
        """
        number, last = decision.record.number, previous.number if previous else 0
        missing_at = self._last.missing_at
        no_newer = [(layout.rounds_span(self._prefix), missing_at)] if missing_at else []
        if number == last:
            value, beside = self._rolls.said_again(decision.record, head, me, again)
            return Publish(value, decision.reason, decision.rule, no_newer=no_newer, beside=beside)
        value, beside = self._rolls.new(decision.record, me)
        over = sorted({last, number - 1} - {0})
        fences = [Span(layout.round_key(self._prefix, before)) for before in over]
        stores = [Span(layout.round_store_prefix(self._prefix, one), is_prefix=True) for one in (*over, number)]
        if decision.record.size:
            no_newer = [*no_newer, (Span(layout.round_key(self._prefix, number)), 0)]
        return Publish(
            value,
            decision.reason,
            decision.rule,
            puts=((layout.round_key(self._prefix, number), self._rolls.name(decision.record, me).encode()),),
            deletes=[*fences, *stores, *self._rolls.old(decision.record, me)],
            no_newer=no_newer,
            beside=beside,
        )


class RollReplaced(Exception):
    """The roll of a record was deleted, because there is another record by now."""


def read_round(prefix: str, decision: Publish[bytes]) -> None:
    """Parse what a decision writes, as a member does. Raises StateError."""
    record = records.parse_decided(layout.decided_key(prefix), decision.record)
    if isinstance(record, RoundHead) and decision.beside:
        chunks = [records.parse_chunk(*chunk) for chunk in decision.beside]
        records.round_of(layout.roll_span(prefix, record.roll).start, record, chunks)


class Rolls:
    """Reads and writes the rolls of one run, for its decider.

    Args:
        prefix: the run's prefix.
        etcd: for reading the roll of a round that another member decided.
        sizes: when a roll is stored beside its head.
    """

    def __init__(self, prefix: str, etcd: Etcd, sizes: RollSizes) -> None:
        self._prefix, self._etcd, self._sizes = prefix, etcd, sizes
        self._known: dict[str, Round] = {}
        """Full records by roll id: that of the last round, and of the round that this decider wants next."""

    def of(self, head: RoundHead, view: View) -> Round | None:
        """The last round, with its roll. If the record vanished with its roll, and this decider never read it, the
        round has no seats; None if it is ready, since a round that runs goes on (R9)."""
        known = self._known.get(head.roll) or self._read_roll(head, view)
        if known is None:
            return None if head.ready and not head.closed else records.with_roll(head, (), ())
        self._known = {head.roll: known}
        return records.with_roll(head, known.seats, known.away)

    def _read_roll(self, head: RoundHead, view: View) -> Round | None:
        """Raises RollReplaced, StateError, EtcdError."""
        assert view.decided is not None
        span = layout.roll_span(self._prefix, head.roll)
        kvs = {kv.key: kv for kv in read_snapshot(self._etcd.range, lambda then: then.pages(span))}
        keys = [layout.roll_key(self._prefix, head.roll, chunk) for chunk in range(head.chunks)]
        if all(key in kvs for key in keys):
            return records.round_of(span.start, head, (records.parse_chunk(key, kvs[key].value) for key in keys))
        if view.vanished:
            return None
        now = self._etcd.range(Get(Span(view.decided.key), keys_only=True)).one
        if now is None or now.mod_revision != view.decided.mod_revision:
            raise RollReplaced
        raise StateError(span.start, f"is not whole, though {now.key} names it: delete that, so that all decide anew")

    def name(self, record: Round, me: str) -> str:
        """The name of the roll of a new round, as its participants know it."""
        if self._sizes.is_inline(record):
            return record.roll
        return records.roll_id(record, self._sizes.chunks_for(record), me)

    def new(self, record: Round, me: str) -> tuple[bytes, list[tuple[str, bytes]]]:
        """The record of a new round, and its roll if that is stored beside it."""
        if self._sizes.is_inline(record):
            return records.encode(replace(record, by=me)), []
        chunks, roll = self._sizes.chunks_for(record), self.name(record, me)
        self._known[roll] = record
        return records.encode(records.head_of(record, roll, chunks, me)), self._chunks(record, roll, chunks)

    def said_again(
        self, record: Round, head: RoundHead | None, me: str, with_roll: bool
    ) -> tuple[bytes, list[tuple[str, bytes]]]:
        """A later record of a round, in the form in which the round was decided, because its participants know it in
        that form."""
        if head is None:
            return records.encode(replace(record, by=me)), []
        value = records.encode(records.head_of(record, head.roll, head.chunks, me))
        return value, self._chunks(record, head.roll, head.chunks) if with_roll else []

    def _chunks(self, record: Round, roll: str, chunks: int) -> list[tuple[str, bytes]]:
        parts = enumerate(records.chunks_of(record, chunks))
        return [(layout.roll_key(self._prefix, roll, at), records.encode(chunk)) for at, chunk in parts]

    def old(self, record: Round, me: str) -> list[Span]:
        """All rolls but that of this new round."""
        if self._sizes.is_inline(record):
            return [layout.rolls_span(self._prefix)]
        return list(layout.other_rolls(self._prefix, self.name(record, me)))
