"""How long taking the seats of a round may last, and how often a member says again that it takes its own.

The rule is R2 in `core.rendezvous`.
"""

from __future__ import annotations

from typing import Final

SEATING: Final = 10.0
"""Seconds within which seats are to be taken, where the last call is not longer. A healthy node takes milliseconds."""
TAKEN_PER_SECOND: Final = 50
"""Seats that are surely taken in a second, also where etcd and all nodes share two busy cores. A round that is too
large for the time above, and for the last call, has as much longer."""
FRESH: Final = 3.0
"""Seconds for which a seat counts as taken after its member said so: nobody must wait for a member that died since."""
SAY_AGAIN: Final = 1.0
"""Seconds until a member that waits for others says again that it takes its seat."""
AT_ONCE: Final = 125
"""Seats of a round up to which these two hold. In larger rounds both are longer, so that no more than so many members
repeat it in a second: that must not keep the others from saying it for the first time, also where they all share two
cores with etcd."""


def seating_time(size: int, last_call: float, least: float = SEATING) -> float:
    """Seconds within which all seats of a round are to be taken (R2), from when the round is heard of.

    Args:
        size: the round's.
        last_call: how long the last call lasts, in seconds.
        least: how long it lasts in any case.
    """
    return max(last_call, least, size / TAKEN_PER_SECOND)


def unhurried(size: int, elapsed: float) -> float:
    """How many times longer it counts that a seat was taken, and how many times less often that is said again.

    Taking seats lasts longer in a large round, and where etcd or the hosts are slow. There to say it as often as ever
    would make them slower still, and the round would never be ready.

    Args:
        size: the round's.
        elapsed: seconds for which seats are being taken, as far as is known.
    """
    return max(1.0, size / AT_ONCE, elapsed / (2 * FRESH))
