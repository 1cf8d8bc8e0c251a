"""Log lines: one per change of state, with its facts as fields; and how they are printed, as text or JSON."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Final

from ftcoord import concurrency
from ftcoord.config import choice
from ftcoord.escaping import neutral

FORMAT_VARIABLE: Final = "FTCOORD_LOG_FORMAT"
FACTS: Final = ("run", "round", "quorum", "member", "revision", "reason", "rank", "host", "replica")
"""The attributes of records about a change of state, and their fields in JSON."""
SHOWN_BY_DEFAULT: Final = ("rendezvous", "coordination", "elastic", "metrics")
"""The parts of ftcoord whose changes of state are printed if no level is set."""
_FAR: Final = 86400.0
"""Seconds from which on a time of day is not enough."""
_TEXT: Final = "%(levelname).1s%(asctime)s %(process)d %(name)s] %(message)s"
_TIME: Final = "%m%d %H:%M:%S"
_parse_format = choice("text", "json")


def log_change(log: logging.Logger, text: str, level: int = logging.INFO, /, **facts: object) -> None:
    """Log one change of state.

    Args:
        text: what has happened, for people; it names the run, and why.
        level: INFO, unless it needs attention.
        facts: by the names in `FACTS`, for programs. None and empty values are left out. Member and revision are also
            printed after the text.
    """
    known = {name: value for name, value in facts.items() if value not in (None, "")}
    shown = ", ".join(f"{name} {known[name]}" for name in ("member", "revision") if name in known)
    log.log(level, "%s", neutral(f"{text} [{shown}]" if shown else text), extra=known, stacklevel=2)


def ending(deadline: float) -> str:
    """When a call with this monotonic deadline ends, on this host's clock."""
    left = deadline - concurrency.now()
    if left > _FAR:
        return "the call has no time limit" if math.isinf(left) else f"the call ends in {left / 86400:.0f} days"
    return f"the call ends at {datetime.fromtimestamp(concurrency.wall() + left).strftime('%H:%M:%S')}"


class TextFormatter(logging.Formatter):
    """One line for each record, with the text of others as escapes. Further lines, of tracebacks, begin with a space,
    so that none of them passes for a record."""

    def __init__(self) -> None:
        super().__init__(_TEXT, _TIME)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return neutral(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return "\n ".join(map(neutral, super().format(record).split("\n")))


class JsonFormatter(logging.Formatter):
    """One JSON object per line for each record. docs/running.md describes its fields."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc)
        fields: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        fields |= {name: vars(record)[name] for name in FACTS if name in vars(record)}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def show_if_asked(env: Mapping[str, str] | None = None) -> None:
    """As `show_log_lines`, but only if FTCOORD_LOG_FORMAT is set: for a user's own program, which may not want the
    lines."""
    if (os.environ if env is None else env).get(FORMAT_VARIABLE, "").strip():
        show_log_lines(env)


def show_log_lines(env: Mapping[str, str] | None = None) -> None:
    """Print ftcoord's log lines on stderr, if the process has not configured logging. Idempotent.

    LOGLEVEL, torch's variable (https://docs.pytorch.org/docs/stable/elastic/run.html), sets the lowest level. Without
    it, warnings are printed, and changes of state of the parts in `SHOWN_BY_DEFAULT`. FTCOORD_LOG_FORMAT is ``text`` or
    ``json``.

    Raises ConfigError for another format.
    """
    variables = os.environ if env is None else env
    form = variables.get(FORMAT_VARIABLE, "").strip()
    is_json = bool(form) and _parse_format(FORMAT_VARIABLE, form) == "json"
    package = logging.getLogger("ftcoord")
    if package.hasHandlers():
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if is_json else TextFormatter())
    package.addHandler(handler)
    level = variables.get("LOGLEVEL", "").strip().upper()
    if isinstance(logging.getLevelName(level), int):
        package.setLevel(level)
        return
    package.setLevel(logging.WARNING)
    for name in SHOWN_BY_DEFAULT:
        logging.getLogger(f"ftcoord.{name}").setLevel(logging.INFO)
