"""What a group's decider sees, and the interface of its decisions."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from ftcoord.core.asks import OpenAsk
from ftcoord.core.office import OfficeRecord
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
        decided: the decided record; None while etcd has none.
        decided_at: when it was first seen.
        read_at: when all members were last read. Values seen by that read may be arbitrarily old; values seen later had
            just been written.
        revision: etcd's revision up to which all members were seen.
        asks: what members ask that asked the decider itself, by member; see `Desk`.
        took_at: when this decider took the office.
    """

    members: tuple[KeyValue, ...]
    seen: Mapping[str, float]
    changed_at: float
    decided: KeyValue | None
    decided_at: float
    read_at: float
    revision: int = 0
    asks: Mapping[str, OpenAsk] = field(default_factory=dict)
    took_at: float = -math.inf


class Desk:
    """Where members ask the decider itself. This one is for groups whose members only write their keys: it has no port.

    One for each member, which may take the office at any time. For the group's thread.
    """

    has_port = False
    """Whether members may ask the decider itself: then they watch the decided record only while they do not."""
    changes = 0
    """How often that which is asked changed, or may have."""

    def open(self, key: str) -> str:
        """Listen, before the office is taken that is to have this key. Returns the address for `decider`; empty if
        nobody can ask here."""
        return ""

    def serve(self, wake: Callable[[], None]) -> None:
        """The office is taken: receive what is asked. `wake` is called on any thread when there is something new."""

    def close(self) -> None:
        """The office is lost, or another member was faster. Idempotent."""

    def office_is(self, office: OfficeRecord | None, revision: int, *, anew: bool) -> None:
        """Who decides, as this member's watch has it, since this revision of etcd. `anew`: this member has just joined,
        or etcd was restored (G5), so it counts whatever was known at a higher revision."""

    def has_all(self) -> bool:
        """Whether all that has arrived is in `asks`. If not, `wake` is called when it is, and then this is True once:
        nobody may be counted who has withdrawn or gone."""
        return True

    def catches_up(self, revision: int) -> float:
        """Until when to decide nothing by the members at this revision, since somebody asks that came after it."""
        return -math.inf

    def asks(self, alive: Collection[str], revision: int) -> Mapping[str, OpenAsk]:
        """What counts, if these are the members at this revision."""
        return {}

    def decided(self, record: KeyValue | None) -> None:
        """Answer whom this record answers; it is in etcd."""

    def waits(self, reason: str) -> None:
        """Nothing is decided, for this reason."""


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
