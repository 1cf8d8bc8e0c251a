"""How members ask the decider itself instead of writing what they ask: which asks count, and what an asker does. Pure.

A step of a quorum needs one write then, that of the decision. What was decided is in etcd before anybody is answered,
so a connection may end at any time, and no answer is ever lost for good.

Rules of the decider
  A1 highest. Of a member's asks the one with the highest serial counts, until it is withdrawn or answered. An ask may
     come again, on another connection or in the next decider: it has the same serial, and is the same ask.
  A2 connections. Those of one process are numbered. What comes on an older one never replaces what came on a newer one,
     and the end of one withdraws the asks that came on it last, and no others.
  A3 mirror. An ask counts while the decider's copy of the members has its member. A copy that is older than the member
     keeps the ask, and nothing is decided by it for half a second: others may live that it lacks. In one that is not
     older the member is gone, and the asker joins again under another lease.
  A4 answered. The last record names for each live member the highest serial that was answered. An ask up to that is
     answered with the record, however often it comes, and by whichever decider.

Rules of the asker
  A5 again. It sends its open asks on each new connection.
  A6 silence. An open connection on which nothing comes is waited out: whoever cannot decide loses the office within a
     TTL. If the office outlives that, the connection is what fails.
  A7 by key. Without a proved connection for a second it asks by its key, and tries the port again every ten.

Times are monotonic seconds of the process that calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final, Generic, NamedTuple, TypeVar

from ftcoord.core.quorum_records import QuorumRequest, build_request
from ftcoord.core.strict import Count, Size, build, dump, load

BY_KEY_AFTER: Final = 1.0
"""Seconds without a proved connection after which an asker asks by key: a decider that is restarted is back before."""
TRIES_EVERY: Final = 0.1
"""Seconds from the loss of a connection, or a failure to make one, to the next try,"""
TRIES_LATER: Final = 10.0
"""and while it asks by key."""
CATCHES_UP: Final = 0.5
"""Seconds for which a decider waits until its copy of the members is as new as a member that asks."""
REPORTS_AFTER: Final = 0.2
"""Seconds until the decider reports to who has asked that it has no answer yet: a usual step needs no report."""
REPORTS_EVERY: Final = 1.0
_ASK: Final = "an ask"

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Ask:
    """What one member asks.

    Args:
        member: the member's id.
        since: etcd's revision at which its key was last written before.
        serial: the number of the request among the member's requests, 1, 2, ...
        heard, after: the highest number of a quorum, and the highest id, that it knows; 0 for none.
        request: what it asks.
    """

    member: str
    since: Size
    serial: Count
    heard: Count
    after: Count
    request: QuorumRequest

    @property
    def highest(self) -> int:
        """The highest number that it names."""
        return max(self.after, self.heard)


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """A member's ask with this serial, and all before it, need no answer."""

    member: str
    serial: Count


def encode_message(message: Ask | Withdrawal) -> bytes:
    """The payload of a frame."""
    return dump(message)


def parse_ask(payload: bytes) -> Ask:
    """Raises StateError."""
    raw = load(_ASK, payload)
    return build(Ask, _ASK, {**raw, "request": build_request(_ASK, raw)})


def parse_withdrawal(payload: bytes) -> Withdrawal:
    """Raises StateError."""
    return build(Withdrawal, _ASK, load(_ASK, payload))


# -- the decider -------------------------------------------------------------------------------------------------------


class Via(NamedTuple):
    """A connection: the process of the asker, and which of its connections this is, 1, 2, ..."""

    process: str
    number: int


@dataclass(slots=True)
class OpenAsk:
    """An ask as the decider has it.

    Args:
        ask: the ask.
        via: the connection that it came on last.
        first_at: when it came first.
        order: of all asks that came to this decider, the how manieth it was.
        seen_at: etcd's revision up to which the decider had seen the members when it came last,
        first_seen_at: and when it came first.
        is_open: whether an answer is wanted, as far as is known: False once withdrawn, or its connection ended.
    """

    ask: Ask
    via: Via
    first_at: float
    order: int
    seen_at: int
    first_seen_at: int
    is_open: bool = True


class AskBook:
    """The asks that one decider holds. Not thread-safe."""

    def __init__(self) -> None:
        self._held: dict[str, OpenAsk] = {}  # by member; those that are not open too, for their serials
        self._order = 0
        self._answered: Mapping[str, int] = {}
        self.changes = 0
        """How often it changed what counts, or may have."""

    def take(self, ask: Ask, via: Via, now: float, seen_at: int) -> bool:
        """An ask has come, while the decider had seen the members up to this revision. Returns whether the last record
        has answered it: then that is the answer."""
        if self._is_answered(ask):  # A4
            return True
        held = self._held.get(ask.member)
        self._order += 1
        new = OpenAsk(ask, via, now, self._order, seen_at, seen_at)
        if held is not None:
            if held.via.process == via.process and via.number < held.via.number:  # A2
                return False
            if ask.serial < held.ask.serial:  # A1
                return False
            if ask.serial == held.ask.serial:
                new.first_at, new.order, new.first_seen_at = held.first_at, held.order, held.first_seen_at
        self._held[ask.member] = new
        self.changes += 1
        return False

    def withdraw(self, one: Withdrawal) -> None:
        """What came before it counts no more. No copy of that comes later: a connection keeps the order, and what an
        older one still brings does not count (A2)."""
        held = self._held.get(one.member)
        if held is not None and held.ask.serial <= one.serial:
            held.is_open = False
            self.changes += 1

    def end(self, via: Via) -> None:
        """A connection has ended."""
        for held in self._held.values():
            if held.via == via:
                held.is_open = False
                self.changes += 1

    def answer(self, answered: Mapping[str, int]) -> list[Via]:
        """A record has answered these serials, by member. Returns the connections on which asks came that it answers:
        each gets the record once."""
        self._answered = answered
        found = dict[Via, None]()
        for held in self._held.values():
            if held.is_open and self._is_answered(held.ask):
                held.is_open = False
                found[held.via] = None
        return list(found)

    def lose(self, alive: Collection[str], seen_at: int) -> list[OpenAsk]:
        """Forget the members that are gone from a copy of all members at this revision; returns their open asks."""
        gone = [held for name, held in self._held.items() if name not in alive and held.ask.since <= seen_at]  # A3
        for held in gone:
            del self._held[held.ask.member]
        return [held for held in gone if held.is_open]

    def catches_up(self, seen_at: int) -> float:
        """Until when to wait for a newer copy of the members than that of this revision (A3); minus infinity: it is
        new enough."""
        ahead = (held.first_at for held in self._held.values() if held.is_open and held.ask.since > seen_at)
        return min(ahead, default=-inf) + CATCHES_UP

    def counting(self, alive: Collection[str]) -> dict[str, OpenAsk]:
        """The asks that count, by member."""
        return {name: held for name, held in self._held.items() if held.is_open and name in alive}

    def waiting(self) -> list[Via]:
        """The connections on which asks came that are not answered, each once."""
        return [*dict.fromkeys(held.via for held in self._held.values() if held.is_open)]

    def _is_answered(self, ask: Ask) -> bool:
        return ask.serial <= self._answered.get(ask.member, 0)


