"""What a run's history says of nodes while nothing is decided: who waits, and who is refused.

Most nodes that come are in the next round a moment later, which says so itself. Only those that are not are told of,
all of them in one event, and seldom: thousands may wait for hours. No clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from ftcoord.core.event_records import EventKind, HistoryEvent
from ftcoord.core.rendezvous import RoundSituation, limits_of, spelled
from ftcoord.core.rendezvous_records import NO_ROUND
from ftcoord.core.round_history import counted, named

TELL_AFTER: Final = 5.0
"""Seconds for which something must be so before it is told."""
LOOK_INTERVAL: Final = 1.0
"""Seconds between two looks: each goes through all members, and thousands may come within a second."""
LONGEST_PAUSE: Final = 600.0
"""Seconds between two such events at most; the first pause is TELL_AFTER, and each one is twice as long as the last."""


class _Standing(NamedTuple):
    kind: EventKind
    text: str


class Bystanders:
    """What one decider has told of those that have no seat. Times are its own monotonic seconds."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, _Standing], float] = {}
        """When each node was seen to stand like that first,"""
        self._told: set[tuple[str, _Standing]] = set()
        """and of which of them that was told."""
        self._pause, self._not_before, self._looks_at = TELL_AFTER, 0.0, 0.0
        self._number = -1

    def look(self, situation: RoundSituation, now: float) -> tuple[list[HistoryEvent], float | None]:
        """What is to be told now, and when to look again at the latest."""
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
    """The hosts of the nodes without a seat, by node and by how they stand; of a run that is over, none."""
    previous, limits = situation.previous or NO_ROUND, limits_of(situation)
    if previous.closed:
        return {}
    is_full = previous.size and not previous.recalled and previous.size >= limits[1]
    waits = f"waits as a spare: the round has all of its {limits[1]} nodes" if is_full else "waits for a round"
    found = {}
    for member in situation.members:
        ask = member.ask
        if ask.leaving or ask.node in previous.nodes or ask.node in previous.drained:
            continue
        if ask.limits != limits:
            text = f"is refused: it wants --nnodes={spelled(ask.limits)}, and the run has --nnodes={spelled(limits)}"
            found[ask.node, _Standing("refused", text)] = ask.host
        else:
            found[ask.node, _Standing("waiting", waits)] = ask.host
    return found


def _events(number: int, new: Mapping[tuple[str, _Standing], str]) -> list[HistoryEvent]:
    """One for all that stand alike."""
    told = []
    for standing in dict.fromkeys(standing for _, standing in new):
        alike = {node: host for (node, one), host in new.items() if one == standing}
        (node, host), *others = alike.items()
        names = f"of {counted(len(alike), 'node')} ({named([*alike.values()])}) each" if others else host
        who = ("", "") if others else (host, node)
        told.append(HistoryEvent(standing.kind, number, *who, f"{names} {standing.text}"))
    return told
