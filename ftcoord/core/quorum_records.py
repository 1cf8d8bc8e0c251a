"""The JSON records of a quorum and the keys they live under, layout v1.

    <prefix>/members/<lease id>   ReplicaRecord   one per replica, under its lease
    <prefix>/decided              QuorumRecord     the last decision

Parsing is strict, see `core.strict`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from ftcoord.core.quorum import Answered, QuorumRecord, QuorumRequest, QuorumSeat
from ftcoord.core.strict import Raw, build, build_each, dump, json_problem, load, objects, texts
from ftcoord.errors import StateError


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
    quorum = build(QuorumRecord, key, {**raw, "seats": seats, "idle": build_each(Answered, key, raw, "idle")})
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
