"""Calls that are made until etcd answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

import tenacity

from ftcoord.errors import ClientClosed, EtcdUnavailable, OutcomeUnknown

T = TypeVar("T")
LEAST: Final = 2.0
"""Seconds that etcd may take at the least: a short time-out is about the keys, not about the network."""
ATTEMPT: Final = 2.0
"""Seconds that one attempt may take at the most; see `settle.ATTEMPT`."""


def persist(attempt: Callable[[float], T], deadline: float, closed: threading.Event) -> T:
    """Make `attempt(seconds it may take)` until it is answered, the monotonic `deadline` is over, or `closed` is set.

    The attempt has to be one that may be repeated after OutcomeUnknown. Raises what the last attempt raised.
    """
    deadline = max(deadline, time.monotonic() + LEAST)

    def once() -> T:
        return attempt(min(max(deadline - time.monotonic(), 0.1), ATTEMPT))

    return repeat(once, (EtcdUnavailable, OutcomeUnknown), deadline, closed)


def repeat(
    attempt: Callable[[], T], transient: tuple[type[Exception], ...], deadline: float, closed: threading.Event
) -> T:
    """Make an attempt until it raises nothing `transient`, at random intervals that grow to a second.

    Raises what the last attempt raised, after the monotonic `deadline` or when `closed` is set.
    """
    try:
        return attempt()  # nearly always all there is to do, and setting up a retry takes a tenth of a request
    except transient as error:
        failed: Exception | None = error

    def again() -> T:
        nonlocal failed
        if failed is not None:
            error, failed = failed, None
            raise error
        return attempt()

    pause = tenacity.wait_random_exponential(multiplier=0.05, max=1.0)
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(transient) & tenacity.retry_if_not_exception_type(ClientClosed),
        stop=tenacity.stop_after_delay(max(deadline - time.monotonic(), 0)) | tenacity.stop_when_event_set(closed),
        wait=lambda state: min(pause(state), max(deadline - time.monotonic(), 0) / 2),
        sleep=tenacity.sleep_using_event(closed),
        reraise=True,
    )
    return retrying(again)
