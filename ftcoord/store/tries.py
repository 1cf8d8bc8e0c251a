"""The attempts of one operation that fails when others change the key first."""

from __future__ import annotations

from typing import Final

from torch.distributed import DistStoreError

from ftcoord import concurrency
from ftcoord.etcd.retry import SHORTEST_TIMEOUT, backoff

UNPAUSED_TRIES: Final = 3
"""Attempts before the first pause: most of the first ones only learn the key's value."""


class Tries:
    """Attempts with a common deadline. Not thread-safe.

    If others change the key often, what a client knows of it is out of date after a pause. So attempts after a pause
    come in pairs: the first one usually fails and learns the value, and the second one follows at once. With a pause
    before each attempt, a client would hardly ever succeed while others change the key every few milliseconds.

    Args:
        key: what the operation changes.
        deadline: monotonic; at least `SHORTEST_TIMEOUT` seconds from now.
        closed: ends a pause.
    """

    def __init__(self, key: str, deadline: float, closed: concurrency.Event) -> None:
        self.deadline = max(deadline, concurrency.now() + SHORTEST_TIMEOUT)
        self._key, self._closed, self._failed = key, closed, 0

    def again(self) -> None:
        """Note a failed attempt, and pause if a pause is due. Raises DistStoreError after the deadline."""
        self._failed += 1
        if concurrency.now() >= self.deadline:
            raise DistStoreError(
                f"wait timeout: others changed {self._key!r} before each of {self._failed} tries; let fewer change it"
                " at a time, or raise the timeout"
            )
        later = self._failed - UNPAUSED_TRIES
        if later >= 0 and later % 2 == 0:
            self._closed.wait(backoff(later // 2 + 1))
