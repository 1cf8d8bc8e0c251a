"""A call at a gateway that waits for a quorum."""

from __future__ import annotations

from ftcoord import concurrency
from ftcoord.coordination.replica import Replica


class PendingCall:
    """A caller that waits for a quorum, and may go away."""

    def __init__(self) -> None:
        self.gone = concurrency.event()
        self._replica: Replica | None = None  # set by the thread that asks, read by that of `leave`

    def waits_for(self, replica: Replica) -> None:
        """Note the replica before it asks. `ask` checks `gone` after this, so one of the two notices a caller that
        leaves now."""
        self._replica = replica

    def leave(self) -> None:
        """The caller no longer waits. Does not block."""
        self.gone.set()
        if self._replica is not None:
            self._replica.nudge()
