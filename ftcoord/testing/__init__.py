"""For tests: an etcd in memory, and a scheduler with virtual time in which ftcoord's own threads run deterministically.

docs/testing.md says how to use them, and which pytest fixtures come with ftcoord.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftcoord.testing.etcd import MemoryClient, MemoryEtcd
    from ftcoord.testing.expiry import expire_lease
    from ftcoord.testing.fate import DELIVERED, LOST_ANSWER, LOST_REQUEST, NEVER, REFUSED, Call, Fate, flaky
    from ftcoord.testing.processes import Clock
    from ftcoord.testing.scheduler import Scheduler, Stuck

_HOMES = {
    **dict.fromkeys(("MemoryClient", "MemoryEtcd"), "ftcoord.testing.etcd"),
    **dict.fromkeys(
        ("DELIVERED", "LOST_ANSWER", "LOST_REQUEST", "NEVER", "REFUSED", "Call", "Fate", "flaky"),
        "ftcoord.testing.fate",
    ),
    "expire_lease": "ftcoord.testing.expiry",
    "Clock": "ftcoord.testing.processes",
    **dict.fromkeys(("Scheduler", "Stuck"), "ftcoord.testing.scheduler"),
}

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
    "expire_lease",
    "flaky",
]


def __getattr__(name: str) -> Any:
    """Load what is asked for: pytest loads the plugin of this package for everybody who has ftcoord."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ftcoord.testing' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "greenlet":
            raise
        raise ImportError(f"ftcoord.testing.{name} needs greenlet: pip install greenlet") from error
