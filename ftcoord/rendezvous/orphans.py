"""Tells an agent's workers from all other processes, and has the sentinel end them when the agent dies: torchrun starts
them in sessions of their own."""

from __future__ import annotations

import os
import uuid

from ftcoord.primitives.orphans import MARK
from ftcoord.primitives.sentinel import Sentinel


class MarkedChildren:
    """All that this process starts while this is open bears a mark, in a variable of the environment that it inherits.

    So nothing else is ever touched: neither a worker of another run, nor what a user starts by hand.
    """

    def __init__(self) -> None:
        self.mark, self._pid = f"{os.getpid()}-{uuid.uuid4().hex}", os.getpid()
        os.environ[MARK] = self.mark

    def end_with_this_process(self) -> None:
        """Have the sentinel end them if this process dies."""
        sentinel = Sentinel.of_process()
        if sentinel is not None:
            sentinel.end_orphans(self.mark)

    def close(self) -> None:
        """What is started from now on bears no mark. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._pid or os.environ.get(MARK) != self.mark:  # another handler may have its own
            return
        del os.environ[MARK]
        sentinel = Sentinel.of_process()
        if sentinel is not None:
            sentinel.end_orphans("")
