"""Text of others, as logs, errors and terminals may show it."""

from __future__ import annotations

import re

HIDDEN = "***"


def neutral(text: str) -> str:
    """A text of anybody's, safe for a terminal and on one line: what moves a cursor, sets a title, turns the writing
    direction or is invisible appears as an escape, and so does a new line."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def redacted(value: object) -> object:
    """`value` as an error may show it: no user info, no URL query, no key material, no containers."""
    if not isinstance(value, str):
        return value if value is None or isinstance(value, (bool, int, float)) else f"<{type(value).__name__}>"
    if "-----BEGIN" in value:
        return HIDDEN
    _, at, rest = value.rpartition("@")
    return re.sub(r"([?#]).*", rf"\1{HIDDEN}", HIDDEN + at + rest if at else rest, flags=re.DOTALL)
