"""The records of an election."""

from __future__ import annotations

from dataclasses import dataclass

from ftcoord.core.strict import build, check_number, dump, load


@dataclass(frozen=True, slots=True)
class Candidacy:
    """What a candidate asks: to lead.

    Args:
        name: for people.
        after: the highest term that it ever heard of.
        nonce: makes each candidacy unlike all others of the member.
    """

    name: str
    after: int = 0
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class Term:
    """The decided record: who leads.

    Args:
        number: 1, 2, ...; never used twice.
        member: the id of the member that leads.
        name: its name.
        by: the member that decided this, and the revision of the record before.
    """

    number: int
    member: str
    name: str
    by: str = ""


def encode(record: Candidacy | Term) -> bytes:
    """The record as JSON, with the layout's version."""
    return dump(record)


def parse_candidacy(key: str, value: bytes) -> Candidacy:
    """Raises StateError."""
    candidacy = build(Candidacy, key, load(key, value))
    check_number(key, candidacy.after)
    return candidacy


def parse_term(key: str, value: bytes) -> Term:
    """Raises StateError."""
    term = build(Term, key, load(key, value))
    check_number(key, term.number)
    return term
