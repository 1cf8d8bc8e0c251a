"""Asks etcd whether a watch has missed a change that no later one reveals."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Final

from ftcoord import concurrency
from ftcoord.primitives.mirror import Mirror
from ftcoord.primitives.session import Session

CHECK_AFTER: Final = 3.0, 4.5
"""Multiples of its lease TTL, lowest and highest, after which a member that sees no decision asks etcd whether it
missed one (a decider: or a change of a member). So it costs a tenth of renewing the lease, and not all members ask at
once."""


class Checkup:
    """When a member compares its copies with etcd. Guarded by the group's turn.

    A watch may miss a change (in a process that forks with gRPC's own handlers), and the next change reveals that. But
    the missed one may be the last: a recall of this member, or the request of the member that a decider waits for.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.due = math.inf
        """When to check next, unless a decision comes before; never before this member has joined."""

    def put_off(self) -> None:
        """The record's watch works: it has just delivered something."""
        self.due = concurrency.now() + self._session.ttl * random.uniform(*CHECK_AFTER)

    def forget_outdated(self, copies: Sequence[Mirror]) -> None:
        """Compare the copies with etcd now, and forget those that have missed a change: they must be read again. Reads
        no values.

        Raises EtcdError, and is then still due.
        """
        for copy in copies:
            if copy.synced and not self._session.rests:  # who rests waits for nothing
                copy.compare()
        self.put_off()
