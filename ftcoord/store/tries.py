"""The attempts of one operation that fails when others change the key first."""

from __future__ import annotations

from typing import Final

from torch.distributed import DistStoreError

from ftcoord import concurrency
from ftcoord.etcd.retry import SHORTEST_TIMEOUT, backoff

UNPAUSED_TRIES: Final = 2
"""Failed attempts after which there is no pause yet: most of the first ones only learn the key's value."""


class Tries:
    """Attempts with a common deadline. Not thread-safe.

    What was learned before a pause is out of date after it where the key changes often: the attempt after a pause is
    made only to learn the value again, and the next one follows at once. With a pause before each attempt, one of
    several clients that all change a key would never succeed.

    Args:
        key: what the operation changes.
        deadline: monotonic; at least `SHORTEST_TIMEOUT` seconds from now.
        closed: ends a pause.
    """

    def __init__(self, key: str, deadline: float, closed: concurrency.Event) -> None:
        self.deadline = max(deadline, concurrency.now() + SHORTEST_TIMEOUT)
        self._key, self._closed, self._failed = key, closed, 0

    def again(self) -> None:
        """Pause after a failed attempt. Raises DistStoreError after the deadline."""
        self._failed += 1
        if concurrency.now() >= self.deadline:
            raise DistStoreError(
                f"wait timeout: others changed {self._key!r} before each of {self._failed} tries; let fewer change it"
                " at a time, or raise the timeout"
            )
        pairs, is_second = divmod(self._failed - UNPAUSED_TRIES, 2)
        if pairs >= 0 and is_second:
            self._closed.wait(backoff(pairs + 1))
