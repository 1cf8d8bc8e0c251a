"""etcd's leases in memory: who has which, and when they expire. No lock, no clock and no thread."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Final

from ftcoord.errors import LeaseLost, RequestRefused
from ftcoord.etcd.api import Lease

SCAN: Final = 0.5
"""Seconds between two looks at which leases have expired, as in etcd: a lease lives up to that much longer."""
MAX_TTL: Final = 9_000_000_000
"""Seconds; etcd grants no longer lease."""
_FIRST_ID: Final = 0x694D_7A11_0000_0001


@dataclass(slots=True)
class _Granted:
    ttl: int
    expires_at: float


class Leases:
    """The leases of one etcd.

    Args:
        min_ttl: seconds of the shortest lease that it grants.
        now: when it starts to scan for expired ones.
    """

    def __init__(self, min_ttl: int, now: float) -> None:
        self._min_ttl = min_ttl
        self._started = now
        self._granted: dict[int, _Granted] = {}
        self._ids = itertools.count(_FIRST_ID)

    def __contains__(self, lease_id: int) -> bool:
        return lease_id in self._granted

    @property
    def ttls(self) -> dict[int, int]:
        """The TTL of each, in seconds."""
        return {lease_id: lease.ttl for lease_id, lease in self._granted.items()}

    def grant(self, ttl: int, now: float) -> Lease:
        """A new lease. Raises RequestRefused for one that is too long."""
        if ttl > MAX_TTL:
            raise RequestRefused(f"etcdserver: too large lease TTL; it may be {MAX_TTL} s at the most")
        granted = max(ttl, self._min_ttl)
        lease_id = next(self._ids)
        self._granted[lease_id] = _Granted(granted, now + granted)
        return Lease(lease_id, granted)

    def renew(self, lease_id: int, now: float) -> int:
        """Its TTL, which begins again. Raises LeaseLost, also for one that has expired and was not revoked yet."""
        lease = self._granted.get(lease_id)
        if lease is None or lease.expires_at <= now:
            raise LeaseLost(f"lease {lease_id:x} has expired or was revoked; take a new one")
        lease.expires_at = now + lease.ttl
        return lease.ttl

    def drop(self, lease_id: int) -> None:
        """Forget a lease; one that is gone already is no error."""
        self._granted.pop(lease_id, None)

    def refresh(self, now: float) -> None:
        """Begin every TTL again, as a new leader of etcd does."""
        for lease in self._granted.values():
            lease.expires_at = now + lease.ttl

    def expired(self, now: float) -> list[int]:
        """Those whose time is over."""
        return [lease_id for lease_id, lease in self._granted.items() if lease.expires_at <= now]

    def next_scan(self) -> float | None:
        """When to look for expired ones again; None where there are none to expire."""
        if not self._granted:
            return None
        first = min(lease.expires_at for lease in self._granted.values())
        # Rounding must not put the scan before the end of the lease, or it would find nothing and come at once again.
        return max(first, self._started + math.ceil((first - self._started) / SCAN) * SCAN)

    def copy(self) -> Leases:
        """A copy to go back to; ids that were given out since are not given out again."""
        twin = Leases(self._min_ttl, self._started)
        twin._granted = {key: _Granted(lease.ttl, lease.expires_at) for key, lease in self._granted.items()}
        twin._ids = self._ids
        return twin
