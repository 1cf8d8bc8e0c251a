"""The JSON record of a heartbeat, layout v1, and which names are alive, by the heartbeats that were seen. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ftcoord.core.strict import build, dump, json_problem, load
from ftcoord.errors import StateError


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat.

    Args:
        name: the heartbeat's name.
        data: its data, as JSON text.
        left: whether it is about to give up its lease: it has then left, and not expired.
    """

    name: str
    data: str
    left: bool = False


def encode(beat: Beat) -> bytes:
    """The record as JSON, with the layout's version."""
    return dump(beat)


def parse_beat(key: str, value: bytes) -> Beat:
    """The heartbeat in a key. Raises StateError."""
    beat = build(Beat, key, load(key, value))
    if problem := json_problem(beat.data):
        raise StateError(key, f"holds data that is no JSON ({problem})")
    return beat


@dataclass(frozen=True, slots=True)
class HeartbeatEvent:
    """A change of one name.

    Attributes:
        kind: ``joined``, ``updated`` (with new data) or ``lost``.
        name: the heartbeat's name.
        data: its last data.
        reason: why it is lost: ``left``, ``died`` or ``expired``; else empty.
        cause: why it died, in one line such as "host7 (pid 4711) was killed by signal 9 (SIGKILL)"; else empty.
    """

    kind: Literal["joined", "updated", "lost"]
    name: str
    data: Any = None
    reason: Literal["", "left", "died", "expired"] = ""
    cause: str = ""


class _Life(NamedTuple):
    """The process that represents a name."""

    key: str
    created: int
    data: str


class Roll:
    """The live names. Of several processes with one name only the newest counts: it has replaced the others."""

    def __init__(self) -> None:
        self._lives: dict[str, _Life] = {}

    def note(self, key: str, created: int, beat: Beat) -> HeartbeatEvent | None:
        """The event for a beat that was written, to a key that has existed since the revision `created`."""
        if beat.left:
            return self._end(key, beat.name, "left", "")
        before = self._lives.get(beat.name)
        if before is not None and created < before.created:
            return None
        self._lives[beat.name] = _Life(key, created, beat.data)
        if before is not None and before.data == beat.data:
            return None
        return HeartbeatEvent("updated" if before else "joined", beat.name, json.loads(beat.data))

    def drop(self, key: str, name: str, cause: str = "") -> HeartbeatEvent | None:
        """The event for a key that is gone; `cause` is why its process died, if it did."""
        return self._end(key, name, "died" if cause else "expired", cause)

    def speaks_for(self, key: str, name: str) -> bool:
        """Whether the process with this key represents the name."""
        life = self._lives.get(name)
        return life is not None and life.key == key

    def _end(
        self, key: str, name: str, reason: Literal["left", "died", "expired"], cause: str
    ) -> HeartbeatEvent | None:
        if not self.speaks_for(key, name):
            return None
        return HeartbeatEvent("lost", name, json.loads(self._lives.pop(name).data), reason, cause)
