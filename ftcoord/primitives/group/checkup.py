"""Asking etcd whether a watch has missed a change that no later one shows."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Final

from ftcoord import concurrency
from ftcoord.primitives.mirror import Mirror
from ftcoord.primitives.session import Session

CHECK_AFTER: Final = 3.0, 4.5
"""Times of its lease after which a member that hears of no decision asks etcd whether it has missed one (a decider: or
a change of a member), the least and the most: so it costs a tenth of what renewing the lease does, and not all ask at
once."""


class Checkup:
    """When a member compares its copies with etcd. The group's turn guards it.

    A watch may miss a change (a process that forks with gRPC's own handlers does), and the next one shows that. But the
    one that was missed may be the last: one that calls this member back, or the request of the member that a decider
    waits for, and nothing follows until it has come.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.due = math.inf
        """The next time, unless a decision is heard before; never before this member has joined."""

    def put_off(self) -> None:
        """The record's watch works: it has just told something."""
        self.due = concurrency.now() + self._session.ttl * random.uniform(*CHECK_AFTER)

    def finds_missed(self, copies: Sequence[Mirror]) -> bool:
        """Compare them with etcd now; whether one has missed a change, and must be read again. Costs no value.

        Raises EtcdError, and is then still due.
        """
        synced = [copy for copy in copies if copy.synced and not self._session.rests]  # who rests waits for nothing
        for copy in synced:
            copy.compare()
        self.put_off()
        return not all(copy.synced for copy in synced)
