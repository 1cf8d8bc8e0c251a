"""Joins the pure decisions of `core.rendezvous` to the group: keys and bytes on one side, records on the other."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ftcoord.core.invariants import check_fences, check_round
from ftcoord.core.layout import member_of, round_key, round_store_prefix
from ftcoord.core.rendezvous import RoundCandidate, RoundOptions, RoundSituation, decide
from ftcoord.core.rendezvous_records import Round, encode, parse_join_request, parse_round
from ftcoord.core.verdict import Publish, Verdict, Wait
from ftcoord.etcd.api import Span
from ftcoord.primitives.group.invariant_guard import InvariantGuard
from ftcoord.primitives.group.parse_cache import ParsedKey, ParsedKeys
from ftcoord.primitives.group.policy import View


class RendezvousPolicy:
    """Decides the rounds of one run. Implements `ftcoord.primitives.group.policy.Policy`."""

    def __init__(self, prefix: str, options: RoundOptions) -> None:
        self._prefix = prefix
        self._options = options
        self._members = ParsedKeys(parse_join_request)
        self._decided = ParsedKey(parse_round)
        self._highest = 0
        self._guard = InvariantGuard()

    def decide(self, view: View, me: str, now: float) -> Verdict[bytes]:
        """Raises StateError when the decided record is not ours to read."""
        previous = self._decided.of(view.decided) if view.decided else None
        # An etcd that lost its last writes may show an older record than this member has seen.
        self._highest = max(self._highest, previous.number if previous else 0)
        members = [
            RoundCandidate(member_of(kv.key), ask, view.seen[kv.key]) for kv, ask in self._members.of(view.members)
        ]
        situation = RoundSituation(
            members, view.changed_at, previous, view.decided_at, view.vanished, self._highest, view.read_at
        )
        verdict = decide(situation, self._options, now)
        verdict = self._guard.passed(verdict, lambda one: check_round(situation, one.record), now)
        if isinstance(verdict, Wait):
            return verdict
        number, published = verdict.record.number, self._publish(verdict, previous, me)
        return self._guard.passed(published, partial(check_fences, self._prefix, previous, number), now)

    def _publish(self, decision: Publish[Round], previous: Round | None, me: str) -> Publish[bytes]:
        """A new round opens its store, empty, and ends those before, in the same transaction.

        The round before is that of the record, or where the record was lost the one before this by its number. What
        lies in the new one's store is of a run that was forgotten since.
        """
        value = encode(replace(decision.record, by=me))
        number, last = decision.record.number, previous.number if previous else 0
        if number == last:
            return Publish(value, decision.reason, decision.rule)
        over = sorted({last, number - 1} - {0})
        fences = [Span(round_key(self._prefix, before)) for before in over]
        stores = [Span(round_store_prefix(self._prefix, one), is_prefix=True) for one in (*over, number)]
        old = [*fences, *stores]
        return Publish(
            value,
            decision.reason,
            decision.rule,
            puts=((round_key(self._prefix, number), b""),),
            deletes=old,
        )
