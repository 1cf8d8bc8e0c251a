"""For tests: an etcd in memory, and a scheduler with virtual time in which ftcoord's own threads run deterministically.

docs/testing.md says how to use them, and which pytest fixtures come with ftcoord.
"""

from __future__ import annotations

from ftcoord.testing.etcd import MemoryClient, MemoryEtcd
from ftcoord.testing.fate import DELIVERED, LOST_ANSWER, LOST_REQUEST, NEVER, REFUSED, Call, Fate, flaky

__all__ = [
    "DELIVERED",
    "LOST_ANSWER",
    "LOST_REQUEST",
    "NEVER",
    "REFUSED",
    "Call",
    "Fate",
    "MemoryClient",
    "MemoryEtcd",
    "flaky",
]
