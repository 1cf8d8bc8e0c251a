"""The keys of one job, as they were at one revision of etcd."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Protocol, TypeVar

from ftcoord.core.death_records import causes_in
from ftcoord.core.layout import (
    Span,
    deaths_span,
    decided_key,
    decided_span,
    member_of,
    members_span,
    quorum_prefix,
    roll_span,
    rolls_span,
    roster_key,
    run_prefix,
)
from ftcoord.core.rendezvous_records import RoundHead, parse_decided
from ftcoord.core.strict import LARGEST_DECIDED_STEP, LARGEST_STEP, check_step
from ftcoord.errors import StateError
from ftcoord.etcd.api import KeyValue, is_member
from ftcoord.operator.told import Unreadable

T = TypeVar("T")


class Counting(Protocol):
    """A member's record, as it was read: its key, and the highest number that it names."""

    @property
    def key(self) -> str: ...

    @property
    def highest(self) -> int: ...


C = TypeVar("C", bound=Counting)


@dataclass(frozen=True, slots=True)
class LeaseTime:
    """Whole seconds that a lease has left, and its granted TTL."""

    left: int
    ttl: int


@dataclass(frozen=True, slots=True)
class GroupKeys:
    """The keys of a group of members in etcd.

    Args:
        prefix: the group's prefix.
        decided: its decided record; None without one.
        roster: the roster beside it, in quorums.
        roll: the roll beside it, in large rounds, by key.
        below_members: all keys there, oldest first, including those that are not members'.
        deaths: the keys with members' causes of death.
        events: its history, on which no status depends; None if it was not asked for.
    """

    prefix: str
    decided: KeyValue | None = None
    roster: KeyValue | None = None
    roll: Mapping[str, KeyValue] = field(default_factory=dict)
    below_members: tuple[KeyValue, ...] = ()
    deaths: tuple[KeyValue, ...] = ()
    events: tuple[KeyValue, ...] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is no such group, and was none in the last hour."""
        return self.decided is None and self.roster is None and not self.below_members and not self.deaths

    @property
    def roll_name(self) -> str | None:
        """The roll beside the decided record; None if there is none, or the record cannot be read."""
        try:
            record = parse_decided(self.decided.key, self.decided.value) if self.decided else None
        except StateError:
            return None
        return record.roll if isinstance(record, RoundHead) else None

    def members(self) -> list[KeyValue]:
        """The members' keys, oldest first."""
        return [kv for kv in self.below_members if is_member(kv)]

    def counted(self, number: int, members: Sequence[C]) -> tuple[list[C], list[OddKey]]:
        """The members that a decider counts, and those that name a number to which nobody has counted.

        Raises StateError if the members do not count on from the decided `number`. The lowest number that they name is
        compared: a stranger's record may name any.
        """
        known = min((one.highest for one in members), default=number)
        if self.decided is not None:
            check_step(self.decided.key, number, known, LARGEST_DECIDED_STEP)
        return by_kind(_counted(one, max(number, known)) for one in members)

    def causes(self) -> dict[str, str]:
        """Why members died, by id, if a cause is known."""
        known = causes_in((kv.key, kv.value, kv.create_revision) for kv in self.deaths)
        return {member: one.cause for member, one in known.items()}

    def with_last_death(self, reason: str) -> str:
        """The reason why nothing is decided, and how the last member ended where there was no decision yet."""
        causes = self.causes()
        dead = [kv for kv in self.deaths if member_of(kv.key) in causes]
        if self.decided is not None or self.below_members or not dead:
            return reason
        last = max(dead, key=attrgetter("mod_revision"))
        return f"nobody is there; the last member ended before there was a decision: {causes[member_of(last.key)]}"


@dataclass(frozen=True, slots=True)
class OddKey:
    """A key below `members/` that does not count. `member` is the id of its live member; empty for a stranger's key."""

    told: Unreadable
    member: str


def read_member(kv: KeyValue, parse: Callable[[str, bytes], T]) -> T | OddKey:
    """The parsed value of a member's key; an OddKey if it is no member's, or if `parse` raises StateError."""
    if not is_member(kv):
        return OddKey(Unreadable(kv.key, "does not lie under the lease that it is named for, so it is no member's"), "")
    try:
        return parse(kv.key, kv.value)
    except StateError as error:
        return OddKey(Unreadable(kv.key, str(error)), member_of(kv.key))


def _counted(one: C, known: int) -> C | OddKey:
    try:
        check_step(one.key, one.highest, known, LARGEST_STEP)
    except StateError as error:
        return OddKey(Unreadable(one.key, str(error)), member_of(one.key))
    return one


def by_kind(found: Iterable[T | OddKey]) -> tuple[list[T], list[OddKey]]:
    """The parsed values, in order; and the odd keys, those of strangers first."""
    read, odd = list[T](), list[OddKey]()
    for one in found:
        if isinstance(one, OddKey):
            odd.append(one)
        else:
            read.append(one)
    return read, sorted(odd, key=lambda one: bool(one.member))


@dataclass(frozen=True, slots=True)
class JobKeys:
    """Everything that the status of a job depends on.

    Args:
        job: its id.
        revision: etcd's revision at which all of it was read.
        rounds, quorum: its two groups.
        others: how many keys the job has in all.
        timers: the keys of its expiration timers; empty if they were not asked for.
    """

    job: str
    revision: int
    rounds: GroupKeys
    quorum: GroupKeys
    others: int
    timers: tuple[KeyValue, ...] = ()

    @property
    def exists(self) -> bool:
        """Whether etcd has keys of the job."""
        return self.others > 0


def spans_of(key_prefix: str, job: str) -> tuple[Span, ...]:
    """What `keys_of` needs, in its order."""
    prefix, quorum = run_prefix(key_prefix, job), quorum_prefix(key_prefix, job)
    return (
        Span(decided_key(prefix)),
        rolls_span(prefix),
        members_span(prefix),
        deaths_span(prefix),
        decided_span(quorum),
        members_span(quorum),
        deaths_span(quorum),
    )


def keys_of(
    key_prefix: str,
    job: str,
    found: Sequence[Iterable[KeyValue]],
    *,
    revision: int,
    others: int,
    timers: Iterable[KeyValue] = (),
    events: tuple[tuple[KeyValue, ...] | None, tuple[KeyValue, ...] | None] = (None, None),
) -> JobKeys:
    """A job's keys: `found` has those of each span of `spans_of`."""
    prefix, quorum = run_prefix(key_prefix, job), quorum_prefix(key_prefix, job)
    decided, rolls, members, deaths, heads, replicas, replica_deaths = found
    rounds = GroupKeys(
        prefix,
        next(iter(decided), None),
        below_members=_by_age(members),
        deaths=tuple(deaths),
        events=events[0],
    )
    if (roll := rounds.roll_name) is not None:
        chunks = roll_span(prefix, roll)
        rounds = replace(rounds, roll={kv.key: kv for kv in rolls if kv.key in chunks})
    head = decided_key(quorum)
    by_key = {kv.key: kv for kv in heads}
    quorums = GroupKeys(
        quorum,
        by_key.get(head),
        by_key.get(roster_key(head)),
        below_members=_by_age(replicas),
        deaths=tuple(replica_deaths),
        events=events[1],
    )
    return JobKeys(job, revision, rounds, quorums, others, tuple(timers))


def _by_age(kvs: Iterable[KeyValue]) -> tuple[KeyValue, ...]:
    return tuple(sorted(kvs, key=attrgetter("create_revision")))
