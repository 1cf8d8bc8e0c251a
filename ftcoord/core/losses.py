"""Which members of a quorum are lost to the others. No clock, no I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Loss:
    """A member that is lost.

    Args:
        replica_id: its name.
        cause: one line such as "host7 (pid 4711) was killed by signal 9 (SIGKILL)"; empty if nobody has said so.
    """

    replica_id: str
    cause: str


class Losses:
    """What became of the members of one quorum.

    Whoever is said to be dead is lost. Whoever is gone without a word may have left when it had done its part, or may
    have lost no more than its lease: it is lost if nobody of its name is back after `timeout` seconds.

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
        """When `judge` has somebody to judge; infinite for never."""
        return min((until for _, until in self._waited_for.values()), default=inf)

    def gone(self, present: Collection[str]) -> list[str]:
        """The members that are not among those present, and of which `note` was not told yet."""
        return [member for member in self._there if member not in present]

    def note(self, member: str, cause: str, now: float) -> Loss | None:
        """A member is gone; who is lost with it now."""
        replica_id = self._there.pop(member)
        if cause:
            return Loss(replica_id, cause)
        self._waited_for[member] = (replica_id, now + self._timeout)
        return None

    def over(self, now: float) -> list[str]:
        """The members whose time is over, for `judge`."""
        return [member for member, (_, until) in self._waited_for.items() if until <= now]

    def judge(self, names: Collection[str], causes: Mapping[str, str], now: float) -> tuple[list[Loss], list[str]]:
        """Of those whose time is over: who is lost, and who is back, since its name is among those of live members.

        Args:
            names: the replica ids of the live members.
            causes: of those that died after they had come back under another lease, by member id.
            now: monotonic seconds.
        """
        replicas = {member: self._waited_for.pop(member)[0] for member in self.over(now)}
        lost = [Loss(one, causes.get(member, "")) for member, one in replicas.items() if one not in names]
        return lost, [one for one in replicas.values() if one in names]
