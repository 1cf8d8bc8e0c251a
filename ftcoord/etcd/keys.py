"""What the keys of a run start with, and what may be a name in them. Loads no gRPC."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import quote

from ftcoord.config import redacted
from ftcoord.errors import ConfigError

KEY_PREFIX: Final = "/ftcoord/v1"


def run_prefix(key_prefix: str, run_id: str) -> str:
    """What all keys of a run start with. Its id is percent-encoded, so no run's keys lie within another's."""
    return f"{key_prefix}/{quote(run_id, safe='')}"


def key_path(key: str, value: object) -> str:
    """A parser for key prefixes, without a slash at the end. Raises ConfigError."""
    prefix = value.strip().rstrip("/") if isinstance(value, str) else ""
    if not re.fullmatch(r"(/[^/]+)+", prefix) or not prefix.isprintable():
        raise ConfigError(key, redacted(value), "give a path such as /ftcoord/v1: printable, '/' first, no empty part")
    return prefix


def full_text(key: str, value: object, allowed: str = "give a text that is not empty") -> str:
    """A parser for ids and names, which are taken as they are, also their white space. Raises ConfigError."""
    if not isinstance(value, str) or not value.strip() or not _is_utf8(value):
        raise ConfigError(key, redacted(value), allowed)
    return value


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of the command line that are no text in this locale
        return False
    return True
