"""Who lives, by the heartbeats that were seen. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ftcoord.core.heartbeat_records import Beat


@dataclass(frozen=True, slots=True)
class HeartbeatEvent:
    """What became of a name.

    Attributes:
        kind: ``joined``, ``updated`` (with new data) or ``lost``.
        name: whose heartbeat it is.
        data: what it told the others last.
        reason: of a loss: ``left``, ``died`` or ``expired``; else empty.
        cause: of a death, one line such as "host7 (pid 4711) was killed by signal 9 (SIGKILL)"; else empty.
    """

    kind: Literal["joined", "updated", "lost"]
    name: str
    data: Any = None
    reason: Literal["", "left", "died", "expired"] = ""
    cause: str = ""


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
            return self._end(key, beat.name, "left", "")
        before = self._lives.get(beat.name)
        if before is not None and created < before.created:
            return None
        self._lives[beat.name] = _Life(key, created, beat.data)
        if before is not None and before.data == beat.data:
            return None
        return HeartbeatEvent("updated" if before else "joined", beat.name, json.loads(beat.data))

    def drop(self, key: str, name: str, cause: str = "") -> HeartbeatEvent | None:
        """A key that is gone, and the cause of its process's death, if it died; what it means."""
        return self._end(key, name, "died" if cause else "expired", cause)

    def speaks_for(self, key: str, name: str) -> bool:
        """Whether the process with this key is the one that counts."""
        life = self._lives.get(name)
        return life is not None and life.key == key

    def _end(
        self, key: str, name: str, reason: Literal["left", "died", "expired"], cause: str
    ) -> HeartbeatEvent | None:
        if not self.speaks_for(key, name):
            return None
        return HeartbeatEvent("lost", name, json.loads(self._lives.pop(name).data), reason, cause)
