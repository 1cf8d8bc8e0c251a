"""How commands show reports: tables for people, JSON and YAML for programs; and their exit codes.

Names come from anybody who may write to etcd. A terminal is shown printable characters only: what could move its
cursor, set its title or turn the writing direction is shown as an escape. JSON and YAML are ASCII.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TextIO

from ftcoord.escaping import neutral
from ftcoord.operator.report import plain

HEALTHY: Final = 0
"""Exit codes; docs/cli.md has them too. This one is also that of a command that has done what it was asked to do."""
NOT_DONE: Final = 1
"""It also means that a job or an etcd is not healthy."""
WRONG_USE: Final = 2
UNREACHABLE: Final = 3
"""etcd cannot be reached, or did not answer what was written."""
INTERRUPTED: Final = 130

FORMATS: Final = ("table", "json", "yaml")
COLOURS: Final = ("auto", "always", "never")
WIDEST: Final = 60
"""Columns of a cell that a table shows; JSON has all of it."""
_LAST_TIME: Final = 1e11
"""Seconds since 1970 that a time of day is made of at most."""

_CODES: Final = {"good": "32", "bad": "31", "busy": "33", "going": "35", "bold": "1"}
_BUSY: Final = "forming seating seated waiting asking called_back spare idle hint"
_BAD: Final = "failed degraded unreadable away refused problem unclear missing died lost expired"
_WORDS: Final = {"good": "running training finished ok", "busy": _BUSY, "bad": _BAD, "going": "draining"}
_MOODS: Final = {word.replace("_", " "): mood for mood, words in _WORDS.items() for word in words.split()}
"""Words that tables show in colours."""

Columns = Mapping[str, "str | Callable[[Any], object]"]
"""What a table shows of each value, by the head of its column: a field, or what is made of the value."""


def columns(spec: str) -> Columns:
    """The columns of fields, as `RANK=rank HOST=host`."""
    return dict(one.split("=") for one in spec.split())


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

    @classmethod
    def of(cls, options: argparse.Namespace) -> Terminal:
        """Where the flags say that a command prints."""
        return cls(options.output, options.color)

    def show(self, report: Any, lines: Iterable[str]) -> None:
        """Show a report: as the user asked, or as these lines."""
        if self.format == "table":
            self.write("".join(f"{line}\n" for line in lines))
        else:
            self.write(to_json(report) if self.format == "json" else to_yaml(report))

    def write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def colour(self, text: str, mood: str) -> str:
        """A text in the colour for `mood`, which must be neutral already."""
        return f"\x1b[{_CODES[mood]}m{text}\x1b[0m" if self.has_colours else text

    def word(self, word: str) -> str:
        """A word of ours, in the colour that it has in all tables."""
        mood = _MOODS.get(word.strip())
        return self.colour(word, mood) if mood else word

    def table(self, what: str | Columns, values: Sequence[Any], widest: int | None = WIDEST) -> Iterator[str]:
        """The lines of a table with a row for each value, with cells cut to the `widest`. None is shown as a dash;
        whole numbers stand at the right."""
        heads = columns(what) if isinstance(what, str) else what
        padded = [_column(head, of, values, widest) for head, of in heads.items()]
        yield self.colour("  ".join(column[0] for column in padded).rstrip(), "bold")
        for row in zip(*(column[1:] for column in padded), strict=True):
            yield "  ".join(map(self.word, row)).rstrip()


def _column(head: str, of: str | Callable[[Any], object], values: Sequence[Any], widest: int | None) -> list[str]:
    """The head of a column and its cells, all of one width."""
    found = [getattr(value, of) if isinstance(of, str) else of(value) for value in values]
    texts = [head, *(_cell(value, widest) for value in found)]
    width = max(map(_width, texts))
    is_right = bool(found) and all(value is None or type(value) is int for value in found)
    spaces = [" " * (width - _width(text)) for text in texts]
    return [f"{space}{text}" if is_right else f"{text}{space}" for space, text in zip(spaces, texts, strict=True)]


def _cell(value: object, widest: int | None) -> str:
    text = "-" if value is None or value == "" else neutral(str(value))
    return text if widest is None or len(text) <= widest else f"{text[: widest - 3]}..."


def _width(text: str) -> int:
    """Columns of a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(one) else 1 + (unicodedata.east_asian_width(one) in "WF") for one in text)


def clock(at: float, form: str = "%H:%M:%S") -> str:
    """A time, in seconds since 1970, on this host's clock; empty for what no clock of a host shows: it may be
    anybody's."""
    return datetime.fromtimestamp(at).strftime(form) if 0 < at < _LAST_TIME else ""


def to_json(report: Any) -> str:
    """One document, with a line end."""
    return json.dumps(report, default=plain, indent=2) + "\n"


def to_line(report: Any, format: str) -> str:
    """One of several documents: JSON on a line of its own, or YAML with a mark before it."""
    if format == "json":
        return json.dumps(report, default=plain, separators=(",", ":")) + "\n"
    return f"---\n{to_yaml(report)}"


def to_yaml(report: Any) -> str:
    """One document of YAML 1.2 in block style. Its scalars are JSON's, so nothing in it is taken for something else."""
    return "\n".join(_yaml(json.loads(json.dumps(report, default=plain)))) + "\n"


def _yaml(value: Any) -> list[str]:
    """The lines of a JSON value, from the first column on."""
    if isinstance(value, list) and value:
        marks = (("- ", one) if not at else ("  ", one) for item in value for at, one in enumerate(_yaml(item)))
        return [f"{mark}{line}" for mark, line in marks]
    if not isinstance(value, dict) or not value:
        return [json.dumps(value)]
    lines = []
    for name, inner in value.items():
        below = _yaml(inner)
        nested = isinstance(inner, (dict, list)) and inner
        lines += [f"{name}:", *(f"  {line}" for line in below)] if nested else [f"{name}: {below[0]}"]
    return lines
