"""The JSON record of a death: why the process that held a lease died."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ftcoord.core.strict import build, dump, load

REMEMBERED_FOR: Final = 3600
"""Seconds for which etcd keeps the record of a death."""


@dataclass(frozen=True, slots=True)
class Death:
    """A sentinel's report about its process.

    Args:
        cause: one line, such as "host7 (pid 4711) was killed by signal 9 (SIGKILL)".
        wall_ms: when, on that host's clock, in milliseconds since 1970. For people: no decision depends on it.
    """

    cause: str
    wall_ms: int


def encode(death: Death) -> bytes:
    """The record as JSON, with the layout's version."""
    return dump(death)


def parse_death(key: str, value: bytes) -> Death:
    """Parse the record. Raises StateError."""
    return build(Death, key, load(key, value))
