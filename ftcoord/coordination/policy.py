"""Joins the pure decisions of `core.quorum` to the group: who lives, who asks since when, what was decided."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from ftcoord import concurrency
from ftcoord.core.invariants import check_quorum
from ftcoord.core.layout import member_of
from ftcoord.core.quorum import NOTHING_HEARD, Highest, QuorumCandidate, QuorumOptions, QuorumSituation, decide
from ftcoord.core.quorum_records import QuorumRecord, encode, parse_quorum, parse_replica
from ftcoord.core.verdict import Publish, Verdict, Wait
from ftcoord.etcd.api import KeyValue
from ftcoord.primitives.group.invariant_guard import InvariantGuard
from ftcoord.primitives.group.parse_cache import ParsedKey, ParsedKeys
from ftcoord.primitives.group.policy import View

log = logging.getLogger(__name__)

LEASE_FLOOR: Final = 3.0
"""Seconds. A shorter heartbeat time-out is judged by beats: etcd's leases do not end that soon (2 s at the least)."""

parse_decided = functools.lru_cache(maxsize=4)(parse_quorum)
"""`parse_quorum`: each quorum is read once in a process, which may represent many replicas."""


class HighestSeen:
    """What a replica remembers of all quorums that it heard of, whatever etcd and its leases forget. Thread-safe."""

    def __init__(self) -> None:
        self._lock = concurrency.lock("HighestSeen._lock")  # two threads may read a record at the same time
        self.highest: Highest = NOTHING_HEARD

    def read(self, key: str, value: bytes) -> QuorumRecord:
        """A decided record, which is remembered. Raises StateError."""
        quorum = parse_decided(key, value)
        with self._lock:
            self.highest = self.highest.and_of(quorum)
        return quorum


class QuorumPolicy:
    """Decides the quorums of one job. Implements `ftcoord.primitives.group.policy.Policy`.

    A member lives as long as its lease. With a `heartbeat_timeout` below `LEASE_FLOOR` it must also have written its
    record within that many seconds, on the decider's clock.

    Args:
        options: the job's.
        heartbeat_timeout: in seconds.
        look: the members' mod revisions in etcd now, by their keys. Raises EtcdError.
        seen: numbers and ids in it are not given again.
        wall_clock: for people.
    """

    def __init__(
        self,
        options: QuorumOptions,
        heartbeat_timeout: float,
        look: Callable[[], Mapping[str, int]],
        seen: HighestSeen,
        wall_clock: Callable[[], float] = concurrency.wall,
    ) -> None:
        self._options, self._look, self._seen, self._wall_clock = options, look, seen, wall_clock
        self._patience = heartbeat_timeout if heartbeat_timeout < LEASE_FLOOR else None
        self._members = ParsedKeys(parse_replica)
        self._decided = ParsedKey(seen.read)
        self._known: dict[str, tuple[KeyValue, QuorumCandidate]] = {}
        self._silent: dict[str, int] = {}
        self._said = ""
        self._guard = InvariantGuard()

    def decide(self, view: View, me: str, now: float) -> Verdict[bytes]:
        """Raises StateError when the decided record is not ours to read, and EtcdError."""
        previous = self._decided.of(view.decided) if view.decided else None
        self._note(view)
        alive, silent, next_death = self._judge(view, now)
        situation = QuorumSituation(alive, previous, view.decided_at, silent, self._seen.highest, self._wall_clock())
        verdict = decide(situation, self._options, now)
        check = lambda one: check_quorum(situation, self._options, one.record)  # noqa: E731
        verdict = self._guard.passed(verdict, check, now)
        self._say(verdict.reason)
        if isinstance(verdict, Publish):
            return Publish(encode(replace(verdict.record, by=me)), verdict.reason, verdict.rule)
        times = [at for at in (verdict.until, next_death) if at is not None]
        return Wait(verdict.reason, min(times, default=None), verdict.rule)

    def _note(self, view: View) -> None:
        """The members, and what each was when it said what it says. Beats do not change since when it asks."""
        before, self._known = self._known, {}
        for kv, one in self._members.of(view.members):
            known = before.get(kv.key)
            # The whole value counts: an etcd that lost writes gives their revisions to others.
            if known is None or known[0] != kv:
                same = known[1] if known and known[1].asked == one.asked else None
                since, asked_at = (same.joined, same.asked_at) if same else (view.seen[kv.key], kv.mod_revision)
                member = member_of(kv.key)
                replica = QuorumCandidate(
                    member, one.request, one.asked, one.after, since, kv.create_revision, asked_at
                )
                known = kv, replica
            self._known[kv.key] = known

    def _judge(self, view: View, now: float) -> tuple[list[QuorumCandidate], list[QuorumCandidate], float | None]:
        """Who lives, who is silent, and when the next one may be called so."""
        replicas = [(key, replica) for key, (_, replica) in self._known.items()]
        if self._patience is None:
            return [replica for _, replica in replicas], [], None
        dies_at = {key: view.seen[key] + self._patience for key, _ in replicas}
        self._confirm_silence([key for key, at in dies_at.items() if at <= now])
        alive = [replica for key, replica in replicas if key not in self._silent]
        silent = [replica for key, replica in replicas if key in self._silent]
        return alive, silent, min((at for at in dies_at.values() if at > now), default=None)

    def _confirm_silence(self, unheard: list[str]) -> None:
        """Only who wrote nothing is silent. A decider that was stopped, or cut off, has not heard of all yet."""
        wrote = {key: self._known[key][0].mod_revision for key in unheard}
        if any(self._silent.get(key) != revision for key, revision in wrote.items()):
            now = self._look()
            wrote = {key: revision for key, revision in wrote.items() if now.get(key, revision) == revision}
        self._silent = wrote

    def _say(self, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            log.info("%s", reason)
