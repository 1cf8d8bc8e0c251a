"""Keeps objects of one process out of the hands of its forked children."""

from __future__ import annotations

import os

from ftcoord.errors import ForkedProcessError


class OwnerProcess:
    """The process that made an object. A child that is forked from it must neither use nor close the object.

    Args:
        problem: what the error says first, such as "this etcd client belongs to the parent process".
    """

    def __init__(self, problem: str) -> None:
        self.pid, self._problem = os.getpid(), problem

    @property
    def is_current(self) -> bool:
        """False in a forked child."""
        return os.getpid() == self.pid

    def check(self) -> None:
        """Raises ForkedProcessError in a forked child. To be called before a lock is taken: it may be held for ever
        there, by a thread that the child does not have."""
        if not self.is_current:
            raise ForkedProcessError.of(self._problem)
