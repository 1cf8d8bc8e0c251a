"""Log lines of loops that retry: each problem is logged when it appears, not at each attempt."""

from __future__ import annotations

import logging

from ftcoord.escaping import neutral


class LogOnce:
    """Logs a text, unless it is the same as the last one. Not thread-safe.

    Args:
        log: the logger.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log, self._last = log, ""

    def say(self, text: str, level: int = logging.WARNING) -> None:
        """Log a text; at DEBUG if it equals the last one."""
        self._log.log(logging.DEBUG if text == self._last else level, "%s", neutral(text))
        self._last = text

    def forget(self) -> None:
        """The problem is over: log it again if it comes back."""
        self._last = ""
