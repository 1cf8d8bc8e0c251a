"""Which etcd versions are good enough for real runs, and how to recognize etcd servers that ftcoord started."""

from __future__ import annotations

from typing import Final

FLOORS: Final[dict[tuple[int, ...], tuple[int, ...]]] = {(3, 5): (3, 5, 28), (3, 6): (3, 6, 9)}
"""The oldest version of each minor version in which the lease, watch and stale-read bugs that matter here are fixed."""

EMBEDDED_NAMES: Final = "ftcoord-"
"""The prefix of the names of members that ftcoord started. Clients in other processes recognize them by it."""


def newer_wanted(version: str) -> str | None:
    """The version to use instead of this one in real runs; None if this one is new enough."""
    numbers = tuple(int(part) for part in version.split("-")[0].split(".") if part.isdigit())
    floor = FLOORS.get(numbers[:2], (3, 5, 28))
    return ".".join(map(str, floor)) if numbers < floor else None
