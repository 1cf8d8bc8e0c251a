"""A decided quorum as it lies in etcd, layout v4: under two keys, as JSON.

Its roster (who sits where, with all profiles) is written only when it changes, and its head with each decision. The
head of a step that all replicas took together has one size, however many they are: it counts on from the roster, and
lists the exceptions. The head names its roster by a digest, so a roster is never taken for another, whatever etcd has
lost or whoever wrote it.

Parsing is strict, see `core.strict`. `core.layout` has the keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import isfinite
from typing import Final, TypeVar

from ftcoord.core.layout import roster_key
from ftcoord.core.quorum_records import (
    IdleMember,
    Profile,
    QuorumRecord,
    QuorumSeat,
    check_data,
    digest_of_bytes,
    profile_fields,
    request_of,
)
from ftcoord.core.strict import LARGEST, V4, Count, Raw, build, build_each, dump, load, objects, part
from ftcoord.errors import StateError


@dataclass(frozen=True, slots=True)
class RosterSeat:
    """Who has a seat, what it says of itself, and which of its requests was answered when this was written; its place
    in the roster is its rank."""

    member: str
    asked: int
    profile: Profile


@dataclass(frozen=True)
class Roster:
    """Who sits where, as it lies in etcd.

    Args:
        digest: of its bytes there.
    """

    digest: str
    seats: tuple[RosterSeat, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """One number for each seat: the common one, and those of the `ranks` that have another."""

    common: int
    ranks: tuple[int, ...]
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JoinedSeat:
    """A seat that the roster does not have, and its rank."""

    rank: int
    member: str
    profile: Profile


@dataclass(frozen=True, slots=True)
class QuorumHead:
    """What is written of a quorum with each decision.

    Args:
        number, id, idle, created, by: see QuorumRecord.
        roster: the digest of the roster that this goes with.
        left: the places in the roster of those that have no such seat any more.
        joined: the seats that are not in the roster, by rank.
        asked: of each seat, how many requests later than the roster's that is, later than 0 for one that joined; see
            QuorumSeat.
        step, commit_failures: of each seat; see QuorumRequest.
        shrink_only: of each seat, 1 for one that asks to let nobody new in, else 0.
    """

    number: Count
    id: Count
    roster: str
    left: tuple[int, ...]
    joined: tuple[JoinedSeat, ...]
    asked: Column
    step: Column
    commit_failures: Column
    shrink_only: Column
    idle: tuple[IdleMember, ...]
    created: float
    by: str


@dataclass(frozen=True, slots=True)
class _RosterRecord:
    seats: tuple[RosterSeat, ...]


Seated = TypeVar("Seated", RosterSeat, JoinedSeat)


_MOST_CHANGES: Final = 4
"""Seats that may come or go before the roster is written anew. It is as well when a head that lists them would not be
much shorter: when there are fewer than `_SEATS_A_CHANGE` of it for each."""
_SEATS_A_CHANGE: Final = 16
_MOST_EXCEPTIONS: Final = 16
"""Seats that may have asked more or less often than the others since the roster was written, or it is written anew."""
_ROSTERS: Final = 4
"""Rosters that a process keeps parsed."""


def encode_quorum(quorum: QuorumRecord, known: Roster | None = None) -> tuple[bytes, bytes | None]:
    """The head as JSON, and the roster too unless it is the `known` one."""
    head = _head_over(quorum, known) if known is not None else None
    if head is not None:
        return dump(head, V4), None
    seats = tuple(RosterSeat(seat.member, seat.asked, seat.request.profile) for seat in quorum.seats)
    roster = dump(_RosterRecord(seats), V4)
    return dump(_head(quorum, digest_of_bytes(roster), (), (), _column([0] * len(seats))), V4), roster


@lru_cache(_ROSTERS)
def parse_roster(key: str, value: bytes) -> Roster:
    """Raises StateError."""
    raw = load(key, value, V4)
    record = build(
        _RosterRecord,
        key,
        {**raw, "seats": tuple(_with_profile(RosterSeat, key, one) for one in objects(key, raw, "seats"))},
    )
    return Roster(digest_of_bytes(value), record.seats)


def parse_quorum(key: str, value: bytes, roster_value: bytes | None) -> QuorumRecord:
    """The quorum whose head has this key and value, with what the key of its roster holds; None if that is absent.

    Raises StateError, also when the roster is not the one that the head names.
    """
    head = _parse_head(key, value)
    if roster_value is None:
        problem = f"goes with a roster that is gone from {roster_key(key)!r}: delete both keys"
        raise StateError(key, f"{problem}, and the replicas go on from the last quorum that they know")
    roster = parse_roster(roster_key(key), roster_value)
    if roster.digest != head.roster:
        problem = f"is not the roster that {key!r} goes with, since somebody else wrote one of them: delete both keys"
        raise StateError(roster_key(key), f"{problem}, and the replicas go on from the last quorum that they know")
    return _seated(key, head, roster)


# The functions below run for each replica at each step.


def _head_over(quorum: QuorumRecord, roster: Roster) -> QuorumHead | None:
    """The head that says how a quorum differs from a roster; None if that is so much that it gets a new one."""
    places = {seat.member: place for place, seat in enumerate(roster.seats)}
    kept: list[int] = []
    joined: list[JoinedSeat] = []
    later: list[int] = []
    for rank, seat in enumerate(quorum.seats):
        place = places.get(seat.member)
        if place is not None and profile_fields(seat.request) == profile_fields(roster.seats[place].profile):
            kept.append(place)
            later.append(seat.asked - roster.seats[place].asked)
        else:
            joined.append(JoinedSeat(rank, seat.member, seat.request.profile))
            later.append(seat.asked)
    in_order = all(before < after for before, after in pairwise(kept))
    changes = len(joined) + len(roster.seats) - len(kept)
    if not in_order or changes > min(_MOST_CHANGES, len(roster.seats) // _SEATS_A_CHANGE):
        return None
    asked = _column(later)
    if len(asked.ranks) > _MOST_EXCEPTIONS or any(abs(value) > LARGEST for value in (asked.common, *asked.values)):
        return None
    left = tuple(sorted({*range(len(roster.seats))} - {*kept})) if changes else ()
    return _head(quorum, roster.digest, left, tuple(joined), asked)


def _column(values: Sequence[int]) -> Column:
    if not values:
        return Column(0, (), ())
    common = values[0]
    if values.count(common) == len(values):  # nearly always
        return Column(common, (), ())
    ((common, _),) = Counter(values).most_common(1)
    others = [(rank, value) for rank, value in enumerate(values) if value != common]
    return Column(common, tuple(rank for rank, _ in others), tuple(value for _, value in others))


def _head(
    quorum: QuorumRecord, roster: str, left: tuple[int, ...], joined: tuple[JoinedSeat, ...], asked: Column
) -> QuorumHead:
    requests = quorum.requests
    return QuorumHead(
        quorum.number,
        quorum.id,
        roster,
        left,
        joined,
        asked,
        _column([one.step for one in requests]),
        _column([one.commit_failures for one in requests]),
        _column([int(one.shrink_only) for one in requests]),
        quorum.idle,
        quorum.created,
        quorum.by,
    )


def _parse_head(key: str, value: bytes) -> QuorumHead:
    raw = load(key, value, V4)
    columns = {name: _parse_column(key, raw, name) for name in _COLUMNS}
    lists = {
        "joined": tuple(_with_profile(JoinedSeat, key, one) for one in objects(key, raw, "joined")),
        "idle": build_each(IdleMember, key, raw, "idle"),
    }
    head = build(QuorumHead, key, {**raw, **columns, **lists})
    if not isfinite(head.created):
        raise StateError(key, "has a created that is no time")
    return head


_COLUMNS: Final = ("asked", "step", "commit_failures", "shrink_only")


def _parse_column(key: str, raw: Raw, name: str) -> Column:
    try:
        return build(Column, key, part(key, raw, name))
    except StateError:
        raise StateError(key, f"has a {name} that is no column of numbers") from None


def _spread(key: str, name: str, column: Column, size: int) -> list[int]:
    """The number of each seat."""
    if len(column.ranks) != len(column.values) or not all(0 <= rank < size for rank in column.ranks):
        raise StateError(key, f"has a {name} that is not of the {size} seats of its roster")
    spread = [column.common] * size
    for rank, value in zip(column.ranks, column.values, strict=True):
        spread[rank] = value
    return spread


def _seated(key: str, head: QuorumHead, roster: Roster) -> QuorumRecord:
    seated = _roster_seats(key, head, roster)
    size = len(seated)
    later, steps, failures, shrinking = (_spread(key, name, getattr(head, name), size) for name in _COLUMNS)
    if not set(shrinking) <= {0, 1}:
        raise StateError(key, "has a shrink_only that is neither 0 nor 1")
    seats = tuple(
        QuorumSeat(seat.member, seat.asked + more, request_of(seat.profile, step, shrinks == 1, failed))
        for seat, more, step, shrinks, failed in zip(seated, later, steps, shrinking, failures, strict=True)
    )
    if not all(-LARGEST <= seat.asked <= LARGEST for seat in seats):
        raise StateError(key, "has an asked that nobody has counted to")
    return QuorumRecord(head.number, head.id, seats, head.idle, head.created, head.by)


def _roster_seats(key: str, head: QuorumHead, roster: Roster) -> Sequence[RosterSeat]:
    """Who sits where, by rank: the roster's seats, without those that left, and with those that joined."""
    if not (head.left or head.joined):
        return roster.seats
    left = frozenset(head.left)
    if not all(0 <= place < len(roster.seats) for place in left):
        raise StateError(key, "has a left that is not of the seats of its roster")
    seats = [seat for place, seat in enumerate(roster.seats) if place not in left]
    for joined in head.joined:  # by rank, so that each one's place is right when its turn comes
        if not 0 <= joined.rank <= len(seats):
            raise StateError(key, "has a joined with a rank that is none")
        seats.insert(joined.rank, RosterSeat(joined.member, 0, joined.profile))
    return seats


def _with_profile(kind: type[Seated], key: str, raw: Raw) -> Seated:
    profile = build(Profile, key, part(key, raw, "profile"))
    check_data(key, profile.data)
    return build(kind, key, {**raw, "profile": profile})
