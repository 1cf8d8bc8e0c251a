"""The JSON records of a quorum and the keys they live under, layout v1.

    <prefix>/members/<lease id>   Petition   one per replica, under its lease
    <prefix>/decided              Quorum     the last decision

Parsing is strict, see `core.strict`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from ftcoord.core.quorum import Answered, Quorum, Request, Seat
from ftcoord.core.strict import Raw, build, build_each, dump, json_problem, load, objects, texts
from ftcoord.errors import StateError


@dataclass(frozen=True, slots=True)
class Petition:
    """What a member writes of itself.

    Args:
        request: what it asks; while it does not ask, what it asked last, or would.
        asked: which of its requests that is, never 0 and never the same twice; 0 while it does not ask.
        after: the highest quorum id that it knows of; 0 for none.
        beat: means nothing, but that a record with another one is a sign of life.
    """

    request: Request
    asked: int
    after: int
    beat: int


def encode(record: Petition | Quorum) -> bytes:
    """The record as JSON, with the layout's version."""
    return dump(record)


def parse_petition(key: str, value: bytes) -> Petition:
    """Raises StateError."""
    return build(Petition, key, _with_request(key, load(key, value)))


def parse_quorum(key: str, value: bytes) -> Quorum:
    """Raises StateError."""
    raw = load(key, value)
    seats = tuple(build(Seat, key, _with_request(key, seat)) for seat in objects(key, raw, "seats"))
    quorum = build(Quorum, key, {**raw, "seats": seats, "idle": build_each(Answered, key, raw, "idle")})
    if not isfinite(quorum.created):
        raise StateError(key, "has a created that is no time")
    return quorum


def _with_request(key: str, raw: Raw) -> Raw:
    request = raw.get("request")
    if not isinstance(request, dict):
        raise StateError(key, "has no request")
    built = build(Request, key, {**request, "handles": texts(key, request, "handles")})
    if problem := json_problem(built.data):
        raise StateError(key, f"has a request whose data is no JSON: {problem}")
    return {**raw, "request": built}
