"""Which releases of etcd are good enough for real runs, and which etcds are ftcoord's own."""

from __future__ import annotations

from typing import Final

FLOORS: Final[dict[tuple[int, ...], tuple[int, ...]]] = {(3, 5): (3, 5, 28), (3, 6): (3, 6, 9)}
"""The oldest release of each line in which the lease, watch and stale-read bugs that matter here are fixed."""

EMBEDDED_NAMES: Final = "ftcoord-"
"""What the names of members begin with that ftcoord started, so that clients in other processes know them too."""


def newer_wanted(version: str) -> str | None:
    """The release to use in place of this one in real runs; None where it is new enough."""
    numbers = tuple(int(part) for part in version.split("-")[0].split(".") if part.isdigit())
    floor = FLOORS.get(numbers[:2], (3, 5, 28))
    return ".".join(map(str, floor)) if numbers < floor else None
