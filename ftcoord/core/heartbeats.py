"""Heartbeats: their record and key. Pure.

<prefix>/heartbeats/<name>/<lease id>    a Beat under the lease of whoever lives
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

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


class Roll:
    """Who lives. Of several processes with one name the newest speaks for it, and it is lost with the last of them."""

    def __init__(self) -> None:
        self._lives: dict[str, dict[str, tuple[int, Beat]]] = {}

    def note(self, key: str, created: int, beat: Beat) -> HeartbeatEvent | None:
        """A beat that was written, to a key that is there since the revision `created`; what it means."""
        if beat.left:
            return self.drop(key, beat.name, "left")
        lives = self._lives.setdefault(beat.name, {})
        before = _newest(lives)
        lives[key] = (created, beat)
        now = _newest(lives) or beat
        if before == now:
            return None
        return HeartbeatEvent("updated" if before else "joined", beat.name, json.loads(now.data))

    def drop(self, key: str, name: str, reason: Literal["left", "expired"] = "expired") -> HeartbeatEvent | None:
        """A key that is gone; what it means."""
        lives = self._lives.get(name, {})
        gone = lives.pop(key, None)
        if lives:
            return None
        self._lives.pop(name, None)
        return None if gone is None else HeartbeatEvent("lost", name, json.loads(gone[1].data), reason)


def _newest(lives: dict[str, tuple[int, Beat]]) -> Beat | None:
    return max(lives.values(), key=lambda life: life[0])[1] if lives else None
