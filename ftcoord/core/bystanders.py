"""What a run's history reports about nodes while nothing is decided: which wait, and which are refused.

Most nodes that come are in the next round a moment later, which shows that. Only the others are reported, all of them
in one event, and rarely: thousands may wait for hours. No clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from ftcoord.core.event_records import EventKind, HistoryEvent
from ftcoord.core.rendezvous_records import NO_ROUND
from ftcoord.core.round_history import counted, named
from ftcoord.core.round_situation import RoundSituation, contradicts, limits_of

TELL_AFTER: Final = 5.0
"""Seconds for which a node must wait before it is reported. A refused one is reported at once: it soon ends."""
LOOK_INTERVAL: Final = 1.0
"""Seconds between two checks: each goes through all members, and thousands may come within a second."""
LONGEST_PAUSE: Final = 600.0
"""The most seconds between two such events. The first pause is TELL_AFTER; each is twice as long as the last."""


class _Standing(NamedTuple):
    kind: EventKind
    text: str


class Bystanders:
    """What one decider has reported about nodes without a seat. Times are its own monotonic seconds."""

    def __init__(self) -> None:
        self._number, self._looks_at = -1, 0.0
        self._kinds: tuple[_Reports, ...] = ()

    def look(self, situation: RoundSituation, now: float) -> tuple[list[HistoryEvent], float | None]:
        """The events to write now, and the latest time to check again."""
        number = (situation.previous or NO_ROUND).number
        if number != self._number:
            told = [one.told for one in self._kinds] or [set(), set()]
            self._kinds = _Reports("refused", 0.0, now, told[0]), _Reports("waiting", TELL_AFTER, now, told[1])
            self._number, self._looks_at = number, now
        if now < self._looks_at:
            return [], self._looks_at
        self._looks_at = now + LOOK_INTERVAL
        hosts = _standings(situation)
        found = [kind.look(number, hosts, now) for kind in self._kinds]
        return [one for events, _ in found for one in events], min((at for _, at in found if at), default=None)


class _Reports:
    """What was reported about the nodes of one standing, once they have had it for `after` seconds."""

    def __init__(self, kind: EventKind, after: float, not_before: float, told: set[tuple[str, _Standing]]) -> None:
        self._kind, self._after = kind, after
        self._pause, self._not_before = TELL_AFTER, not_before
        self._since: dict[tuple[str, _Standing], float] = {}
        """When each node was first seen in its standing,"""
        self.told = told
        """and which of these were reported."""

    def look(
        self, number: int, standings: Mapping[tuple[str, _Standing], str], now: float
    ) -> tuple[list[HistoryEvent], float | None]:
        hosts = {one: host for one, host in standings.items() if one[1].kind == self._kind}
        self._since = {one: self._since.get(one, now) for one in hosts}
        self.told &= hosts.keys()
        new = {one: host for one, host in hosts.items() if one not in self.told}
        if not new:
            return [], None
        due = max(min(self._since[one] for one in new) + self._after, self._not_before)
        if now < due:
            return [], due
        self.told |= new.keys()
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._not_before = now + self._pause
        return _events(number, new), None


def _standings(situation: RoundSituation) -> Mapping[tuple[str, _Standing], str]:
    """The hosts of the nodes without a seat, by node and standing; empty for a run that is over."""
    previous, limits = situation.previous or NO_ROUND, limits_of(situation)
    if previous.closed:
        return {}
    is_full = previous.size and not previous.recalled and previous.size >= limits[1]
    waits = (
        f"waits as a spare: the round has all of its {counted(limits[1], 'node')}" if is_full else "waits for a round"
    )
    found = {}
    for member in situation.members:
        ask = member.ask
        works = ask.holds or ask.seated > ask.after  # in an earlier round, or in one that etcd has lost
        if ask.leaving or works or ask.node in previous.nodes or ask.node in previous.drained:
            continue
        if ask.limits != limits:
            found[ask.node, _Standing("refused", contradicts(ask.limits, limits))] = ask.host
        else:
            found[ask.node, _Standing("waiting", waits)] = ask.host
    return found


def _events(number: int, new: Mapping[tuple[str, _Standing], str]) -> list[HistoryEvent]:
    """One event for all nodes of the same standing."""
    told = []
    for standing in dict.fromkeys(standing for _, standing in new):
        alike = {node: host for (node, one), host in new.items() if one == standing}
        (node, host), *others = alike.items()
        names = f"of {counted(len(alike), 'node')} ({named([*alike.values()])}) each" if others else host
        who = ("", "") if others else (host, node)
        told.append(HistoryEvent(standing.kind, number, *who, f"{names} {standing.text}"))
    return told
