"""What a group's decider sees, and the interface of its decisions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from ftcoord.core.verdict import Publish, Verdict, Wait
from ftcoord.errors import StateError
from ftcoord.etcd.api import KeyValue
from ftcoord.log_once import LogOnce

log = logging.getLogger(__name__)

DECIDE_AGAIN_AFTER: Final = 10.0
"""Seconds until a decider decides again that could not publish what it decided, if nothing changes before."""


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


class ReadBack:
    """Withholds a decision that no member could read: an unreadable record would stop the group until somebody deletes
    it. Not thread-safe. A problem is logged once, however often it occurs."""

    def __init__(self) -> None:
        self._log = LogOnce(log)

    def passed(self, published: Publish[bytes], read: Callable[[Publish[bytes]], object], now: float) -> Verdict[bytes]:
        """The decision; or a `Wait` instead, if `read`, which parses it as a member does, raises StateError."""
        try:
            read(published)
        except StateError as error:
            self._log.say(
                f"a decision was not published, since no member could read it: {error}. This is a bug in ftcoord:"
                " please report this line, with the log of this process at level DEBUG. The group waits until it can"
                " decide otherwise; restart this process to let another member decide.",
                logging.ERROR,
            )
            return Wait(f"a decision was withheld: no member could read it: {error}", now + DECIDE_AGAIN_AFTER)
        return published
