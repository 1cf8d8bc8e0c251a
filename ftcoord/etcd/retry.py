"""Repeats calls until etcd answers. Only this module says how often, and how long to wait in between.

tenacity drives the attempts, on ftcoord's own clock. The table "Retries" in docs/architecture.md says which layer
repeats what, for how long.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar, cast

import tenacity

from ftcoord import concurrency
from ftcoord.errors import EtcdUnavailable, OutcomeUnknown

T = TypeVar("T")

UNANSWERED: Final = (EtcdUnavailable, OutcomeUnknown)
"""The errors after which to repeat an attempt that may take effect twice. ClientClosed is not one: it never answers
again."""
ATTEMPT_TIMEOUT: Final = 2.0
"""Seconds after which an attempt counts as unanswered; see `write_once.WRITE_ATTEMPT_TIMEOUT` for why so few."""
SHORTEST_ATTEMPT: Final = 0.1
"""The fewest seconds for an attempt, even if less is left: with none, it could not be answered at all."""
SHORTEST_TIMEOUT: Final = 2.0
"""The fewest seconds for etcd, even if the caller's timeout is shorter: that is about the keys, not the network."""
FIRST_BACKOFF: Final = 0.05
LONGEST_BACKOFF: Final = 1.0


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """How long the requests of one call may take, however many there are.

    Every layer below the call asks it before each request, so a hanging etcd costs the caller no more than it allows.

    Args:
        each: seconds that one request may take.
        deadline: the monotonic time at which the call ends.
    """

    each: float
    deadline: float = math.inf

    @classmethod
    def of(cls, seconds: float) -> TimeLimit:
        """So many seconds from now on, for all requests together."""
        return cls(seconds, concurrency.now() + seconds)

    def left(self, at_most: float = math.inf) -> float:
        """Seconds that the next request may take: at most `each` and `at_most`, and `SHORTEST_ATTEMPT` after the
        deadline."""
        return min(self.each, at_most, max(self.deadline - concurrency.now(), SHORTEST_ATTEMPT))


def retry_until_answered(attempt: Callable[[float], T], deadline: float, cancelled: concurrency.Event) -> T:
    """Call `attempt(seconds it may take)` until etcd answers, the monotonic `deadline` is over or `cancelled` is set.

    The attempt must be safe to repeat after OutcomeUnknown. Raises the last attempt's error.
    """
    within = TimeLimit(ATTEMPT_TIMEOUT, max(deadline, concurrency.now() + SHORTEST_TIMEOUT))
    return retry(lambda: attempt(within.left()), UNANSWERED, within.deadline, cancelled)


def retry(
    attempt: Callable[[], T], transient: tuple[type[Exception], ...], deadline: float, cancelled: concurrency.Event
) -> T:
    """Call `attempt` until it raises nothing `transient`, with a pause of `backoff()` in between.

    After the monotonic `deadline`, or when `cancelled` is set, raises the last attempt's error. `cancelled` ends a
    pause, but not an attempt.
    """

    # Errors travel as values: tenacity would keep one that it raises in a cycle with the attempt, and so would keep
    # alive, until the garbage collector comes by, a store that its user has dropped.
    def tried() -> tuple[T | None, Exception | None]:
        try:
            return attempt(), None
        except transient as error:
            return None, error

    def pause(failures: int) -> float:
        left = max(deadline - concurrency.now(), 0)
        return min(backoff(failures), left / 2)  # leaves time for one more attempt

    def is_over() -> bool:
        return cancelled.is_set() or concurrency.now() >= deadline

    def wait(seconds: float) -> None:
        cancelled.wait(seconds)

    value, error = tried()
    if error is not None and not is_over():  # tenacity costs as much as all else that asks for a quorum does
        wait(pause(1))
        value, error = tenacity.Retrying(
            retry=tenacity.retry_if_result(lambda outcome: outcome[1] is not None),
            stop=lambda _: is_over(),
            wait=lambda state: pause(state.attempt_number + 1),
            sleep=wait,
            retry_error_callback=lambda state: state.outcome and state.outcome.result(),
        )(tried)
    if error is not None:
        try:
            raise error
        finally:
            del error  # else its traceback and this frame would hold each other
    return cast(T, value)


def backoff(failures: int) -> float:
    """Seconds to wait after so many failures in a row: random, so that clients do not all retry at once."""
    return random.uniform(0, min(FIRST_BACKOFF * 2.0 ** min(failures - 1, 10), LONGEST_BACKOFF))
