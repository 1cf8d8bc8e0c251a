"""What a use of the mechanism supplies: its keys and records, both halves of its protocol, and how long its calls wait.
docs/extending.md walks through one.

From top to bottom: the decider's half, `Policy`, with what it sees and what helps it; the member's half, `Use`; the
waiting of a call, `Pace`.
"""

from __future__ import annotations

import abc
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

from ftcoord import concurrency
from ftcoord.core import strict
from ftcoord.core.asks import OpenAsk
from ftcoord.core.office import OfficeRecord
from ftcoord.core.verdict import Outlook, Publish, Standing, Verdict, Wait
from ftcoord.errors import StateError
from ftcoord.etcd.api import KeyValue
from ftcoord.log_once import LogOnce

log = logging.getLogger(__name__)

R = TypeVar("R")
A = TypeVar("A")

DECIDE_AGAIN_AFTER: Final = 10.0
"""Seconds until a decider decides again that could not publish what it decided, if nothing changes before."""
SIGNAL_LATENCY: Final = 1.0
"""The most seconds until a call that waits on the main thread handles a signal."""


# -- the decider's half ------------------------------------------------------------------------------------------------


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


class Naming(Protocol):
    """What a member asks: it names numbers that the next decision counts on from."""

    @property
    def highest(self) -> int: ...


M = TypeVar("M", bound=Naming)


class ParsedKeys(Generic[M]):
    """The value of each member, as parsed by `parse(key, value)`. Members for which it raises StateError are kept
    apart, and so are those that name a number to which nobody has counted."""

    def __init__(self, parse: Callable[[str, bytes], M]) -> None:
        self._parse = parse
        self._known: dict[str, tuple[bytes, M | None]] = {}
        self.unreadable: Sequence[str] = ()
        """The keys of the members that could not be read in the last call of `of`: they are alive, but their asks are
        unknown."""

    def of(self, members: Sequence[KeyValue], highest: int = strict.LARGEST_COUNT) -> list[tuple[KeyValue, M]]:
        """The members that can be read, in the order given. `highest`: the highest number that is known here, for
        whoever counts on from theirs."""
        before, self._known, problems = self._known, {}, list[StateError]()
        for kv in members:
            known = before.get(kv.key)
            if known is None or known[0] != kv.value:
                known = kv.value, self._read(kv, highest, problems)
            self._known[kv.key] = known
        self.unreadable = [key for key, (_, parsed) in self._known.items() if parsed is None]
        if problems:  # one line, however many there are
            count = "a member counts" if len(problems) == 1 else f"{len(problems)} members count"
            log.warning("%s as alive, and as asking for nothing; the first problem: %s", count, problems[0])
        return [(kv, parsed) for kv in members if (parsed := self._known[kv.key][1]) is not None]

    def _read(self, kv: KeyValue, highest: int, problems: list[StateError]) -> M | None:
        try:
            parsed = self._parse(kv.key, kv.value)
            strict.check_step(kv.key, parsed.highest, highest, strict.LARGEST_STEP)
            return parsed
        except StateError as error:
            problems.append(error)
            return None


# -- the member's half -------------------------------------------------------------------------------------------------


class Asking(Protocol):
    """A member that asks the decider itself. Its methods may be called from any thread."""

    @property
    def id(self) -> str:
        """The member's id."""

    @property
    def since(self) -> int:
        """etcd's revision at which its key was created."""

    def answered(self, value: bytes, revision: int, lease: int) -> None:
        """A record was decided: its value in etcd, its revision, and the lease that it is attached to."""

    def gone(self) -> None:
        """Its key is gone (G5)."""


class Use(abc.ABC, Generic[R, A]):
    """One use, as one participant sees it: `R` is the decided record, `A` a member's ask. No I/O.

    `stamp` and `encode` are called by one thread at a time, the others by any.
    """

    @property
    @abc.abstractmethod
    def prefix(self) -> str:
        """The prefix of the group's keys."""

    @abc.abstractmethod
    def policy(self) -> Policy:
        """The decider's half, for a new member."""

    def desk(self) -> Desk:
        """Where a new member is asked when it decides, and learns who does."""
        return Desk()

    @abc.abstractmethod
    def parse(self, key: str, value: bytes) -> R:
        """Parse the decided record. Raises StateError."""

    def part_of(self, record: R, me: str) -> str | None:
        """The key beside the record that concerns the member `me`; None if everything about it is known. Called when
        its outlook says READ."""
        return None

    def with_part(self, record: R, me: str, part: KeyValue | None) -> R:
        """The record with that part; None if the part was deleted, because there is already another record. Raises
        StateError."""
        return record

    @abc.abstractmethod
    def stamp(self, ask: A) -> A:
        """The same ask, unlike all earlier asks of this participant."""

    @abc.abstractmethod
    def encode(self, ask: A) -> bytes:
        """The value of the member's key while it asks this."""

    def is_by_key(self, ask: A) -> bool:
        """Whether the member's key must have this ask: there is no other way to the decider now. Called right before it
        is written."""
        return True

    def resting(self, ask: A) -> A:
        """What the member's key has instead, while it asks this in another way."""
        return ask

    def call(self, ask: A, asking: Asking) -> bool:
        """Ask the decider itself, or again; False if the key must have this ask after all."""
        return False

    def nobody_asks(self) -> None:
        """Called when the last call has ended, for whatever reason: the last ask needs no answer any more. Must not
        block."""
        return

    def rank(self, record: R, me: Sequence[str]) -> int | None:
        """The place in a record of a participant that was these members; None without one, or if that is not known.
        Those with a place take a free office first, in this order."""
        return None

    @abc.abstractmethod
    def outlook(self, record: R | None, me: Sequence[str], ask: A) -> Outlook[A]:
        """The member's half: what the record means for a member with this ask.

        Args:
            me: the ids of all members that the participant has been, the present one last.
        """


# -- the waiting of a call ---------------------------------------------------------------------------------------------


def signals_at() -> float:
    """The monotonic time at which a waiting call must wake up for signals; infinity if it need not.

    A signal may come in the moment before a wait, and Python handles it when the wait ends. It runs handlers on the
    main thread only, so calls on other threads need not wake up.
    """
    return concurrency.now() + SIGNAL_LATENCY if concurrency.is_main_thread() else math.inf


@dataclass(frozen=True, slots=True)
class Look(Generic[R, A]):
    """Where a member stands: its standing, the record, and its ask."""

    standing: Standing
    record: R | None
    ask: A


class Pace(Protocol[R, A]):
    """How long one call waits, and what it does meanwhile."""

    @property
    def deadline(self) -> float:
        """The monotonic time at which writes are given up."""

    @property
    def gone(self) -> concurrency.Event:
        """Set when the caller has gone away: writes are then given up at once."""

    def see(self, look: Look[R, A]) -> Standing:
        """Note where the member stands, before anything is done about it. Called with a lock held: must not block.
        Returns PENDING for a standing that this call chooses to wait through, else the standing."""

    def wake_at(self, standing: Standing) -> float:
        """The monotonic time at which to call `tick`. Called with a lock held, before each wait."""

    def tick(self, look: Look[R, A]) -> None:
        """Do what is due from time to time. Raises the error that ends the call, such as TimeoutError."""
