"""Joins the pure decisions of `core.quorum` to the group: who lives, who asks since when, what was decided."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from ftcoord.core.quorum import Decision, Options, Replica, decide
from ftcoord.core.quorum_records import Petition, encode, parse_petition, parse_quorum
from ftcoord.etcd.api import KeyValue
from ftcoord.etcd.deciding import Publish, View, Wait
from ftcoord.etcd.readings import Reading, Readings

log = logging.getLogger(__name__)

LEASE_FLOOR: Final = 3.0
"""Seconds. A shorter heartbeat time-out is judged by beats: etcd's leases do not end that soon (2 s at the least)."""


class QuorumPolicy:
    """Decides the quorums of one job. Implements `ftcoord.etcd.deciding.Policy`.

    A member lives as long as its lease. With a `heartbeat_timeout` below `LEASE_FLOOR` it must also have written its
    record within that many seconds, on the decider's clock.
    """

    def __init__(self, options: Options, heartbeat_timeout: float, wall_clock: Callable[[], float] = time.time) -> None:
        self._options, self._wall_clock = options, wall_clock
        self._patience = heartbeat_timeout if heartbeat_timeout < LEASE_FLOOR else None
        self._readings = Readings(parse_petition)
        self._decided = Reading(parse_quorum)
        self._joined: dict[str, tuple[int, float]] = {}
        self._said = ""

    def decide(self, view: View, me: str, now: float) -> Publish | Wait:
        """Raises StateError when the decided record is not ours to read."""
        previous = self._decided.of(view.decided) if view.decided else None
        said = self._readings.of(view.members)
        self._joined = {kv.key: self._since(kv, one, view) for kv, one in said}
        alive, silent, next_death = [], [], None
        for kv, one in said:
            replica = Replica(kv.key.rpartition("/")[2], one.request, one.asked, one.after, self._joined[kv.key][1])
            dies_at = None if self._patience is None else view.seen[kv.key] + self._patience
            if dies_at is not None and dies_at <= now:
                silent.append(replica)
                continue
            alive.append(replica)
            if dies_at is not None and (next_death is None or dies_at < next_death):
                next_death = dies_at
        verdict = decide(
            alive, previous, self._options, now, self._wall_clock(), previous_at=view.decided_at, silent=silent
        )
        self._say(verdict.reason)
        if isinstance(verdict, Decision):
            return Publish(encode(replace(verdict.quorum, by=me)), verdict.reason)
        times = [at for at in (verdict.until, next_death) if at is not None]
        return Wait(verdict.reason, min(times, default=None))

    def _since(self, kv: KeyValue, one: Petition, view: View) -> tuple[int, float]:
        """What it asks, and since when: beats do not change that."""
        known = self._joined.get(kv.key)
        return known if known is not None and known[0] == one.asked else (one.asked, view.seen[kv.key])

    def _say(self, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            log.info("%s", reason)