# -- the asker ---------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where the decider is asked: its host and port, and the key of its office, as 32 hexadecimal digits."""

    address: str
    key: str


class Connect(NamedTuple):
    """Connect to a place, as the process's connection with this number."""

    place: Place
    number: int


@dataclass
class Asker(Generic[C]):
    """What one process wants of the decider, for all of its members. Not thread-safe.

    `C` is a caller, by which it is known here; it has one ask at a time. Whoever is told to ask by key has no
    ask here any more.

    Args:
        patience: seconds for which an open connection may bring nothing while somebody waits: longer than an office
            outlives the moment from which its decider cannot decide.
    """

    patience: float
    place: Place | None = None
    number: int = 0
    """Of the last connection."""
    is_proved: bool = False
    """Whether that one stands, and both ends have proved themselves."""
    is_by_key: bool = False
    """Whether callers ask by key for now."""
    asks: dict[C, Ask] = field(default_factory=dict)
    _is_connecting: bool = False
    _fails_since: float = inf
    """Since when asks wait for a connection on which something comes; infinite while none does."""
    _tries_at: float = -inf
    _came_at: float = -inf
    """When something came last, or was first waited for."""

    def decides_at(self, place: Place | None, now: float) -> list[C]:
        """Another decider is in office, or none; an empty address: one without a port. Returns the callers that must
        ask by key."""
        self.place = place
        self.is_proved = self._is_connecting = self.is_by_key = False
        self._tries_at, self._fails_since = -inf, now if self.asks and place else inf
        if place is not None and not place.address:
            return self._give_up()
        return []

    def begin(self, caller: C, ask: Ask, now: float) -> bool:
        """A caller asks, or asks again. Returns whether its ask is to be sent now; not while it has to ask by key."""
        if not self.asks:
            self._came_at = now
            if self.place is not None and not self.is_proved:
                self._fails_since = now
        self.asks[caller] = ask
        return self.is_proved

    def end(self, caller: C) -> Ask | None:
        """A caller asks no more. Returns what is to be withdrawn, if the decider may have it."""
        ask = self.asks.pop(caller, None)
        if not self.asks:
            self._fails_since = inf
        return ask if self.is_proved else None

    def next(self, now: float) -> Connect | list[C] | float:
        """What is due: to connect; to tell these callers to ask by key (A7); or to call this again, at this time at the
        latest."""
        if self.asks and not self.is_proved and now >= self._fails_since + BY_KEY_AFTER:
            return self._give_up()
        if self.is_proved or self._is_connecting or self.place is None or not self.place.address:
            return inf
        if not (self.asks or self.is_by_key):
            return inf
        if now < self._tries_at:
            return min(self._tries_at, self._fails_since + BY_KEY_AFTER)
        self.number += 1
        self._is_connecting = True
        return Connect(self.place, self.number)

    def proved(self, number: int, now: float) -> list[Ask] | None:
        """A connection stands: send these asks on it (A5). None if it is of no use any more."""
        if number != self.number or not self._is_connecting:
            return None
        self._is_connecting, self.is_proved, self.is_by_key = False, True, False
        self._came_at = now
        return list(self.asks.values())

    def lost(self, number: int, now: float) -> None:
        """A connection has ended, or could not be made."""
        if number != self.number or not (self._is_connecting or self.is_proved):
            return
        self._is_connecting = self.is_proved = False
        self._tries_at = now + (TRIES_LATER if self.is_by_key else TRIES_EVERY)
        if self.asks and self._fails_since == inf:
            self._fails_since = now

    def is_silent(self, now: float) -> bool:
        """Whether the connection brings nothing for too long (A6): close it."""
        return bool(self.asks) and self.is_proved and now >= self._came_at + self.patience

    def came(self, now: float) -> None:
        """Something has come on the connection: only then does it count as one that works."""
        self._fails_since, self._came_at = inf, now

    def answered(self, is_answered: Callable[[Ask], bool]) -> list[C]:
        """Something has come that ends these asks. Returns their callers."""
        found = [caller for caller, ask in self.asks.items() if is_answered(ask)]
        for caller in found:
            self.end(caller)
        return found

    def _give_up(self) -> list[C]:
        told = list(self.asks)
        self.asks.clear()
        self.is_by_key, self._fails_since = True, inf
        return told
