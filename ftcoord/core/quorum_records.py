"""The JSON records of a quorum, layout v1: what its members ask, and what was decided.

Parsing is strict, see `core.strict`. `core.layout` has the keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isfinite

from ftcoord.core.strict import Raw, build, build_each, dump, json_problem, load, objects, texts
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
    address: str
    store_address: str
    step: int
    world_size: int
    shrink_only: bool
    data: str
    commit_failures: int
    handles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """What a member writes of itself.

    Args:
        request: what it asks; while it does not ask, what it asked last, or would.
        asked: which of its requests that is, never 0 and never the same twice; 0 while it does not ask.
        after: the highest quorum id that it knows of; 0 for none.
        beat: means nothing, but that a record with another one is a sign of life.
    """

    request: QuorumRequest
    asked: int
    after: int
    beat: int


@dataclass(frozen=True, slots=True)
class QuorumSeat:
    """One participant, and the request of it that is answered; its place in `QuorumRecord.seats` is its rank."""

    member: str
    asked: int
    request: QuorumRequest


@dataclass(frozen=True, slots=True)
class IdleMember:
    """A member that has no seat, and which of its requests an earlier quorum answered."""

    member: str
    asked: int


@dataclass(frozen=True)
class QuorumRecord:
    """The decided record.

    Args:
        number: 1, 2, ...; another one for every decision.
        id: changes when process groups must be built again; never used for other replicas.
        seats: the participants, byte-wise by their replica id.
        idle: the members whose last request was answered before: they do not ask now.
        created: wall clock, seconds since 1970, for people only.
        by: the member that decided this.
    """

    number: int
    id: int
    seats: tuple[QuorumSeat, ...]
    idle: tuple[IdleMember, ...]
    created: float
    by: str = ""

    @cached_property
    def names(self) -> frozenset[str]:
        """The replica ids of the participants."""
        return frozenset(seat.request.replica_id for seat in self.seats)

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


def encode(record: ReplicaRecord | QuorumRecord) -> bytes:
    """The record as JSON, with the layout's version."""
    return dump(record)


def parse_replica(key: str, value: bytes) -> ReplicaRecord:
    """Raises StateError."""
    return build(ReplicaRecord, key, _with_request(key, load(key, value)))


def parse_quorum(key: str, value: bytes) -> QuorumRecord:
    """Raises StateError."""
    raw = load(key, value)
    seats = tuple(build(QuorumSeat, key, _with_request(key, seat)) for seat in objects(key, raw, "seats"))
    quorum = build(QuorumRecord, key, {**raw, "seats": seats, "idle": build_each(IdleMember, key, raw, "idle")})
    if not isfinite(quorum.created):
        raise StateError(key, "has a created that is no time")
    return quorum


def _with_request(key: str, raw: Raw) -> Raw:
    request = raw.get("request")
    if not isinstance(request, dict):
        raise StateError(key, "has no request")
    built = build(QuorumRequest, key, {**request, "handles": texts(key, request, "handles")})
    if problem := json_problem(built.data):
        raise StateError(key, f"has a request whose data is no JSON: {problem}")
    return {**raw, "request": built}
