"""Timers kill only what was late: what workers hold, as they say it themselves, beside what is killed."""

from __future__ import annotations

import math
from typing import Final

LATE_RELEASE: Final = 30.0
"""Seconds: who released a timer when its time was over may still be killed for it. The server may have looked before,
and been stopped, or not been answered, since."""
ROUNDING: Final = 0.002
"""Seconds: records tell of milliseconds."""


class TimersHeld:
    """The timers of each process, on the clock of its host: none but the worker's own calls say so."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, float]] = {}
        """When the time of each scope is over, of each process."""
        self._was_late: dict[str, float] = {}
        """When each process last released a timer whose time was over."""

    def acquires(self, process: str, scope: str, after: float, now: float) -> None:
        """It is about to acquire a timer, which takes the place of one that it has for that scope."""
        self.releases(process, scope, now)
        self._held.setdefault(process, {})[scope] = now + after

    def releases(self, process: str, scope: str, now: float) -> None:
        """It is about to release a timer, if it has that."""
        over = self._held.get(process, {}).pop(scope, math.inf)
        if now >= over:
            self._was_late[process] = now

    def late_since(self, process: str) -> float:
        """When the time of the first timer is over that it holds; infinity if it holds none."""
        return min(self._held.get(process, {}).values(), default=math.inf)

    def may_be_killed(self, process: str, now: float) -> bool:
        """Whether it is late in some scope, or was."""
        is_late = self.late_since(process) <= now + ROUNDING
        return is_late or now - self._was_late.get(process, -math.inf) <= LATE_RELEASE

    def __str__(self) -> str:
        return f"held until {self._held}, late releases at {self._was_late}"
