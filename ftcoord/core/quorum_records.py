"""The records of a quorum, layout v4: what its members ask, with its JSON, and what was decided.

Parsing is strict, see `core.strict`. `core.layout` has the keys.

A replica's profile is the part of its request that stays the same from step to step.
A member leaves its profile out of a request when the roster that it knows has it, and names it by its digest. A digest
stands for one content, whatever etcd has lost or whoever wrote it, so a profile is never taken for another.
`core.quorum_head` has how a decided quorum lies in etcd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b
from operator import attrgetter
from typing import Any, Final

from ftcoord.core.strict import V4, Count, Raw, Size, build, dump, json_problem, load, part
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
    address: str = field(repr=False)  # it may have a token, see `core.manager_address`
    store_address: str
    step: int
    world_size: Size
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
    address: str = field(repr=False)
    store_address: str
    world_size: Size
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
        beat: counts this replica's writes: it makes each unlike all earlier ones.
        profile: if the request is written without its profile, the digest of that; empty if it is written whole. A
            record that is read without its profile has empty texts and a world size of 0 in its place.
        min_replicas: that of its address, for people: before the first quorum nothing else in etcd shows it.
    """

    request: QuorumRequest
    asked: Count
    after: Count
    beat: int
    profile: str = ""
    heard: Count = 0
    min_replicas: Size = 1

    @property
    def highest(self) -> int:
        """The highest number that it names."""
        return max(self.after, self.heard)

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

    def share_names(self, other: QuorumRecord) -> None:
        """Take over the other one's `names`, if they are the same. All replicas of a process compare them at each step,
        and to compare one object with itself costs nothing."""
        if self.names == other.names:
            self.__dict__["names"] = other.names  # where the cached property has them

    @cached_property
    def _by_name(self) -> Mapping[str, QuorumRequest]:
        return {seat.request.replica_id: seat.request for seat in self.seats}

    def contradicts(self, known: QuorumRecord | None) -> bool:
        """Whether it has the id of `known`, but other replicas: etcd has lost that one since."""
        if known is None or known.id != self.id or known.names is self.names:
            return False
        return known.names != self.names

    def has_profile_of(self, request: QuorumRequest) -> bool:
        """Whether the replica has a seat, with the same profile."""
        seated = self._by_name.get(request.replica_id)
        return seated is not None and profile_fields(seated) == profile_fields(request)

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
class _ShortReplicaRecord:
    """A ReplicaRecord that is written without its profile."""

    request: Progress
    asked: int
    after: int
    beat: int
    profile: str
    heard: int
    min_replicas: int


_DIGEST_BYTES: Final = 8
"""Of a digest; enough that two of one job's profiles or rosters never have the same by chance."""
_PROFILES: Final = 4096
"""Profiles of which a process keeps the digests."""


@lru_cache(_PROFILES)
def digest_of(profile: Profile) -> str:
    """What a record names a profile by."""
    return digest_of_bytes(dump(profile, V4))


def encode(record: ReplicaRecord) -> bytes:
    """The record as JSON, with the layout's version."""
    if not record.profile:
        return dump(record, V4)
    said = (record.asked, record.after, record.beat, record.profile, record.heard, record.min_replicas)
    return dump(_ShortReplicaRecord(_progress(record.request), *said), V4)


def parse_replica(key: str, value: bytes) -> ReplicaRecord:
    """Raises StateError."""
    raw = load(key, value, V4)
    return build(ReplicaRecord, key, {**raw, "request": _parse_request(key, raw)})


def _parse_request(key: str, raw: Raw) -> QuorumRequest:
    request = part(key, raw, "request")
    if raw.get("profile"):
        return _joined(_UNKNOWN, build(Progress, key, request))
    built = build(QuorumRequest, key, request)
    check_data(key, built.data)
    return built


def digest_of_bytes(value: bytes) -> str:
    """What a head names a roster with these bytes by, and a request a profile."""
    return blake2b(value, digest_size=_DIGEST_BYTES).hexdigest()


_UNKNOWN: Final = Profile("", "", "", 0, "", ())
"""Stands for a profile that was left out."""


# The functions below run for each replica at each step.

profile_fields: Final[Callable[[Any], tuple[Any, ...]]] = attrgetter(*Profile.__dataclass_fields__)
"""What a Profile says, and the same of a QuorumRequest."""


def request_of(
    profile: Profile, step: int, shrink_only: bool, commit_failures: int, replica_id: str | None = None
) -> QuorumRequest:
    """The request of this profile, or of another replica with the rest of it, if `replica_id` is given."""
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
    return request_of(profile, *said)


def _progress(request: QuorumRequest) -> Progress:
    return Progress(request.replica_id, request.step, request.shrink_only, request.commit_failures)


def check_data(key: str, data: str) -> None:
    """Raises StateError naming the key, if what a replica wants others to know is no JSON object."""
    if problem := data_problem(data):
        raise StateError(key, f"has a request whose data is no JSON object: {problem}")


def data_problem(data: str) -> str:
    """Why torchft's clients could not read the data of a request; empty if they can. Empty data are none."""
    problem = json_problem(data)
    return problem or ("" if not data or data.lstrip().startswith("{") else "it must begin with {")
