"""The records of a barrier."""

from __future__ import annotations

from dataclasses import dataclass

from ftcoord.core.strict import build, build_each, dump, load
from ftcoord.errors import StateError


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a party asks: to pass the barrier once more, after the generation `after`.

    Args:
        parties: how many pass together.
        after: the last generation that it passed; 0 for none.
        nonce: makes each arrival unlike all others of the member.
    """

    parties: int
    after: int
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class Passed:
    """The last generation that a live member passed, and its place among those that passed with it."""

    member: str
    number: int
    index: int


@dataclass(frozen=True, slots=True)
class Generation:
    """The decided record: who has passed.

    Args:
        number: of the last generation that passed: 1, 2, ...; 0 if none did.
        parties: how many pass together.
        passed: the live members that ever passed.
        by: the member that decided this, and the revision of the record before.
    """

    number: int
    parties: int
    passed: tuple[Passed, ...]
    by: str = ""


def encode(record: Arrival | Generation) -> bytes:
    """The record as JSON, with the layout's version."""
    return dump(record)


def parse_arrival(key: str, value: bytes) -> Arrival:
    """Raises StateError."""
    arrival = build(Arrival, key, load(key, value))
    if arrival.parties < 1:
        raise StateError(key, f"waits for {arrival.parties} parties, which cannot be")
    return arrival


def parse_generation(key: str, value: bytes) -> Generation:
    """Raises StateError."""
    raw = load(key, value)
    return build(Generation, key, {**raw, "passed": build_each(Passed, key, raw, "passed")})
