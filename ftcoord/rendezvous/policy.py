"""Joins the pure decisions of `core.rendezvous` to the group: keys and bytes on one side, records on the other."""

from __future__ import annotations

import logging
from dataclasses import replace

from ftcoord.core import records
from ftcoord.core.records import Ask
from ftcoord.core.rendezvous import Decision, Member, Options, Situation, decide
from ftcoord.errors import StateError
from ftcoord.etcd.api import KeyValue, Span
from ftcoord.etcd.group import Publish, View, Wait

log = logging.getLogger(__name__)


class RendezvousPolicy:
    """Decides the rounds of one run. Implements `ftcoord.etcd.group.Policy`."""

    def __init__(self, prefix: str, options: Options) -> None:
        self._prefix = prefix
        self._options = options
        self._read: dict[str, tuple[int, Ask | None]] = {}

    def decide(self, view: View, me: str, now: float) -> Publish | Wait:
        """Raises StateError when the decided record is not ours to read."""
        previous = records.parse_round(view.decided.key, view.decided.value) if view.decided else None
        self._read = {kv.key: self._ask(kv) for kv in view.members}
        members = [
            Member(kv.key.rpartition("/")[2], ask, view.seen[kv.key])
            for kv in view.members
            if (ask := self._read[kv.key][1]) is not None
        ]
        situation = Situation(members, view.changed_at, previous, view.decided_at, view.vanished)
        verdict = decide(situation, self._options, now)
        if isinstance(verdict, Decision):
            return self._publish(verdict, previous, me)
        return Wait(verdict.reason, verdict.until)

    def _ask(self, kv: KeyValue) -> tuple[int, Ask | None]:
        """What a member asks, read once. A key that is not a member's is left alone, and said once."""
        known = self._read.get(kv.key)
        if known is not None and known[0] == kv.mod_revision:
            return known
        try:
            return kv.mod_revision, records.parse_ask(kv.key, kv.value)
        except StateError as error:
            log.warning("not counted as a member: %s", error)
            return kv.mod_revision, None

    def _publish(self, decision: Decision, previous: records.Round | None, me: str) -> Publish:
        """A new round opens its store and ends that of the round before, in the same transaction."""
        value = records.encode(replace(decision.round, by=me))
        number, before = decision.round.number, previous.number if previous else 0
        if number == before:
            return Publish(value, decision.reason)
        old = (
            Span(records.round_key(self._prefix, before)),
            Span(records.store_prefix(self._prefix, before), is_prefix=True),
        )
        return Publish(
            value, decision.reason, puts={records.round_key(self._prefix, number): b""}, deletes=old if before else ()
        )
