"""Calls that are made until etcd answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, TypeVar

from ftcoord import concurrency
from ftcoord.errors import ClientClosed, EtcdUnavailable, OutcomeUnknown

T = TypeVar("T")
LEAST: Final = 2.0
"""Seconds that etcd may take at the least: a short time-out is about the keys, not about the network."""
ATTEMPT: Final = 2.0
"""Seconds that one attempt may take at the most; see `settle.ATTEMPT`."""
FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 1.0


def retry_unanswered(attempt: Callable[[float], T], deadline: float, closed: concurrency.Event) -> T:
    """Make `attempt(seconds it may take)` until it is answered, the monotonic `deadline` is over, or `closed` is set.

    The attempt has to be one that may be repeated after OutcomeUnknown. Raises what the last attempt raised.
    """
    deadline = max(deadline, concurrency.now() + LEAST)

    def once() -> T:
        return attempt(min(max(deadline - concurrency.now(), 0.1), ATTEMPT))

    return retry(once, (EtcdUnavailable, OutcomeUnknown), deadline, closed)


def retry(
    attempt: Callable[[], T], transient: tuple[type[Exception], ...], deadline: float, closed: concurrency.Event
) -> T:
    """Make an attempt until it raises nothing `transient`, at random intervals that grow to a second.

    Raises what the last attempt raised, after the monotonic `deadline` or when `closed` is set.
    """
    failures = 0
    while True:
        try:
            return attempt()
        except ClientClosed:
            raise
        except transient:
            left = deadline - concurrency.now()
            if left <= 0 or closed.is_set():
                raise
        failures += 1
        closed.wait(min(pause(failures), left / 2))


def pause(failures: int) -> float:
    """Seconds to wait after so many failures in a row: random, so that not all who wait come back at once."""
    return random.uniform(0, min(FIRST_PAUSE * 2.0 ** min(failures - 1, 10), LONGEST_PAUSE))
