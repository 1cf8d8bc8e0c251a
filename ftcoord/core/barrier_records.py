"""The records of a barrier."""

from __future__ import annotations

from dataclasses import dataclass

from ftcoord.core.strict import build, build_each, check_number, dump, load
from ftcoord.errors import StateError


@dataclass(frozen=True, slots=True)
class Arrival:
    """A party's ask: to pass the barrier once more, after the generation `after`.

    Args:
        party: the party, the same through all of its leases.
        parties: how many pass together.
        after: the last generation that it passed; 0 for none.
        known: the highest generation that it has ever seen.
        nonce: makes each arrival of the member unique.
    """

    party: str
    parties: int
    after: int
    known: int = 0
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class Passed:
    """The last generation that a live party passed, and its place among those that passed with it."""

    party: str
    number: int
    index: int


@dataclass(frozen=True, slots=True)
class Generation:
    """The decided record: who has passed.

    Args:
        number: the last generation that passed: 1, 2, ...; 0 if none did.
        parties: how many pass together.
        passed: the live parties that ever passed.
        refused: the members that want another number than `parties`.
        by: the member that decided this, and the revision of the record before.
    """

    number: int
    parties: int
    passed: tuple[Passed, ...]
    refused: tuple[str, ...] = ()
    by: str = ""


def encode(record: Arrival | Generation) -> bytes:
    """The record as JSON, with the layout's version."""
    return dump(record)


def parse_arrival(key: str, value: bytes) -> Arrival:
    """Parse an arrival. Raises StateError."""
    arrival = build(Arrival, key, load(key, value))
    if arrival.parties < 1:
        raise StateError(key, f"waits for {arrival.parties} parties, which cannot be")
    check_number(key, arrival.after)
    check_number(key, arrival.known)
    return arrival


def parse_generation(key: str, value: bytes) -> Generation:
    """Parse the decided record. Raises StateError."""
    raw = load(key, value)
    generation = build(Generation, key, {**raw, "passed": build_each(Passed, key, raw, "passed")})
    check_number(key, generation.number)
    return generation
