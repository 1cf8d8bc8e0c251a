"""Prevents the publication of a decision that breaks the protocol, or that nobody could read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeVar

from ftcoord.core.invariants import InvariantBroken
from ftcoord.core.verdict import Publish, Verdict, Wait
from ftcoord.errors import StateError

log = logging.getLogger(__name__)
R = TypeVar("R")

DECIDE_AGAIN_AFTER: Final = 10.0
"""Seconds until a decider whose decision was withheld decides again, if nothing changes before."""


class InvariantGuard:
    """Withholds a decision that breaks an invariant, or that nobody could read: the members wait, until another
    decision can be made.

    Not thread-safe. One bug in ftcoord is logged once, however often it occurs.
    """

    def __init__(self) -> None:
        self._logged = ""

    def passed(self, verdict: Verdict[R], check: Callable[[Publish[R]], object], now: float) -> Verdict[R]:
        """The verdict; or a `Wait` instead, if `check` raises InvariantBroken for it, or StateError, because it cannot
        read the encoded record."""
        if isinstance(verdict, Wait):
            return verdict
        try:
            check(verdict)
        except InvariantBroken as error:
            self._log(f"{error}, in {verdict.reason!r} by {verdict.rule!r}")
            return Wait(f"a decision was withheld: it breaks {error}", now + DECIDE_AGAIN_AFTER, verdict.rule)
        except StateError as error:
            self._log(f"nobody could read it: {error}")
            return Wait(f"a decision was withheld: nobody could read it: {error}", now + DECIDE_AGAIN_AFTER)
        return verdict

    def _log(self, problem: str) -> None:
        if problem != self._logged:
            self._logged = problem
            log.error(
                "a decision was not published, since it breaks the protocol: %s. This is a bug in ftcoord: please"
                " report this line, with the log of this process at level DEBUG. The group waits until it can decide"
                " otherwise; restart this process to let another member decide.",
                problem,
            )
