"""Text for people: that of others, as logs, errors and terminals may show it, and counts and names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

HIDDEN = "***"
SHOWN: Final = 8
"""The most hosts or replicas that a line names; it counts the others."""


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


def named(names: Iterable[str], count: int | None = None) -> str:
    """The first names, and how many more there are."""
    known = [neutral(name) for name in names]
    more = max(len(known) if count is None else count, len(known)) - SHOWN
    shown = ", ".join(known[:SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


def counted(number: int, what: str) -> str:
    """A count with its noun: "1 node", "2 nodes"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def spanned(limits: tuple[int, int], what: str) -> str:
    """Limits with their noun: "2 to 3 nodes", or "1 node" where both are the same."""
    fewest, most = limits
    return counted(most, what) if fewest == most else f"{fewest} to {counted(most, what)}"
