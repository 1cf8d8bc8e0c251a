"""Calls that are made until etcd answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

import tenacity

from ftcoord.errors import EtcdUnavailable, OutcomeUnknown

T = TypeVar("T")
LEAST: Final = 2.0
"""Seconds that etcd may take at the least: a short time-out is about the keys, not about the network."""
ATTEMPT: Final = 5.0
"""Seconds that one attempt may take at the most."""


def persist(attempt: Callable[[float], T], deadline: float, closed: threading.Event) -> T:
    """Make `attempt(seconds it may take)` until it is answered, the monotonic `deadline` is over, or `closed` is set.

    The attempt has to be one that may be repeated after OutcomeUnknown. Raises what the last attempt raised.
    """
    deadline = max(deadline, time.monotonic() + LEAST)
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type((EtcdUnavailable, OutcomeUnknown)),
        stop=tenacity.stop_after_delay(deadline - time.monotonic()) | tenacity.stop_when_event_set(closed),
        wait=tenacity.wait_random_exponential(multiplier=0.05, max=1.0),
        sleep=tenacity.sleep_using_event(closed),
        reraise=True,
    )
    return retrying(lambda: attempt(min(max(deadline - time.monotonic(), 0.1), ATTEMPT)))
