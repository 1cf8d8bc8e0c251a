"""The JSON records of a quorum, layout v3: what its members ask, and what was decided.

Parsing is strict, see `core.strict`. `core.layout` has the keys.

A replica's profile is the part of its request that stays the same from step to step. A decided quorum lies under two
keys: its roster (who sits where, with all profiles) is written only when it changes, and its head with each decision.
The head of a step that all replicas took together has one size, however many they are: it counts on from the roster,
and lists the exceptions.
A member leaves its profile out of a request when the roster that it knows has it, and names it by its digest. A digest
stands for one content, whatever etcd has lost or whoever wrote it, so a roster or a profile is never taken for another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import pairwise
from math import isfinite
from operator import attrgetter
from typing import Any, Final, TypeVar

from ftcoord.core.layout import roster_key
from ftcoord.core.strict import (
    LARGEST,
    V3,
    Raw,
    build,
    build_each,
    check_number,
    dump,
    json_problem,
    load,
    objects,
    part,
)
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

    @property
    def profile(self) -> Profile:
        """The part of it that stays the same from step to step."""
        return Profile(self.replica_id, self.address, self.store_address, self.world_size, self.data, self.handles)


@dataclass(frozen=True, slots=True)
class Profile:
    """What a replica says of itself in all of its requests; the fields are those of QuorumRequest."""

    replica_id: str
    address: str
    store_address: str
    world_size: int
    data: str
    handles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """What is left of a request without its profile: what changes from step to step, and whose it is."""

    replica_id: str
    step: int
    shrink_only: bool
    commit_failures: int


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """What a member writes of itself.

    Args:
        request: what it asks; while it does not ask, what it asked last, or would.
        asked: which of its requests that is, never 0 and never the same twice; 0 while it does not ask.
        after: the highest quorum id that it knows of; 0 for none.
        heard: the highest number of a quorum that it knows of; 0 for none.
        beat: means nothing, but that a record with another one is a sign of life.
        profile: if the request is written without its profile, the digest of that; empty if it is written whole. A
            record that is read without its profile has empty texts and a world size of 0 in its place.
        leaving: why it is about to give up its lease; empty while it stays. For people.
    """

    request: QuorumRequest
    asked: int
    after: int
    beat: int
    profile: str = ""
    heard: int = 0
    leaving: str = ""

    def completed(self, profiles: Mapping[str, Profile]) -> QuorumRequest | None:
        """The whole request, with the profile that is known by its digest; None if it is not among them."""
        if not self.profile:
            return self.request
        profile = profiles.get(self.profile)
        return None if profile is None else _joined(profile, self.request)


@dataclass(frozen=True, slots=True)
class QuorumSeat:
    """One participant, and the request of it that is answered; its place in `QuorumRecord.seats` is its rank."""

    member: str
    asked: int
    request: QuorumRequest


@dataclass(frozen=True, slots=True)
class IdleMember:
    """A member that has no seat, and which of its requests was answered last: by an earlier quorum, or by the seat of
    another member with its replica id."""

    member: str
    asked: int


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


@dataclass(frozen=True)
class QuorumRecord:
    """The decided quorum: what its head and its roster say together.

    Args:
        number: 1, 2, ...; another one for every decision.
        id: changes when process groups must be built again; never used for other replicas.
        seats: the participants, byte-wise by their replica id.
        idle: the members without a seat whose last request is answered: they do not ask now.
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

    @cached_property
    def _by_name(self) -> Mapping[str, QuorumRequest]:
        return {seat.request.replica_id: seat.request for seat in self.seats}

    def has_profile_of(self, request: QuorumRequest) -> bool:
        """Whether the replica has a seat, with the same profile."""
        seated = self._by_name.get(request.replica_id)
        return seated is not None and _profile_fields(seated) == _profile_fields(request)

    @cached_property
    def profiles(self) -> Mapping[str, Profile]:
        """Those of the participants, by their digests."""
        profiles = [seat.request.profile for seat in self.seats]
        return {digest_of(profile): profile for profile in profiles}

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

    number: int
    id: int
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
class _ShortReplicaRecord:
    """A ReplicaRecord that is written without its profile."""

    request: Progress
    asked: int
    after: int
    beat: int
    profile: str
    heard: int


@dataclass(frozen=True, slots=True)
class _RosterRecord:
    seats: tuple[RosterSeat, ...]


Seated = TypeVar("Seated", RosterSeat, JoinedSeat)

_DIGEST_BYTES: Final = 8
"""Of a digest; enough that two of one job's profiles or rosters never have the same by chance."""
_MOST_CHANGES: Final = 4
"""Seats that may come or go before the roster is written anew. It is as well when a head that lists them would not be
much shorter: when there are fewer than `_SEATS_A_CHANGE` of it for each."""
_SEATS_A_CHANGE: Final = 16
_MOST_EXCEPTIONS: Final = 16
"""Seats that may have asked more or less often than the others since the roster was written, or it is written anew."""
_ROSTERS: Final = 4
"""Rosters that a process keeps parsed."""
_PROFILES: Final = 4096
"""Profiles of which a process keeps the digests."""


