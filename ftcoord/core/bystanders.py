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
from ftcoord.core.round_situation import RoundSituation, limits_of, spelled

TELL_AFTER: Final = 5.0
"""Seconds for which a node must wait or be refused before it is reported."""
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
        self._since: dict[tuple[str, _Standing], float] = {}
        """When each node was first seen in its standing,"""
        self._told: set[tuple[str, _Standing]] = set()
        """and which of these were reported."""
        self._pause, self._not_before, self._looks_at = TELL_AFTER, 0.0, 0.0
        self._number = -1

    def look(self, situation: RoundSituation, now: float) -> tuple[list[HistoryEvent], float | None]:
        """The events to write now, and the latest time to check again."""
        number = (situation.previous or NO_ROUND).number
        if number != self._number:
            self._number, self._pause, self._not_before, self._looks_at = number, TELL_AFTER, now, now
        if now < self._looks_at:
            return [], self._looks_at
        self._looks_at = now + LOOK_INTERVAL
        hosts = _standings(situation)
        self._since = {one: self._since.get(one, now) for one in hosts}
        self._told &= hosts.keys()
        new = {one: host for one, host in hosts.items() if one not in self._told}
        if not new:
            return [], None
        due = max(min(self._since[one] for one in new) + TELL_AFTER, self._not_before)
        if now < due:
            return [], due
        self._told |= new.keys()
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._not_before = now + self._pause
        return _events(number, new), None


def _standings(situation: RoundSituation) -> Mapping[tuple[str, _Standing], str]:
    """The hosts of the nodes without a seat, by node and standing; empty for a run that is over."""
    previous, limits = situation.previous or NO_ROUND, limits_of(situation)
    if previous.closed:
        return {}
    is_full = previous.size and not previous.recalled and previous.size >= limits[1]
    waits = f"waits as a spare: the round has all of its {limits[1]} nodes" if is_full else "waits for a round"
    found = {}
    for member in situation.members:
        ask = member.ask
        works = ask.holds or ask.seated > ask.after  # in an earlier round, or in one that etcd has lost
        if ask.leaving or works or ask.node in previous.nodes or ask.node in previous.drained:
            continue
        if ask.limits != limits:
            text = f"is refused: it wants --nnodes={spelled(ask.limits)}, and the run has --nnodes={spelled(limits)}"
            found[ask.node, _Standing("refused", text)] = ask.host
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
