"""Joins the pure decisions of `core.quorum` to the group: who lives, who asks since when, what was decided."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from ftcoord.core.quorum import Decision, Options, Replica, decide
from ftcoord.core.quorum_records import encode, parse_petition, parse_quorum
from ftcoord.etcd.deciding import Publish, View, Wait
from ftcoord.etcd.readings import Reading, Readings

log = logging.getLogger(__name__)

LEASE_FLOOR: Final = 3.0
"""Seconds. A shorter heartbeat time-out is judged by beats: etcd's leases do not end that soon (2 s at the least)."""

parse_decided = functools.lru_cache(maxsize=4)(parse_quorum)
"""`parse_quorum`: each quorum is read once in a process, which may represent many replicas."""


class QuorumPolicy:
    """Decides the quorums of one job. Implements `ftcoord.etcd.deciding.Policy`.

    A member lives as long as its lease. With a `heartbeat_timeout` below `LEASE_FLOOR` it must also have written its
    record within that many seconds, on the decider's clock.
    """

    def __init__(self, options: Options, heartbeat_timeout: float, wall_clock: Callable[[], float] = time.time) -> None:
        self._options, self._wall_clock = options, wall_clock
        self._patience = heartbeat_timeout if heartbeat_timeout < LEASE_FLOOR else None
        self._readings = Readings(parse_petition)
        self._decided = Reading(parse_decided)
        self._known: dict[str, tuple[int, Replica]] = {}
        self._said = ""

    def decide(self, view: View, me: str, now: float) -> Publish | Wait:
        """Raises StateError when the decided record is not ours to read."""
        previous = self._decided.of(view.decided) if view.decided else None
        self._note(view)
        alive, silent, next_death = self._judge(view, now)
        verdict = decide(
            alive, previous, self._options, now, self._wall_clock(), previous_at=view.decided_at, silent=silent
        )
        self._say(verdict.reason)
        if isinstance(verdict, Decision):
            return Publish(encode(replace(verdict.quorum, by=me)), verdict.reason)
        times = [at for at in (verdict.until, next_death) if at is not None]
        return Wait(verdict.reason, min(times, default=None))

    def _note(self, view: View) -> None:
        """The members, and the revision at which each said what it says. Beats do not change since when it asks."""
        before, self._known = self._known, {}
        for kv, one in self._readings.of(view.members):
            known = before.get(kv.key)
            if known is None or known[0] != kv.mod_revision:
                since = known[1].joined if known and known[1].asked == one.asked else view.seen[kv.key]
                member = kv.key.rpartition("/")[2]
                known = kv.mod_revision, Replica(member, one.request, one.asked, one.after, since)
            self._known[kv.key] = known

    def _judge(self, view: View, now: float) -> tuple[list[Replica], list[Replica], float | None]:
        """Who lives, who is silent, and when the next one may be called so."""
        replicas = [(key, replica) for key, (_, replica) in self._known.items()]
        if self._patience is None:
            return [replica for _, replica in replicas], [], None
        dies_at = {key: view.seen[key] + self._patience for key, _ in replicas}
        alive = [replica for key, replica in replicas if dies_at[key] > now]
        silent = [replica for key, replica in replicas if dies_at[key] <= now]
        return alive, silent, min((at for at in dies_at.values() if at > now), default=None)

    def _say(self, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            log.info("%s", reason)
