"""The office of a group (G2): the key that names who decides, and when a member tries to take it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ftcoord.core.strict import V4, build, dump, load
from ftcoord.errors import OtherLayout, StateError

SLOT: Final = 0.02
"""Seconds between the tries of two members that know their ranks: a grant and a put take 2 to 5 ms."""
SLOTS: Final = 50
"""Ranks that have a slot. Of all others one must be left out of a thousand, not each wait for its turn."""
NO_SLOT: Final = 1.0, 2.0
"""Seconds until a member without a slot tries for the first time: the least and the most."""
AGAIN: Final = 1.0
"""Seconds until a member with a slot tries again,"""
NO_SLOT_AGAIN: Final = 10.0, 20.0
"""and one without: 4,000 nodes must not ask a full etcd twice a second."""


@dataclass(frozen=True, slots=True)
class OfficeRecord:
    """The value of `decider`.

    Args:
        member: the id of the member whose process decides, for people.
        address: where it is asked, as `host:port`; empty if only the members' keys ask.
        key: 32 random hexadecimal digits, which make each value of this key unlike all others: who knows them may ask.
    """

    member: str
    address: str
    key: str = field(repr=False)


def encode_office(record: OfficeRecord) -> bytes:
    """The record as JSON."""
    return dump(record, V4)


def parse_office(key: str, value: bytes) -> OfficeRecord:
    """Raises StateError."""
    return build(OfficeRecord, key, load(key, value, V4))


def is_vacant(lease: int, key: str, value: bytes) -> bool:
    """Whether a `decider` that exists may be replaced: nobody's lease ends it, or it holds garbage.

    Raises OtherLayout for one of another release: its decider lives.
    """
    if not lease:
        return True
    try:
        parse_office(key, value)
    except OtherLayout:
        raise
    except StateError:
        return True
    return False


def first_try(rank: int | None, draw: float) -> float:
    """Seconds from the deletion of `decider` until a member tries to take the office.

    Args:
        rank: its place in the last record; None without one.
        draw: random, from 0 to 1.
    """
    if rank is not None and rank < SLOTS:
        return rank * SLOT
    return _between(NO_SLOT, draw)


def next_try(rank: int | None, draw: float) -> float:
    """Seconds from one try to the next, while there is no decider: the notice of a deletion may be lost."""
    return AGAIN if rank is not None and rank < SLOTS else _between(NO_SLOT_AGAIN, draw)


def _between(range_: tuple[float, float], draw: float) -> float:
    least, most = range_
    return least + (most - least) * draw
