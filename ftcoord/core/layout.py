"""Where the keys of the protocol lie. `docs/protocol.md` is their description."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

KEY_PREFIX: Final = "/ftcoord/v1"


def run_prefix(key_prefix: str, run_id: str) -> str:
    """What all keys of a run start with. Its id is percent-encoded, so no run's keys lie within another's."""
    return f"{key_prefix}/{quote(run_id, safe='')}"


@dataclass(frozen=True, slots=True)
class Span:
    """The keys an operation is about: one key, or all that start with a prefix."""

    start: str
    is_prefix: bool = False

    @property
    def end(self) -> bytes:
        """etcd's `range_end`: empty for one key, else the first key behind the prefix."""
        if not self.is_prefix:
            return b""
        start = encode_key(self.start).rstrip(b"\xff")
        return start[:-1] + bytes([start[-1] + 1]) if start else b"\0"

    def __contains__(self, key: str) -> bool:
        return key.startswith(self.start) if self.is_prefix else key == self.start


def encode_key(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def decode_key(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")


def decided_key(prefix: str) -> str:
    """The decided record of a group."""
    return f"{prefix}/decided"


def members_prefix(prefix: str) -> str:
    """What the keys of a group's members begin with; each goes on with its lease's id."""
    return f"{prefix}/members/"
