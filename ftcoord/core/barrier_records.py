"""The records of a barrier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ftcoord.core.strict import LARGEST, Count, Range, Size, build, build_each, dump, load

_Parties = Annotated[int, Range(1, LARGEST)]


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
    parties: _Parties
    after: Count
    known: Count = 0
    nonce: str = ""

    @property
    def highest(self) -> int:
        """The highest number that it names."""
        return max(self.after, self.known)


@dataclass(frozen=True, slots=True)
class Passed:
    """The last generation that a live party passed, and its place among those that passed with it."""

    party: str
    number: Count
    index: Size


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

    number: Count
    parties: _Parties
    passed: tuple[Passed, ...]
    refused: tuple[str, ...] = ()
    by: str = ""


def encode(record: Arrival | Generation) -> bytes:
    """The record as JSON, with the layout's version."""
    return dump(record)


def parse_arrival(key: str, value: bytes) -> Arrival:
    """Parse an arrival. Raises StateError."""
    return build(Arrival, key, load(key, value))


def parse_generation(key: str, value: bytes) -> Generation:
    """Parse the decided record. Raises StateError."""
    raw = load(key, value)
    return build(Generation, key, {**raw, "passed": build_each(Passed, key, raw, "passed")})
