"""The records of a quorum, layout v4: what its members ask, as JSON, and what was decided, as compressed JSON.

Parsing is strict, see `core.strict`. `core.layout` has the keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite

from ftcoord.core import strict
from ftcoord.core.strict import Count, Raw, Size, build
from ftcoord.errors import StateError


@dataclass(frozen=True, slots=True)
class QuorumRequest:
    """What one replica (one replica group) asks a quorum for. It is returned to all participants as it was sent.

    Args:
        replica_id: unlike that of all other replicas; places in a quorum are in its order.
        address: where its manager is reached.
        store_address: where its store is reached.
        step: the step it has completed; the highest in a quorum is what others heal to.
        world_size: the ranks in the replica group.
        shrink_only: no replica may join now.
        data: whatever the replica wants others to know, as JSON text; empty for nothing.
        commit_failures: steps it failed to commit since the last one that it did commit.
        handles: what peers need to reconfigure, one for each group rank.
    """

    replica_id: str
    address: str = field(default="", repr=False)  # it may have a token, see `core.manager_address`
    store_address: str = ""
    step: int = 0
    world_size: Size = 0
    shrink_only: bool = False
    data: str = ""
    commit_failures: int = 0
    handles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """What a member writes of itself.

    Args:
        request: what it asks; while it does not ask, what it asked last, or would.
        asked: which of its requests that is, never 0 and never the same twice; 0 while it does not ask.
        after: the highest quorum id that it knows of; 0 for none.
        heard: the highest number of a quorum that it knows of; 0 for none.
        beat: counts this replica's writes: it makes each unlike all earlier ones.
        min_replicas: that of its address, for people: before the first quorum nothing else in etcd shows it.
    """

    request: QuorumRequest
    asked: Count = 0
    after: Count = 0
    beat: int = 0
    heard: Count = 0
    min_replicas: Size = 1

    @property
    def highest(self) -> int:
        """The highest number that it names."""
        return max(self.after, self.heard)


@dataclass(frozen=True, slots=True)
class QuorumSeat:
    """One participant, and the request of it that is answered; its place in `QuorumRecord.seats` is its rank."""

    member: str
    asked: Count
    request: QuorumRequest


@dataclass(frozen=True, slots=True)
class IdleMember:
    """A member that has no seat, and which of its requests was answered last: by an earlier quorum, or by the seat of
    another member with its replica id."""

    member: str
    asked: Count


@dataclass(frozen=True)
class QuorumRecord:
    """The decided quorum.

    Args:
        number: 1, 2, ...; another one for every decision.
        id: changes when process groups must be built again; never used for other replicas.
        seats: the participants, byte-wise by their replica id.
        idle: the live members without a seat of which a request was answered. Whoever repeats that one, because an
            answer was lost, is answered by this record too.
        created: wall clock, seconds since 1970, for people only.
        by: the member that decided this.
    """

    number: Count
    id: Count
    seats: tuple[QuorumSeat, ...]
    idle: tuple[IdleMember, ...]
    created: float
    by: str = ""

    @cached_property
    def names(self) -> frozenset[str]:
        """The replica ids of the participants."""
        return frozenset(seat.request.replica_id for seat in self.seats)

    def contradicts(self, known: QuorumRecord | None) -> bool:
        """Whether it has the id of `known`, but other replicas: etcd has lost that one since."""
        return known is not None and known.id == self.id and known.names != self.names

    @property
    def requests(self) -> tuple[QuorumRequest, ...]:
        """What the participants asked, in the order of their ranks."""
        return tuple(seat.request for seat in self.seats)

    @cached_property
    def seated(self) -> Mapping[str, int]:
        """By member with a seat: its request that this quorum answers."""
        return {seat.member: seat.asked for seat in self.seats}

    @cached_property
    def answered(self) -> Mapping[str, int]:
        """By member: its last request that this quorum or an earlier one answered."""
        return {one.member: one.asked for one in self.idle} | dict(self.seated)


def encode(record: ReplicaRecord) -> bytes:
    """The record as JSON, with the layout's version."""
    return strict.dump(record, strict.V4)


def parse_replica(key: str, value: bytes) -> ReplicaRecord:
    """Raises StateError."""
    raw = strict.load(key, value, strict.V4)
    return build(ReplicaRecord, key, {**raw, "request": build_request(key, raw)})


def encode_quorum(quorum: QuorumRecord) -> bytes:
    """The record as JSON with the layout's version, compressed: most of what its seats say is alike."""
    return strict.dump_packed(quorum)


def parse_quorum(key: str, value: bytes) -> QuorumRecord:
    """Raises StateError."""
    raw = strict.load_packed(key, value)
    seats = [
        build(QuorumSeat, key, {**one, "request": build_request(key, one)}) for one in strict.objects(key, raw, "seats")
    ]
    quorum = build(
        QuorumRecord, key, {**raw, "seats": tuple(seats), "idle": strict.build_each(IdleMember, key, raw, "idle")}
    )
    if not isfinite(quorum.created):
        raise StateError(key, "has a created that is no time")
    return quorum


def build_request(key: str, raw: Raw) -> QuorumRequest:
    """The field `request`. Raises StateError."""
    built = build(QuorumRequest, key, strict.part(key, raw, "request"))
    if problem := data_problem(built.data):
        raise StateError(key, f"has a request whose data is no JSON object: {problem}")
    return built


def data_problem(data: str) -> str:
    """Why torchft's clients could not read the data of a request; empty if they can. Empty data are none."""
    problem = strict.json_problem(data)
    return problem or ("" if not data or data.lstrip().startswith("{") else "it must begin with {")
