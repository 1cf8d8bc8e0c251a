"""The records of an election."""

from __future__ import annotations

from dataclasses import dataclass

from ftcoord.core.strict import Count, build, dump, load


@dataclass(frozen=True, slots=True)
class Candidacy:
    """What a candidate asks: to lead.

    Args:
        name: for people.
        after: the highest term that it ever heard of.
        nonce: makes each candidacy unlike all others of the member.
    """

    name: str
    after: Count = 0
    nonce: str = ""

    @property
    def highest(self) -> int:
        """The highest number that it names."""
        return self.after


@dataclass(frozen=True, slots=True)
class Term:
    """The decided record: who leads.

    Args:
        number: 1, 2, ...; never used twice.
        member: the id of the member that leads.
        name: its name.
        by: the member that decided this, and the revision of the record before.
    """

    number: Count
    member: str
    name: str
    by: str = ""


def encode(record: Candidacy | Term) -> bytes:
    """The record as JSON, with the layout's version."""
    return dump(record)


def parse_candidacy(key: str, value: bytes) -> Candidacy:
    """Raises StateError."""
    return build(Candidacy, key, load(key, value))


def parse_term(key: str, value: bytes) -> Term:
    """Raises StateError."""
    return build(Term, key, load(key, value))
