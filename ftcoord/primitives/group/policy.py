"""What a group's decider sees, and the interface of its decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ftcoord.core.verdict import Verdict
from ftcoord.etcd.api import KeyValue


@dataclass(frozen=True, slots=True)
class View:
    """What the decider sees. All times are on its own clock, from when it saw the change, never from another host.

    Args:
        members: the live members' keys, oldest first.
        seen: for each key, when its present value was first seen.
        changed_at: when a member last came, changed or went.
        decided: the decided record, even if its key has `vanished` from etcd since.
        decided_at: when it was first seen.
        read_at: when all members were last read. Values seen by that read may be arbitrarily old; values seen later had
            just been written.
        roster: the roster of the record, in a use that has one.
        departed: the last values, by key, of members that were seen alive and are gone; of a limited number.
        revision: etcd's revision up to which all members were seen.
        missing_at: etcd's revision at which it had no decided record; 0 while it has one.
        has_era: whether a record was ever decided, as far as etcd tells; only in a use that has a roster.
    """

    members: tuple[KeyValue, ...]
    seen: Mapping[str, float]
    changed_at: float
    decided: KeyValue | None
    decided_at: float
    vanished: bool
    read_at: float
    roster: KeyValue | None = None
    departed: Mapping[str, KeyValue] = field(default_factory=dict)
    revision: int = 0
    missing_at: int = 0
    has_era: bool = False


class Policy(Protocol):
    """The pure part: what to decide."""

    def decide(self, view: View, me: str, now: float) -> Verdict[bytes]:
        """What to do now. After a Wait it is not called again before `until` unless the view has changed; nor after a
        decision that nothing follows. So a verdict must depend on nothing else that may change meanwhile, except
        numbers that only grow."""
