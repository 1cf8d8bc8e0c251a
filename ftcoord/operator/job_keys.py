"""The keys of one job, as they were at one revision of etcd."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ftcoord.core.death_records import parse_death
from ftcoord.core.layout import member_of
from ftcoord.core.rendezvous_records import RoundHead, parse_decided
from ftcoord.errors import StateError
from ftcoord.etcd.api import KeyValue, is_member
from ftcoord.operator.told import Unreadable


@dataclass(frozen=True, slots=True)
class LeaseTime:
    """Whole seconds that a lease has left, and that it was granted."""

    left: int
    ttl: int


@dataclass(frozen=True, slots=True)
class GroupKeys:
    """What a group of members has in etcd.

    Args:
        prefix: the group's.
        decided: its decided record; None without one.
        roster: what lies beside it, in quorums.
        roll: what lies beside it, in large rounds, by key.
        below_members: all keys there, oldest first, also those that are no members'.
        deaths: why members are gone, as keys.
        events: its history, which no status rests on; None where that was not asked for.
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
        """Whether there is no such group."""
        return self.decided is None and self.roster is None and not self.below_members

    @property
    def roll_name(self) -> str | None:
        """The roll that lies beside the decided record; None if none does, or the record is not readable."""
        try:
            record = parse_decided(self.decided.key, self.decided.value) if self.decided else None
        except StateError:
            return None
        return record.roll if isinstance(record, RoundHead) else None

    def members(self) -> list[KeyValue]:
        """The members' keys, oldest first."""
        return [kv for kv in self.below_members if is_member(kv)]

    def strangers(self) -> list[Unreadable]:
        """The keys among the members that are none."""
        problem = "does not lie under the lease that it is named for, so it is no member's"
        return [Unreadable(kv.key, problem) for kv in self.below_members if not is_member(kv)]

    def causes(self) -> dict[str, str]:
        """Why members are gone, by their ids, as far as somebody has said so."""
        found = {}
        for kv in self.deaths:
            try:
                found[member_of(kv.key)] = parse_death(kv.key, kv.value).cause
            except StateError:
                continue  # nothing depends on it but a text
        return {member: cause for member, cause in found.items() if cause}


@dataclass(frozen=True, slots=True)
class JobKeys:
    """All that the status of a job rests on.

    Args:
        job: its id.
        revision: of etcd, at which all of it was read.
        rounds, quorum: its two groups.
        others: how many keys the job has in all, but for its history, which outlives it.
        timers: the keys of its expiration timers; empty where they were not asked for.
    """

    job: str
    revision: int
    rounds: GroupKeys
    quorum: GroupKeys
    others: int
    timers: tuple[KeyValue, ...] = ()

    @property
    def exists(self) -> bool:
        """Whether etcd knows the job."""
        return self.others > 0
