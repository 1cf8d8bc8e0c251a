"""Text of others, as logs, errors and terminals may show it."""

from __future__ import annotations


def neutral(text: str) -> str:
    """A text of anybody's, safe for a terminal and on one line: what moves a cursor, sets a title, turns the writing
    direction or is invisible appears as an escape, and so does a new line."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
