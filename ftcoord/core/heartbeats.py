"""Heartbeats: their record and key. Pure.

<prefix>/heartbeats/<name>/<lease id>    a Beat under the lease of whoever lives
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ftcoord.core.strict import build, dump, json_problem, load
from ftcoord.errors import StateError


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life.

    Args:
        name: whose.
        data: what it tells the others, as JSON text.
        left: whether it is about to give its lease up: then it has left, and has not expired.
    """

    name: str
    data: str
    left: bool = False


@dataclass(frozen=True, slots=True)
class HeartbeatEvent:
    """What became of a name.

    Attributes:
        kind: ``joined``, ``updated`` (with new data) or ``lost``.
        name: whose heartbeat it is.
        data: what it told the others last.
        reason: of a loss: ``left`` or ``expired``; else empty.
    """

    kind: Literal["joined", "updated", "lost"]
    name: str
    data: Any = None
    reason: Literal["", "left", "expired"] = ""


def heartbeats_prefix(prefix: str) -> str:
    """What the keys of a run's heartbeats start with."""
    return f"{prefix}/heartbeats/"


def beat_key(prefix: str, name: str, lease: int) -> str:
    """`name` must be percent-encoded."""
    return f"{heartbeats_prefix(prefix)}{name}/{lease:016x}"


def encode(beat: Beat) -> bytes:
    """The record as JSON, with the layout's version."""
    return dump(beat)


def parse(key: str, value: bytes) -> Beat:
    """Raises StateError."""
    beat = build(Beat, key, load(key, value))
    if problem := json_problem(beat.data):
        raise StateError(key, f"holds data that is no JSON ({problem})")
    return beat


class _Life(NamedTuple):
    """The process that speaks for a name."""

    key: str
    created: int
    data: str


class Roll:
    """Who lives. Of several processes with one name only the newest counts: the others have been replaced by it."""

    def __init__(self) -> None:
        self._lives: dict[str, _Life] = {}

    def note(self, key: str, created: int, beat: Beat) -> HeartbeatEvent | None:
        """A beat that was written, to a key that is there since the revision `created`; what it means."""
        if beat.left:
            return self.drop(key, beat.name, "left")
        before = self._lives.get(beat.name)
        if before is not None and created < before.created:
            return None
        self._lives[beat.name] = _Life(key, created, beat.data)
        if before is not None and before.data == beat.data:
            return None
        return HeartbeatEvent("updated" if before else "joined", beat.name, json.loads(beat.data))

    def drop(self, key: str, name: str, reason: Literal["left", "expired"] = "expired") -> HeartbeatEvent | None:
        """A key that is gone; what it means."""
        life = self._lives.get(name)
        if life is None or life.key != key:
            return None
        del self._lives[name]
        return HeartbeatEvent("lost", name, json.loads(life.data), reason)