@lru_cache(_PROFILES)
def digest_of(profile: Profile) -> str:
    """What a record names a profile by."""
    return _digest(dump(profile, V3))


def encode(record: ReplicaRecord) -> bytes:
    """The record as JSON, with the layout's version."""
    if not record.profile:
        return dump(record, V3)
    said = (record.asked, record.after, record.beat, record.profile, record.heard)
    return dump(_ShortReplicaRecord(_progress(record.request), *said), V3)


def encode_quorum(quorum: QuorumRecord, known: Roster | None = None) -> tuple[bytes, bytes | None]:
    """The head as JSON, and the roster too unless it is the `known` one."""
    head = _head_over(quorum, known) if known is not None else None
    if head is not None:
        return dump(head, V3), None
    seats = tuple(RosterSeat(seat.member, seat.asked, seat.request.profile) for seat in quorum.seats)
    roster = dump(_RosterRecord(seats), V3)
    return dump(_head(quorum, _digest(roster), (), (), _column([0] * len(seats))), V3), roster


def parse_replica(key: str, value: bytes) -> ReplicaRecord:
    """Raises StateError."""
    raw = load(key, value, V3)
    stays = {"leaving": ""} if raw.get("profile") else {}  # who leaves writes its record whole
    record = build(ReplicaRecord, key, {**raw, **stays, "request": _parse_request(key, raw)})
    check_number(key, record.after)
    check_number(key, record.heard)
    return record


def _parse_request(key: str, raw: Raw) -> QuorumRequest:
    request = part(key, raw, "request")
    if raw.get("profile"):
        return _joined(_UNKNOWN, build(Progress, key, request))
    built = build(QuorumRequest, key, request)
    _check_data(key, built.data)
    return built


@lru_cache(_ROSTERS)
def parse_roster(key: str, value: bytes) -> Roster:
    """Raises StateError."""
    raw = load(key, value, V3)
    record = build(
        _RosterRecord,
        key,
        {**raw, "seats": tuple(_with_profile(RosterSeat, key, one) for one in objects(key, raw, "seats"))},
    )
    return Roster(_digest(value), record.seats)


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


def _digest(value: bytes) -> str:
    return blake2b(value, digest_size=_DIGEST_BYTES).hexdigest()


_UNKNOWN: Final = Profile("", "", "", 0, "", ())
"""Stands for a profile that was left out."""


# The functions below run for each replica at each step.

_profile_fields: Final[Callable[[Any], tuple[Any, ...]]] = attrgetter(*Profile.__dataclass_fields__)
"""What a Profile says, and the same of a QuorumRequest."""


def _head_over(quorum: QuorumRecord, roster: Roster) -> QuorumHead | None:
    """The head that says how a quorum differs from a roster; None if that is so much that it gets a new one."""
    places = {seat.member: place for place, seat in enumerate(roster.seats)}
    kept: list[int] = []
    joined: list[JoinedSeat] = []
    later: list[int] = []
    for rank, seat in enumerate(quorum.seats):
        place = places.get(seat.member)
        if place is not None and _profile_fields(seat.request) == _profile_fields(roster.seats[place].profile):
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


def _request(
    profile: Profile, step: int, shrink_only: bool, commit_failures: int, replica_id: str | None = None
) -> QuorumRequest:
    """Of another replica than the profile's, if that is given."""
    return QuorumRequest(
        profile.replica_id if replica_id is None else replica_id,
        profile.address,
        profile.store_address,
        step,
        profile.world_size,
        shrink_only,
        profile.data,
        commit_failures,
        profile.handles,
    )


def _joined(profile: Profile, progress: Progress | QuorumRequest) -> QuorumRequest:
    """The request of this profile and this progress, which says whose it is."""
    said = progress.step, progress.shrink_only, progress.commit_failures, progress.replica_id
    return _request(profile, *said)


def _progress(request: QuorumRequest) -> Progress:
    return Progress(request.replica_id, request.step, request.shrink_only, request.commit_failures)


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
    raw = load(key, value, V3)
    columns = {name: _parse_column(key, raw, name) for name in _COLUMNS}
    lists = {
        "joined": tuple(_with_profile(JoinedSeat, key, one) for one in objects(key, raw, "joined")),
        "idle": build_each(IdleMember, key, raw, "idle"),
    }
    head = build(QuorumHead, key, {**raw, **columns, **lists})
    check_number(key, head.number)
    check_number(key, head.id)
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
        QuorumSeat(seat.member, seat.asked + more, _request(seat.profile, step, shrinks == 1, failed))
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
    _check_data(key, profile.data)
    return build(kind, key, {**raw, "profile": profile})


def _check_data(key: str, data: str) -> None:
    if problem := json_problem(data):
        raise StateError(key, f"has a request whose data is no JSON: {problem}")
