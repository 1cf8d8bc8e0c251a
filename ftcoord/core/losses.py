"""Which members of a quorum count as lost. No clock, no I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Loss:
    """A lost member.

    Args:
        member: its id.
        replica_id: its name.
        cause: one line such as "host7 (pid 4711) was killed by signal 9 (SIGKILL)"; empty if no cause is known.
    """

    member: str
    replica_id: str
    cause: str


class Losses:
    """What happened to the members of one quorum.

    A member with a known cause of death is lost. A member that is gone without a cause may have left after its part, or
    may only have lost its lease: it is lost if no replica of its name is back after `timeout` seconds.

    Args:
        seats: the replica ids of the quorum's members, by member id.
        timeout: in seconds.
    """

    def __init__(self, seats: Mapping[str, str], timeout: float) -> None:
        self._timeout = timeout  # never changes
        self._there = dict(seats)
        self._waited_for: dict[str, tuple[str, float]] = {}  # by member id: the replica id, and until when

    @property
    def due(self) -> float:
        """When `judge` has a member to judge; infinite for never."""
        return min((until for _, until in self._waited_for.values()), default=inf)

    def gone(self, present: Collection[str]) -> list[str]:
        """The members that are not present, and that were not passed to `note` yet."""
        return [member for member in self._there if member not in present]

    def note(self, member: str, cause: str, now: float) -> Loss | None:
        """Note that a member is gone; returns the loss, if it is already certain."""
        replica_id = self._there.pop(member)
        if cause:
            return Loss(member, replica_id, cause)
        self._waited_for[member] = (replica_id, now + self._timeout)
        return None

    def over(self, now: float) -> list[str]:
        """The members whose time is over, for `judge`."""
        return [member for member, (_, until) in self._waited_for.items() if until <= now]

    def judge(self, names: Collection[str], causes: Mapping[str, str], now: float) -> tuple[list[Loss], list[str]]:
        """Of the members whose time is over: which are lost, and which are back, because a live member has their name.

        Args:
            names: the replica ids of the live members.
            causes: why members died after they had come back under another lease, by member id.
            now: monotonic seconds.
        """
        replicas = {member: self._waited_for.pop(member)[0] for member in self.over(now)}
        lost = [Loss(member, one, causes.get(member, "")) for member, one in replicas.items() if one not in names]
        return lost, [one for one in replicas.values() if one in names]
