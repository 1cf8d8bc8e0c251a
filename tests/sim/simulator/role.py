"""What one process of a history does."""

from __future__ import annotations

import abc
import random
from typing import TYPE_CHECKING, Any, Final

from virtual import MemoryClient

if TYPE_CHECKING:
    from simulator.world import Process, World

RESTART_PAUSE: Final = 0.5
"""Seconds after which a process that was refused begins again."""


class Role(abc.ABC):
    """What one process does, until it is told to leave.

    Args:
        draw: what it decides by.
    """

    shares_host = False
    """Whether all processes of such roles run on one host, and so by one clock."""

    def __init__(self, world: World, draw: random.Random) -> None:
        self.world, self.draw = world, draw

    @abc.abstractmethod
    def live(self, process: Process) -> None:
        """All of its life. Gives up all that it has before it returns."""

    def interrupt(self) -> None:  # noqa: B027  (most roles never wait without a limit)
        """End a wait without limit: the process is told to leave."""

    @classmethod
    @abc.abstractmethod
    def missing(cls, world: World, since: float) -> str:
        """What is still to come of all processes of this role, after faults have stopped; empty if nothing is."""

    @classmethod
    def held_up(cls, world: World) -> float:
        """The virtual seconds so far in which what this role waits for was not due, by the rules of what it uses."""
        return 0.0


class Hold:
    """A hold on the client of a process, as `SharedClient` is one: it may be closed before the client is."""

    def __init__(self, client: MemoryClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def close(self) -> None:
        pass
