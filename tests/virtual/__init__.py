"""An etcd in memory, and a scheduler with virtual time in which ftcoord's own threads run deterministically.

docs/testing.md says how to use them.
"""

from __future__ import annotations

from virtual.etcd import MemoryClient, MemoryEtcd
from virtual.fate import DELIVERED, LOST_ANSWER, LOST_REQUEST, NEVER, REFUSED, Call, Fate, flaky
from virtual.processes import Clock
from virtual.scheduler import Scheduler, Stuck

__all__ = [
    "DELIVERED",
    "LOST_ANSWER",
    "LOST_REQUEST",
    "NEVER",
    "REFUSED",
    "Call",
    "Clock",
    "Fate",
    "MemoryClient",
    "MemoryEtcd",
    "Scheduler",
    "Stuck",
    "flaky",
]
