"""How commands show what they are told: tables for people, JSON and YAML for programs.

Names come from anybody who may write to etcd. A terminal is shown printable characters only: what could move its
cursor, set its title or turn the writing direction is shown as an escape. JSON and YAML are ASCII.
"""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TextIO

from ftcoord.escaping import neutral
from ftcoord.operator.told import plain

FORMATS: Final = ("table", "json", "yaml")
COLOURS: Final = ("auto", "always", "never")
WIDEST: Final = 60
"""Columns of a cell that a table shows; JSON has all of it."""
_LAST_TIME: Final = 1e11
"""Seconds since 1970 that a time of day is made of at most."""

_CODES: Final = {"good": "32", "bad": "31", "busy": "33", "going": "35", "dim": "2", "bold": "1"}
_MOODS: Final = {
    "good": {"running", "training", "finished", "ok"},
    "busy": {"forming", "seating", "seated", "waiting", "asking", "called back", "spare", "idle", "hint", "warning"},
    "bad": {
        "failed",
        "degraded",
        "unreadable",
        "away",
        "refused",
        "problem",
        "unclear",
        "missing",
        "died",
        "lost",
        "expired",
    },
    "going": {"draining"},
}
"""Words that tables show in colours."""


class Terminal:
    """Where a command prints.

    Args:
        format: one of FORMATS.
        colours: one of COLOURS; `auto` is for terminals only, and heeds NO_COLOR.
        out: where to.
    """

    def __init__(self, format: str = "table", colours: str = "auto", out: TextIO | None = None) -> None:
        self.format, self._out = format, out or sys.stdout
        wanted = self._out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self.has_colours = colours == "always" or (colours == "auto" and wanted)
        self.is_live = format == "table" and self._out.isatty()
        """Whether what was shown may be replaced."""

    def tell(self, told: Any, lines: Iterable[str]) -> None:
        """Show a value of `operator.told`: as the user asked, or as these lines."""
        if self.format == "json":
            self.write(to_json(told))
        elif self.format == "yaml":
            self.write(to_yaml(told))
        else:
            self.write("".join(f"{line}\n" for line in lines))

    def write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def colour(self, text: str, mood: str) -> str:
        """A text in the colour for `mood`, which must be neutral already."""
        return f"\x1b[{_CODES[mood]}m{text}\x1b[0m" if self.has_colours else text

    def word(self, word: str) -> str:
        """A word of ours, in the colour that it has in all tables."""
        mood = next((mood for mood, words in _MOODS.items() if word.strip() in words), None)
        return self.colour(word, mood) if mood else word

    def table(
        self, heads: Sequence[str], rows: Sequence[Sequence[object]], widest: int | None = WIDEST
    ) -> Iterable[str]:
        """The lines of a table, with cells cut to the `widest`. None is shown as a dash; whole numbers stand at the
        right."""
        texts = [[_cell(value, widest) for value in row] for row in rows]
        columns = [
            _Column(head, [text[at] for text in texts], [row[at] for row in rows]) for at, head in enumerate(heads)
        ]
        yield self.colour("  ".join(column.padded(column.head) for column in columns).rstrip(), "bold")
        for text in texts:
            cells = [self.word(column.padded(cell)) for column, cell in zip(columns, text, strict=True)]
            yield "  ".join(cells).rstrip()


class _Column:
    """How wide a column is, and at which side its cells stand."""

    def __init__(self, head: str, cells: Sequence[str], values: Sequence[object]) -> None:
        self.head = head
        self._width = max([_width(head), *map(_width, cells)])
        self._is_right = bool(values) and all(value is None or type(value) is int for value in values)

    def padded(self, text: str) -> str:
        space = " " * (self._width - _width(text))
        return f"{space}{text}" if self._is_right else f"{text}{space}"


def clock(at: float, form: str = "%H:%M:%S") -> str:
    """A time, in seconds since 1970, on this host's clock; empty for what no clock of a host says: it may be
    anybody's."""
    return datetime.fromtimestamp(at).strftime(form) if 0 < at < _LAST_TIME else ""


def to_json(told: Any) -> str:
    """One document, with a line end."""
    return json.dumps(told, default=plain, indent=2) + "\n"


def to_line(told: Any, format: str) -> str:
    """One of several documents: JSON on a line of its own, or YAML with a mark before it."""
    if format == "json":
        return json.dumps(told, default=plain, separators=(",", ":")) + "\n"
    return f"---\n{to_yaml(told)}"


def to_yaml(told: Any) -> str:
    """One document of YAML 1.2 in block style. Its scalars are JSON's, so nothing in it is taken for something else."""
    return "\n".join(_yaml(told)) + "\n"


def _yaml(value: Any) -> list[str]:
    """Its lines, from the first column on."""
    if value is None or isinstance(value, (str, int, float)):
        return [json.dumps(value)]
    if isinstance(value, Sequence):
        marks = (("- ", one) if not at else ("  ", one) for item in value for at, one in enumerate(_yaml(item)))
        return [f"{mark}{line}" for mark, line in marks] or ["[]"]
    lines = []
    for name, inner in (value if isinstance(value, Mapping) else plain(value)).items():
        below = _yaml(inner)
        if len(below) == 1 and not below[0].startswith("- ") and not hasattr(inner, "__dataclass_fields__"):
            lines.append(f"{name}: {below[0]}")
        else:
            lines += [f"{name}:", *(f"  {line}" for line in below)]
    return lines or ["{}"]


def _cell(value: object, widest: int | None) -> str:
    text = "-" if value is None or value == "" else neutral(str(value))
    return text if widest is None or len(text) <= widest else f"{text[: widest - 3]}..."


def _width(text: str) -> int:
    """Columns of a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(one) else 1 + (unicodedata.east_asian_width(one) in "WF") for one in text)
