"""The rolls of a run's large rounds: who sits where, in chunks beside the record that names them."""

from __future__ import annotations

from dataclasses import replace

from ftcoord.core.layout import Span, decided_key, other_rolls, roll_key, roll_span, rolls_span
from ftcoord.core.rendezvous_records import (
    RollSizes,
    Round,
    RoundHead,
    chunks_of,
    encode,
    head_of,
    parse_chunk,
    parse_decided,
    roll_id,
    round_of,
    with_roll,
)
from ftcoord.core.verdict import Publish
from ftcoord.errors import StateError
from ftcoord.etcd.api import Etcd, Get, read_snapshot
from ftcoord.primitives.group.policy import View


class RollReplaced(Exception):
    """The roll of a record was deleted, because there is another record by now."""


def read_round(prefix: str, decision: Publish[bytes]) -> None:
    """Parse what a decision writes, as a member does. Raises StateError."""
    record = parse_decided(decided_key(prefix), decision.record)
    if isinstance(record, RoundHead) and decision.beside:
        round_of(roll_span(prefix, record.roll).start, record, [parse_chunk(*chunk) for chunk in decision.beside])


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
            return None if head.ready and not head.closed else with_roll(head, (), ())
        self._known = {head.roll: known}
        return with_roll(head, known.seats, known.away)

    def _read_roll(self, head: RoundHead, view: View) -> Round | None:
        """Raises RollReplaced, StateError, EtcdError."""
        assert view.decided is not None
        span = roll_span(self._prefix, head.roll)
        kvs = {kv.key: kv for kv in read_snapshot(self._etcd.range, lambda then: then.pages(span))}
        keys = [roll_key(self._prefix, head.roll, chunk) for chunk in range(head.chunks)]
        if all(key in kvs for key in keys):
            return round_of(span.start, head, (parse_chunk(key, kvs[key].value) for key in keys))
        if view.vanished:
            return None
        now = self._etcd.range(Get(Span(view.decided.key), keys_only=True)).one
        if now is None or now.mod_revision != view.decided.mod_revision:
            raise RollReplaced
        raise StateError(span.start, f"is not whole, though {now.key} names it: delete that, so that all decide anew")

    def name(self, record: Round, me: str) -> str:
        """The name of the roll of a new round, as its participants know it."""
        return record.roll if self._sizes.is_inline(record) else roll_id(record, self._sizes.chunks_for(record), me)

    def new(self, record: Round, me: str) -> tuple[bytes, list[tuple[str, bytes]]]:
        """The record of a new round, and its roll if that is stored beside it."""
        if self._sizes.is_inline(record):
            return encode(replace(record, by=me)), []
        chunks, roll = self._sizes.chunks_for(record), self.name(record, me)
        self._known[roll] = record
        return encode(head_of(record, roll, chunks, me)), self._chunks(record, roll, chunks)

    def said_again(
        self, record: Round, head: RoundHead | None, me: str, with_roll: bool
    ) -> tuple[bytes, list[tuple[str, bytes]]]:
        """A later record of a round, in the form in which the round was decided, because its participants know it in
        that form."""
        if head is None:
            return encode(replace(record, by=me)), []
        value = encode(head_of(record, head.roll, head.chunks, me))
        return value, self._chunks(record, head.roll, head.chunks) if with_roll else []

    def _chunks(self, record: Round, roll: str, chunks: int) -> list[tuple[str, bytes]]:
        parts = enumerate(chunks_of(record, chunks))
        return [(roll_key(self._prefix, roll, at), encode(chunk)) for at, chunk in parts]

    def old(self, record: Round, me: str) -> list[Span]:
        """All rolls but that of this new round."""
        if self._sizes.is_inline(record):
            return [rolls_span(self._prefix)]
        return list(other_rolls(self._prefix, self.name(record, me)))
