"""What a group's decider sees, and who decides for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ftcoord.core.verdict import Verdict
from ftcoord.etcd.api import KeyValue


@dataclass(frozen=True, slots=True)
class View:
    """What the decider sees. All times are on its own clock, from when it saw the thing, never from another host.

    Args:
        members: the live members' keys, oldest first.
        seen: for each key, when its present value was first seen.
        changed_at: when any member last came, changed or went.
        decided: the decided record, also when its key has `vanished` from etcd since.
        decided_at: when it was first seen.
        read_at: when the members were last read as a whole. What was seen then may be older than that by any time; what
            was seen later had just been written.
        roster: what lies beside it, in a use that has a roster.
        departed: what those said last, by key, that were seen alive and are gone; not of very many.
        revision: etcd's, up to which all members were seen.
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


class Policy(Protocol):
    """The pure part: what to decide."""

    def decide(self, view: View, me: str, now: float) -> Verdict[bytes]:
        """What to do now. After a Wait this is not asked again before its `until`, unless the view has changed, nor
        after a decision that nothing follows: so a verdict must rest on nothing else that may change meanwhile, but for
        numbers that only grow."""
