"""The keys of one job, as they were at one revision of etcd, and which of its members' records count. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

from ftcoord.core import layout
from ftcoord.core.death_records import causes_in
from ftcoord.core.quorum_records import ReplicaRecord
from ftcoord.core.rendezvous_records import JoinRequest
from ftcoord.core.strict import LARGEST_DECIDED_STEP, LARGEST_STEP, check_step
from ftcoord.errors import StateError
from ftcoord.etcd.api import KeyValue, is_member
from ftcoord.operator.report import Unreadable

R = TypeVar("R", JoinRequest, ReplicaRecord)


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
        roll: the rolls beside it, in large rounds, by key.
        below_members: all keys there, oldest first, including those that are not members'.
        deaths: the keys with members' causes of death.
        events: its history, on which no status depends; empty if it was not asked for.
    """

    prefix: str
    decided: KeyValue | None = None
    roster: KeyValue | None = None
    roll: Mapping[str, KeyValue] = field(default_factory=dict)
    below_members: tuple[KeyValue, ...] = ()
    deaths: tuple[KeyValue, ...] = ()
    events: tuple[KeyValue, ...] = ()

    @classmethod
    def of(cls, prefix: str, kvs: Mapping[str, KeyValue]) -> GroupKeys:
        """Those of these keys that are the group's."""

        def below(span: layout.Span) -> list[KeyValue]:
            return [kv for key, kv in kvs.items() if key in span]

        head = layout.decided_key(prefix)
        return cls(
            prefix,
            decided=kvs.get(head),
            roster=kvs.get(layout.roster_key(head)),
            roll={kv.key: kv for kv in below(layout.rolls_span(prefix))},
            below_members=tuple(sorted(below(layout.members_span(prefix)), key=attrgetter("create_revision"))),
            deaths=tuple(below(layout.deaths_span(prefix))),
            events=tuple(below(layout.events_span(prefix))),
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is no such group, and was none in the last hour."""
        return self.decided is None and self.roster is None and not self.below_members and not self.deaths

    def members(self) -> list[KeyValue]:
        """The members' keys, oldest first."""
        return [kv for kv in self.below_members if is_member(kv)]

    def causes(self) -> dict[str, str]:
        """Why members died, by id, if a cause is known; the one that was written last is the last one."""
        deaths = sorted(self.deaths, key=attrgetter("mod_revision"))
        known = causes_in((kv.key, kv.value, kv.create_revision) for kv in deaths)
        return {member: one.cause for member, one in known.items()}


class Members(Generic[R]):
    """The records of a group's members.

    Attributes:
        live: the keys and records that count, oldest first.
        odd: the keys that do not count, and why.
        unread: the ids of the live members among those.
    """

    def __init__(self, keys: GroupKeys, parse: Callable[[str, bytes], R]) -> None:
        self.live: list[tuple[KeyValue, R]] = []
        self.odd, self.unread = list[Unreadable](), set[str]()
        for kv in keys.below_members:
            try:
                if is_member(kv):
                    self.live.append((kv, parse(kv.key, kv.value)))
                else:
                    self.odd.append(Unreadable(kv.key, "is not under the lease of its name, so it is no member's key"))
            except StateError as error:
                self._refuse(kv, error)

    def check_numbers(self, decided: KeyValue | None, number: int) -> None:
        """Exclude members that name a number to which nobody has counted.

        Raises StateError if the members do not count on from the decided `number`. The lowest number that they name is
        compared: a stranger's record may name any.
        """
        known = min((record.highest for _, record in self.live), default=number)
        if decided is not None:
            check_step(decided.key, number, known, LARGEST_DECIDED_STEP)
        found, self.live = self.live, []
        for kv, record in found:
            try:
                check_step(kv.key, record.highest, max(number, known), LARGEST_STEP)
                self.live.append((kv, record))
            except StateError as error:
                self._refuse(kv, error)

    def _refuse(self, kv: KeyValue, error: StateError) -> None:
        self.odd.append(Unreadable(kv.key, str(error)))
        self.unread.add(layout.member_of(kv.key))


@dataclass(frozen=True, slots=True)
class JobKeys:
    """Everything that the status of a job depends on.

    Args:
        job: its id.
        revision: etcd's revision at which all of it was read.
        rounds, quorum: its two groups.
        exists: whether etcd has keys of the job.
        timers: the keys of its expiration timers; empty if they were not asked for.
    """

    job: str
    revision: int
    rounds: GroupKeys
    quorum: GroupKeys
    exists: bool
    timers: tuple[KeyValue, ...] = ()

    @classmethod
    def of(
        cls, key_prefix: str, job: str, found: Iterable[KeyValue], *, revision: int, exists: bool = False
    ) -> JobKeys:
        """Those of these keys that are the job's; `exists` if it may have others too, such as a store's."""
        prefix, quorum = layout.run_prefix(key_prefix, job), layout.quorum_prefix(key_prefix, job)
        kvs, span = {kv.key: kv for kv in found}, layout.timers_span(prefix)
        groups = GroupKeys.of(prefix, kvs), GroupKeys.of(quorum, kvs)
        timers = tuple(kv for key, kv in kvs.items() if key in span)
        return cls(job, revision, *groups, exists or not all(group.is_empty for group in groups), timers)


def spans_of(key_prefix: str, job: str, *, with_history: bool = False) -> tuple[layout.Span, ...]:
    """The keys that a job's status depends on, but for its timers; and those of its history."""
    prefix, quorum = layout.run_prefix(key_prefix, job), layout.quorum_prefix(key_prefix, job)
    kinds = [layout.decided_span, layout.members_span, layout.deaths_span, *[layout.events_span] * with_history]
    return (layout.rolls_span(prefix), *(kind(group) for group in (prefix, quorum) for kind in kinds))
