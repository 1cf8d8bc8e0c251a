"""The JSON record of a heartbeat, layout v1."""

from __future__ import annotations

from dataclasses import dataclass

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
