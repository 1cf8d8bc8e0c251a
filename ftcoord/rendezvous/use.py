"""Rounds as a use of the group mechanism."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

from ftcoord.core import rendezvous, rendezvous_records
from ftcoord.core.layout import roll_key
from ftcoord.core.outlook import Outlook
from ftcoord.core.rendezvous_records import (
    ROLLS,
    AnyRound,
    HeardRound,
    JoinRequest,
    RollChunk,
    RollSizes,
    RoundHead,
    parse_chunk,
    parse_decided,
)
from ftcoord.core.round_situation import RoundOptions
from ftcoord.core.strict import LARGEST_DECIDED_STEP, check_step
from ftcoord.etcd.api import Etcd, KeyValue
from ftcoord.primitives.group.use import Use
from ftcoord.rendezvous.policy import RendezvousPolicy


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
        rolls: RollSizes = ROLLS,
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
        record = parse_decided(key, value)
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
        return roll_key(self._prefix, record.roll, record.chunk_of(me))

    def with_part(self, record: AnyRound, me: str, part: KeyValue | None) -> AnyRound:
        assert isinstance(record, RoundHead)
        if part is None:
            return HeardRound.of(record, gone=True)
        chunk, at = parse_chunk(part.key, part.value), record.chunk_of(me)
        self._read = record.roll, chunk, at
        return HeardRound.of(record, chunk, at)

    def stamp(self, ask: JoinRequest) -> JoinRequest:
        return replace(ask, nonce=uuid.uuid4().hex)

    def encode(self, ask: JoinRequest) -> bytes:
        return rendezvous_records.encode(ask)

    def rank(self, record: AnyRound, me: Sequence[str]) -> int | None:
        return next((rank for one in reversed(me) if (rank := record.rank_of(one)) is not None), None)

    def outlook(self, record: AnyRound | None, me: Sequence[str], ask: JoinRequest) -> Outlook[JoinRequest]:
        return rendezvous.outlook(record, me[-1], ask)
