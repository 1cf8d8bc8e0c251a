"""Who of an elastic run's members gets which rank, who has the right state, and which samples are whose. Pure.

A member asks for a quorum with its `Place`. The quorum is the group that trains next, and its number is the group's.

Rules
  E1 progress. A member that has committed `step` steps has the progress 2 * step. One whose optimizers have each
     stepped once since then has 2 * step + 1: its parameters are those of the next step, and what its user does after
     `optimizer.step()` may be missing. One that is torn, in the middle of several such steps, has -1.
  E2 source. Rank 0 is a member with the highest progress; of several one of the latest group, and there the one with
     the lowest rank. Survivors keep their order behind it, and newcomers follow by name.
  E3 right. Who has the source's progress from the source's group has a right state, if that is a committed step:
     members of one group are replicas. Two that committed the same step in two groups may differ by rounding. All
     others take the source's state.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ftcoord.core.quorum_records import QuorumRequest, QuorumSeat

FINISHED = b"finished"
"""How a group ended whose members have all returned from the function that trains."""
TORN = -1
"""The progress of a member without a right state."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands when it asks.

    Args:
        progress: see E1.
        group: the number of the last group whose state it has; 0 for none.
        rank: its rank there.
        way: how its torch re-forms a group: all members must have the same.
        handle: what torch needs to reach it; empty if `way` needs none.
    """

    progress: int
    group: int = 0
    rank: int = 0
    way: str = ""
    handle: str = ""

    def request(self, name: str) -> QuorumRequest:
        """What a member of this name asks for a quorum with."""
        data = {"elastic": self.way, "progress": self.progress, "group": self.group, "rank": self.rank}
        return QuorumRequest(
            replica_id=name,
            address="",
            store_address="",
            step=max(self.progress, 0) // 2,
            world_size=1,
            shrink_only=False,
            data=json.dumps(data),
            commit_failures=0,
            handles=(self.handle,),
        )

    @classmethod
    def of(cls, request: QuorumRequest) -> Place:
        """What a member asked with. Raises ValueError for what is no member of an elastic run."""
        data = json.loads(request.data or "{}")
        progress, group, rank = (data.get(name) for name in ("progress", "group", "rank"))
        way, handles = data.get("elastic"), request.handles
        if {type(progress), type(group), type(rank)} != {int} or not isinstance(way, str) or len(handles) != 1:
            raise ValueError(f"replica {request.replica_id!r} is no member of an elastic run: give this run another id")
        return cls(progress, group, rank, way, handles[0])


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A group: its members by rank.

    Args:
        number: the quorum's number: no other group of the run has it.
        members: their ids.
        names: their names.
        places: what they asked with.
        right: the ranks with a right state, 0 among them.
        odd: the names of members whose torch re-forms in another way than rank 0's: they have to leave.
    """

    number: int
    members: tuple[str, ...]
    names: tuple[str, ...]
    places: tuple[Place, ...]
    right: frozenset[int]
    odd: tuple[str, ...]

    @property
    def has_state(self) -> bool:
        """Whether any member has a right state."""
        return self.places[0].progress != TORN

    @property
    def step(self) -> int:
        """The step that all have once those that are behind have rank 0's state."""
        return (self.places[0].progress + 1) // 2

    @property
    def is_even(self) -> bool:
        """Whether nobody needs another one's state."""
        return len(self.right) == len(self.places)


def arranged(number: int, seats: Sequence[QuorumSeat]) -> Arrangement:
    """The group of a quorum. Raises ValueError if somebody is no member of an elastic run."""
    found = [(Place.of(seat.request), seat.request.replica_id, seat.member) for seat in seats]
    found.sort(key=lambda one: (-one[0].progress, -one[0].group, one[0].rank, one[1]))
    places, names, members = zip(*found, strict=True)
    right = {rank for rank, place in enumerate(places) if _is_right(place, places[0])}
    odd = tuple(name for name, place in zip(names, places, strict=True) if place.way != places[0].way)
    return Arrangement(number, members, names, places, frozenset({0, *right}), odd)


def _is_right(place: Place, source: Place) -> bool:
    same = (place.progress, place.group) == (source.progress, source.group)
    return same and source.group > 0 and source.progress != TORN and source.progress % 2 == 0


# -- samples ----------------------------------------------------------------------------------------------------------


def share(start: int, stop: int, rank: int, world: int) -> tuple[int, int]:
    """The part of a rank in the positions from `start` up to `stop`: the parts of all ranks are disjoint, cover all,
    and differ by one at most. A part may be empty."""
    count = stop - start
    return start + count * rank // world, start + count * (rank + 1) // world


def weight(start: int, stop: int, rank: int, world: int) -> float:
    """What to multiply a rank's mean loss with, so that the mean over all ranks is that over all samples; 1.0 if all
    parts are equal."""
    first, last = share(start, stop, rank, world)
    return (last - first) * world / (stop - start)
