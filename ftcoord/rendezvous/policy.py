"""Rounds as a use of the group: the pure decisions of `core.rendezvous` on one side, keys and bytes on the other."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence, Set
from dataclasses import replace
from math import inf
from typing import Final

from ftcoord import concurrency
from ftcoord.core import history, layout, rendezvous, rendezvous_records as records
from ftcoord.core.death_records import KnownCause
from ftcoord.core.history import Ends, HistoryEvent, Vacant
from ftcoord.core.rendezvous import RoundCandidate, RoundOptions, RoundSituation, decide
from ftcoord.core.rendezvous_records import NO_ROUND, Chunk, JoinRequest, KnownRound, Round, RoundHead
from ftcoord.core.strict import LARGEST_DECIDED_STEP, check_step
from ftcoord.core.verdict import Outlook, Publish, Verdict, Wait
from ftcoord.etcd.api import Etcd, KeyValue
from ftcoord.primitives.deaths import causes_known
from ftcoord.primitives.group.use import ParsedKeys, ReadBack, Use, View
from ftcoord.rendezvous.run_record import SeatsReplaced, read_seats

log = logging.getLogger(__name__)

LEASE_GRACE: Final = 5.0
"""Seconds that a lease may live on after its TTL: etcd checks twice a second, and a new leader later."""


class RoundUse(Use[RoundHead, JoinRequest]):
    """The rounds of one run.

    Args:
        prefix: the run's prefix.
        options: its user's settings.
        etcd: for a decider that takes over: it reads who sits in the last round.
    """

    def __init__(self, prefix: str, options: RoundOptions, etcd: Etcd) -> None:
        self._prefix, self._options, self._etcd = prefix, options, etcd  # these never change
        self._read: tuple[str, Chunk, int] | None = None  # replaced as a whole, by any thread
        """The name of the round of which a chunk was last read, the chunk, and its number: all records of a round have
        the same seats."""
        self._highest = 0  # any thread
        """The highest number of a record."""

    @property
    def prefix(self) -> str:
        return self._prefix

    def policy(self) -> RendezvousPolicy:
        return RendezvousPolicy(self._prefix, self._options, self._etcd)

    def parse(self, key: str, value: bytes) -> RoundHead:
        head = records.parse_decided(key, value)
        if self._highest:
            check_step(key, head.number, self._highest, LARGEST_DECIDED_STEP)
        self._highest = max(self._highest, head.number)
        read = self._read
        return KnownRound.of(head, *read[1:]) if read is not None and read[0] == head.name else head

    def part_of(self, record: RoundHead, me: str) -> str | None:
        return (
            layout.chunk_key(self._prefix, record.name, records.chunk_of(me, record.chunks)) if record.chunks else None
        )

    def with_part(self, record: RoundHead, me: str, part: KeyValue | None) -> RoundHead:
        at = records.chunk_of(me, record.chunks)
        if part is None:
            return KnownRound.of(record, None, at)
        chunk = records.parse_chunk(part.key, part.value)
        self._read = record.name, chunk, at
        return KnownRound.of(record, chunk, at)

    def stamp(self, ask: JoinRequest) -> JoinRequest:
        return replace(ask, nonce=uuid.uuid4().hex)

    def encode(self, ask: JoinRequest) -> bytes:
        return records.encode(ask)

    def rank(self, record: RoundHead, me: Sequence[str]) -> int | None:
        return next((rank for one in reversed(me) if (rank := record.rank_of(one)) is not None), None)

    def outlook(self, record: RoundHead | None, me: Sequence[str], ask: JoinRequest) -> Outlook[JoinRequest]:
        return rendezvous.outlook(record, me[-1], ask)


class RendezvousPolicy:
    """Decides the rounds of one run. Implements `ftcoord.primitives.group.use.Policy`.

    Args:
        prefix: the run's prefix.
        options: its user's settings.
        etcd: for reading who sits in a round that another member decided, and why members are gone.
    """

    def __init__(self, prefix: str, options: RoundOptions, etcd: Etcd) -> None:
        self._prefix, self._options, self._etcd = prefix, options, etcd
        self._rounds: dict[str, Round] = {}
        """By name: the last round, and the one that this decider wants next."""
        self._state: tuple[tuple[object, ...], float, int] = (), 0.0, 0
        """The state of the last round, when it was first seen in it, and at which revision of etcd."""
        self._members = ParsedKeys(records.parse_join_request)
        self._candidates: dict[str, RoundCandidate] = {}
        """By key, as they were at the last decision."""
        self._looked: dict[tuple[str, bool], tuple[float, Vacant]] = {}
        """By member with a seat in the last round that it has no longer, and whether it is held under another lease:
        when this decider saw it, and what is known."""
        self._ends: tuple[str, Ends] = "", {}
        """How parts in the last round ended: its name, and the ends."""
        self._read_back = ReadBack()

    def decide(self, view: View, me: str, now: float) -> Verdict[bytes]:
        """Raises StateError when the decided record cannot be read by this version, EtcdError when its seats cannot be
        read."""
        try:
            previous = self._round_of(view.decided) if view.decided else None
        except SeatsReplaced:
            return Wait("another record has replaced the one that is known: it is on its way")
        situation = self._situation(view, previous, now)
        verdict = decide(situation, self._options, now)
        if isinstance(verdict, Wait):
            return verdict
        decision = self._publish(verdict, previous, me)
        published = self._read_back.passed(decision, lambda one: read_round(self._prefix, one), now)
        if isinstance(published, Wait):
            return published
        events = history.round_events(previous, verdict.record, situation.ends)
        return replace(published, events=history.signed(events, me, int(concurrency.wall() * 1000)))

    def _round_of(self, decided: KeyValue) -> Round:
        """The last round, with its seats. Raises as `read_seats` does."""
        head = records.parse_decided(decided.key, decided.value)
        known = self._rounds.get(head.name) or read_seats(self._etcd.range, self._prefix, head)
        self._rounds = {head.name: known}
        return Round.of(head, known.seats, known.away)

    def _since(self, view: View, previous: Round | None) -> tuple[float, int]:
        """When the last round entered its state, as first seen here, and at which revision of etcd. An operator who
        drains another node changes the record, but does not restart timeouts."""
        if previous is None or view.decided is None:
            return view.decided_at, 0
        state = previous.name, previous.ready, previous.recalled, previous.closed
        if state != self._state[0]:
            self._state = state, view.decided_at, view.decided.mod_revision
        return self._state[1:]

    def _situation(self, view: View, previous: Round | None, now: float) -> RoundSituation:
        before, self._candidates = self._candidates, {}
        for kv, ask in self._members.of(view.members, previous.number if previous else 0):
            seen, one = view.seen[kv.key], before.get(kv.key)
            if one is None or one.ask is not ask or one.seen != seen:
                one = RoundCandidate(layout.member_of(kv.key), ask, seen, kv.mod_revision)
            self._candidates[kv.key] = one
        members = list(self._candidates.values())
        unreadable = frozenset(map(layout.member_of, self._members.unreadable))
        previous_at, revision = self._since(view, previous)
        gone = self._gone_of(previous, members, unreadable, view, now)
        return RoundSituation(
            members=members,
            changed_at=view.changed_at,
            previous=previous,
            previous_at=previous_at,
            read_at=view.read_at,
            deaths={seat.member: history.told_end(seat, known) for _, (seat, known) in gone if known.cause},
            gone_since=min((since for since, _ in gone), default=now),
            ends=self._ends_of(previous, members, gone, previous_at),
            decided_revision=revision,
            unreadable=unreadable,
            token=uuid.uuid4().hex[: records.TOKEN_DIGITS],
        )

    def _gone_of(
        self, previous: Round | None, members: Sequence[RoundCandidate], unreadable: Set[str], view: View, now: float
    ) -> list[tuple[float, Vacant]]:
        """The members with a seat that are gone: since when, and why, if it is known. One whose seat is held under
        another lease is gone if it has a cause: it was evicted.

        Each cause is read once: a sentinel writes it before its member goes. Of one that was gone and came back to its
        seat, another cause counts when it is gone again.
        """
        if previous is None or previous.closed:
            self._looked = {}
            return []
        seats = {(member, False) for member in rendezvous.vacant(previous, members, unreadable)}
        seats |= {(member, True) for member in rendezvous.held_seats(previous, members)}
        self._looked = {seat: found for seat, found in self._looked.items() if seat in seats}
        if new := seats - self._looked.keys():
            causes = causes_known(self._etcd, self._prefix, (member for member, _ in new))
            for member, is_held in sorted(new):
                seat = previous.seats[previous.ranks[member]]
                cause = causes.get(member, KnownCause("", view.revision))
                self._looked[member, is_held] = now, (seat, cause)
        return [found for (_, is_held), found in self._looked.items() if found[1][1].cause or not is_held]

    def _ends_of(
        self,
        previous: Round | None,
        members: Sequence[RoundCandidate],
        gone: Sequence[tuple[float, Vacant]],
        since: float,
    ) -> Sequence[HistoryEvent]:
        """How parts in the last round have ended, as far as is known. `since`: when it entered its state."""
        if previous is None or not previous.seats or previous.closed:
            return ()
        before = self._ends[1] if self._ends[0] == previous.name else {}
        asks = ((member.ask, member.revision) for member in members)
        ends = history.note_ends(before, previous, asks, (known for _, known in gone))
        self._ends = previous.name, ends
        # A host whose lease ends later than a lease may live on did not end the round: it was lost after that.
        is_over = self._options.return_to_seat and previous.recalled
        until = since + self._options.return_to_seat + LEASE_GRACE if is_over else inf
        in_time = [known for at, known in gone if at <= until]
        return *ends.values(), *history.lost_ends(previous, in_time, {member.ask.node for member in members})

    # -- a decision as keys and bytes -----------------------------------------------------------------------------

    def _publish(self, decision: Publish[Round], previous: Round | None, me: str) -> Publish[bytes]:
        """A new round opens its empty store, and closes that of the round before, in the same transaction."""
        record = replace(decision.record, by=me)
        value, before = records.encode(record), (previous or NO_ROUND).name
        if record.name == before:
            return Publish(value, decision.reason, decision.rule)
        self._rounds[record.name] = record  # its seats, which are known then
        deletes = [
            layout.Span(layout.fence_key(self._prefix, before)),
            layout.seats_span(self._prefix, before),
            layout.Span(layout.round_store_prefix(self._prefix, before), is_prefix=True),
        ]
        return Publish(
            value,
            decision.reason,
            decision.rule,
            puts=((layout.fence_key(self._prefix, record.name), b""), *records.encode_seats(self._prefix, record)),
            deletes=deletes if previous and previous.size else (),
        )


def read_round(prefix: str, decision: Publish[bytes]) -> None:
    """Parse what a decision writes, as a member does. Raises StateError."""
    head = records.parse_decided(layout.decided_key(prefix), decision.record)
    if decision.puts:
        records.seated(prefix, head, dict(decision.puts))
