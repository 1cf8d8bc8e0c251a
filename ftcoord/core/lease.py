"""When to renew a lease, and how long to trust it. Pure arithmetic; times are monotonic seconds.

An acknowledged renewal was granted after it was sent, so etcd cannot expire the lease before `sent_at + ttl`. All
deadlines count from there, never from the answer: a late answer must not extend them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

RENEW_AFTER: Final = 1 / 3
"""The part of the TTL after which a lease is renewed."""
TRUST_FOR: Final = 2 / 3
"""The part of the TTL for which an acknowledged renewal is trusted; the rest is margin for slow clocks."""
FRESH_FOR: Final = 1 / 10
"""The part of the TTL for which a renewed lease counts as new."""
RETRY_BETWEEN: Final = (0.1, 1.0)
"""The fewest and the most seconds between two attempts when a renewal failed."""


class SessionState(enum.Enum):
    """What a session knows of its lease, as in ZooKeeper clients such as kazoo."""

    CONNECTED = "connected"
    """The lease is alive."""
    SUSPENDED = "suspended"
    """It was not renewed in time, so it may be gone. Do not rely on it until the next state."""
    LOST = "lost"
    """The lease is gone, and its keys with it. Final: make a new session."""


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """The last acknowledged renewal of a lease: when it was sent, and the TTL granted, in seconds."""

    sent_at: float
    ttl: float

    @property
    def trusted_until(self) -> float:
        return self.sent_at + self.ttl * TRUST_FOR

    def state(self, now: float) -> SessionState:
        """CONNECTED or SUSPENDED. Only etcd can tell LOST."""
        return SessionState.CONNECTED if now < self.trusted_until else SessionState.SUSPENDED

    def renew_at(self, tried_at: float | None = None) -> float:
        """When to send the next renewal: after a success, or after an attempt that failed at `tried_at`.

        After a failure, half of the remaining trust passes, within RETRY_BETWEEN. etcd does not expire leases during an
        outage, so it is worth trying for as long as the session is wanted.
        """
        if tried_at is None:
            return self.sent_at + self.ttl * RENEW_AFTER
        shortest, longest = RETRY_BETWEEN
        return tried_at + min(max((self.trusted_until - tried_at) / 2, shortest), longest)

    def resume_at(self, now: float) -> float:
        """When to send the next renewal of a lease that is wanted again: at once, unless it is fresh."""
        return self.renew_at() if now - self.sent_at < self.ttl * FRESH_FOR else now

    def renewal_timeout(self, now: float) -> float:
        """Seconds that a renewal sent now may take: until the trust ends, if there is any left."""
        left = self.trusted_until - now
        return left if left > RETRY_BETWEEN[0] else self.ttl * RENEW_AFTER
