"""What a group's decider sees, and what it may decide: the words between `etcd.group` and its policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ftcoord.etcd.api import KeyValue, Span


@dataclass(frozen=True, slots=True)
class Publish:
    """A decision: the new record, and what to write and delete in the same transaction.

    `value` must differ from every value that was ever published before in this group.
    """

    value: bytes
    reason: str
    puts: Mapping[str, bytes] = field(default_factory=dict)
    deletes: Sequence[Span] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to decide yet: why, and the time (on the group's clock) at which to ask again whatever happens."""

    reason: str
    until: float | None = None


@dataclass(frozen=True, slots=True)
class View:
    """What the decider sees. All times are on its own clock, from when it saw the thing, never from another host.

    Args:
        members: the live members' keys, oldest first.
        seen: for each key, when its present value was first seen.
        changed_at: when any member last came, changed or went.
        decided: the decided record, also when its key has `vanished` from etcd since.
        decided_at: when it was first seen.
    """

    members: tuple[KeyValue, ...]
    seen: Mapping[str, float]
    changed_at: float
    decided: KeyValue | None
    decided_at: float
    vanished: bool


class Policy(Protocol):
    """The pure part: what to decide."""

    def decide(self, view: View, me: str, now: float) -> Publish | Wait: ...
