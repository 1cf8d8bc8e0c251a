"""Where the keys of the protocol lie. `docs/protocol.md` is their description."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

KEY_PREFIX: Final = "/ftcoord/v1"


def run_prefix(key_prefix: str, run_id: str) -> str:
    """What all keys of a run start with. Its id is percent-encoded, so no run's keys lie within another's."""
    return f"{key_prefix}/{quote(run_id, safe='')}"
