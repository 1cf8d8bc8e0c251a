"""A small world of replicas that ask deciders over connections: the real `Asker` and `AskBook`, and all between them
that may be late or lost. Answers go with their connection; offices and leases end, and who lost one learns it later."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Final

from exploring import explore
from invariants import InvariantBroken

from ftcoord.core.asks import Ask, AskBook, Asker, Connect, Place, Via, Withdrawal
from ftcoord.core.quorum_records import QuorumRequest

REQUEST: Final = QuorumRequest("r", "", "", 0, 1, False, "", 0, ())
TRIES, GIVES_UP = 0.5, 2.0
"""Seconds on an asker's clock: when it tries to connect again, and when it asks by key."""


class Member:
    """A process with one replica."""

    def __init__(self) -> None:
        self.asker = Asker[str](patience=6.0)
        self.serial, self.waits, self.may_ask = 0, False, False
        self.ids: tuple[str, ...] = ()
        """Of the members that it was, the present one last."""
        self.since = 1
        self.term = 0
        """The office that its watch shows."""
        self.received: list[tuple[str, str | Mapping[str, int]]] = []
        """What is on its way to it, on its present connection."""


class Decider:
    """Who took the office in one term."""

    def __init__(self, answered: Mapping[str, int], seen: int) -> None:
        self.book = AskBook()
        self.seen = seen
        """etcd's revision up to which it has seen the members."""
        self.book.answer(answered)
        self.arriving: dict[Via, list[Ask | Withdrawal | None]] = {}
        """What is on its way to it, by connection; None is a connection's end."""

    def copy(self) -> Decider:
        """Another one like it."""
        new = copy.copy(self)
        new.book = copy.copy(self.book)
        new.book._held = {name: copy.copy(one) for name, one in self.book._held.items()}
        new.arriving = {via: list(frames) for via, frames in self.arriving.items()}
        return new


class World:
    """One state."""

    def __init__(self, members: int, asks: int, breaks: int, terms: int, give_ups: int, leases: int) -> None:
        self.members = {name: Member() for name in "abc"[:members]}
        self.keys = dict.fromkeys(self.members, 0)
        """The serial that each member's key asks; 0 for none."""
        self.writes = dict.fromkeys(self.members, 0)
        """How often each member's key was written; an `Ask` has it as `heard`, instead of a revision."""
        self.alive = [frozenset[str](), frozenset(self.members)]
        """The members at each revision of etcd."""
        for name, member in self.members.items():
            member.ids = (name,)
        self.asks, self.breaks, self.terms, self.give_ups, self.leases = asks, breaks, terms, give_ups, leases
        """How many asks a member makes, and how often each fault happens."""
        self.answered: dict[str, int] = {}
        self.seated: set[tuple[str, int]] = set()
        """All asks that a decision has answered."""
        self.withdrawn: set[tuple[str, int]] = set()
        """Withdrawals that a decider has read, or that are in a key."""
        self.deciders = [Decider({}, 1)]

    def shape(self) -> Hashable:
        """All that matters of it."""
        return (
            tuple(
                (m.serial, m.waits, m.may_ask, m.ids, m.term, repr(m.received), repr(_plain(m.asker)))
                for m in self.members.values()
            ),
            tuple(self.keys.items()),
            tuple(self.writes.items()),
            (self.breaks, self.terms, self.give_ups, self.leases, len(self.deciders), tuple(self.alive)),
            tuple(sorted(self.answered.items())),
            frozenset(self.withdrawn),
            tuple(
                (
                    one.seen,
                    repr({via: frames for via, frames in one.arriving.items() if frames}),
                    repr(
                        [(h.ask.member, h.ask.serial, h.ask.heard, h.via, h.is_open) for h in one.book._held.values()]
                    ),
                )
                for one in self.deciders
            ),
        )

    def copy(self) -> World:
        """Another one like it."""
        new = copy.copy(self)
        new.members = {name: copy.copy(one) for name, one in self.members.items()}
        for one in new.members.values():
            one.asker, one.received = _copied(one.asker), list(one.received)
        new.keys, new.writes = dict(self.keys), dict(self.writes)
        new.seated, new.withdrawn = set(self.seated), set(self.withdrawn)
        new.deciders = [one.copy() for one in self.deciders]
        return new

    # -- what may happen -----------------------------------------------------------------------------------------------

    def events(self) -> Iterator[tuple[str, World]]:
        """What may happen next, and where it leads."""
        for name, act in self.choices():
            after = self.copy()
            act(after)
            yield name, after

    def choices(self) -> Iterator[tuple[str, Callable[[World], None]]]:
        """What may happen next."""
        for name, member in self.members.items():
            if not member.waits and member.serial < self.asks:
                yield f"{name} asks", lambda w, n=name: w.ask(n)
            if self.leases:
                yield f"{name} loses its lease", lambda w, n=name: w.lose_lease(n)
            if member.waits and self.give_ups:
                yield f"{name} gives up", lambda w, n=name: w.give_up(n)
            if member.term < len(self.deciders):
                yield f"{name} sees the office", lambda w, n=name: w.see(n)
            if isinstance(_copied(member.asker).next(TRIES), Connect):
                yield f"{name} connects", lambda w, n=name: w.connect(n)
                if self.breaks:
                    yield f"{name} is refused", lambda w, n=name: w.refuse(n)
            if isinstance(_copied(member.asker).next(GIVES_UP), list):
                yield f"{name} asks by key", lambda w, n=name: w.by_key(n)
            if member.asker.is_proved and self.breaks:
                for lost in (False, True):
                    yield f"{name}'s connection ends, {lost=}", lambda w, n=name, lo=lost: w.cut(n, lo)
            if member.may_ask and member.waits and self._is_answered(member, self.answered):
                yield f"{name} sees the record", lambda w, n=name: w.see_record(n)
            if member.received:
                yield f"{name} receives", lambda w, n=name: w.receive(n)
        for term, decider in enumerate(self.deciders, 1):
            if decider.seen < len(self.alive) - 1:
                yield f"{term} sees the members", lambda w, t=term: w.see_members(t)
            for via in decider.arriving:
                if decider.arriving[via]:
                    yield f"{term} reads of {via}", lambda w, t=term, v=via: w.read(t, v)
        if self.counting(self.deciders[-1]):
            yield "decides", World.decide
        if self.terms:
            yield "the office ends", World.end_office

    def ask(self, name: str) -> None:
        member = self.members[name]
        member.serial, member.waits = member.serial + 1, True
        self._put(name)

    def _put(self, name: str) -> None:
        """As `Participant._put`: one way at a time."""
        member = self.members[name]
        if member.asker.is_by_key:
            self._write(member, member.serial)
            return
        if member.may_ask:
            self._write(member, 0)
        ask = self._ask_of(name)
        if member.asker.begin(name, ask, 0.0):
            self._send(name, ask)

    def _write(self, member: Member, serial: int) -> None:
        self.keys[member.ids[-1]], member.may_ask = serial, serial > 0
        self.writes[member.ids[-1]] += 1

    def _ask_of(self, name: str) -> Ask:
        member = self.members[name]
        return Ask(member.ids[-1], member.since, member.serial, self.writes[member.ids[-1]], 0, REQUEST)

    def lose_lease(self, name: str) -> None:
        """It joins again at once, and asks the same."""
        self.leases -= 1
        member = self.members[name]
        gone, new = member.ids[-1], f"{name}{len(member.ids)}"
        self.keys.pop(gone)
        self.keys[new], self.writes[new], member.may_ask = 0, 0, False
        left = self.alive[-1] - {gone}
        self.alive = [*self.alive, left, left | {new}]
        member.ids, member.since = (*member.ids, new), len(self.alive) - 1
        if member.waits:
            self._put(name)

    def see_members(self, term: int) -> None:
        decider = self.deciders[term - 1]
        decider.seen += 1
        for one in decider.book.lose(self.alive[decider.seen], decider.seen):
            self._deliver(term, one.via, "G", one.ask.member)

    def _send(self, name: str, what: Ask | Withdrawal) -> None:
        member = self.members[name]
        if (arriving := self.deciders[member.term - 1].arriving.get(Via(name, member.asker.number))) is not None:
            arriving.append(what)

    def give_up(self, name: str) -> None:
        self.give_ups -= 1
        member = self.members[name]
        member.waits = False
        if member.may_ask:
            self._write(member, 0)
            self.withdrawn.add((member.ids[-1], member.serial))
        if (ask := member.asker.end(name)) is not None:
            self._send(name, Withdrawal(ask.member, ask.serial))

    def see(self, name: str) -> None:
        member = self.members[name]
        self._hang_up(name, lost=False)
        member.term = len(self.deciders)
        member.asker.decides_at(Place(f"h:{member.term}", "00"), 0.0)

    def connect(self, name: str) -> None:
        asker, decider = self.members[name].asker, self.deciders[self.members[name].term - 1]
        due = asker.next(TRIES)
        assert isinstance(due, Connect)
        decider.arriving[Via(name, due.number)] = []
        for ask in asker.proved(due.number, 0.0) or []:
            self._send(name, ask)

    def refuse(self, name: str) -> None:
        self.breaks -= 1
        asker = self.members[name].asker
        due = asker.next(TRIES)
        assert isinstance(due, Connect)
        asker.lost(due.number, 0.0)

    def by_key(self, name: str) -> None:
        told = self.members[name].asker.next(GIVES_UP)
        assert told == [name]
        self._put(name)

    def cut(self, name: str, lost: bool) -> None:
        self.breaks -= 1
        self._hang_up(name, lost=lost)
        asker = self.members[name].asker
        asker.lost(asker.number, 0.0)

    def _hang_up(self, name: str, *, lost: bool) -> None:
        """The connection ends; what is on its way to the decider may be lost."""
        member = self.members[name]
        member.received = []
        if member.term and member.asker.is_proved:
            arriving = self.deciders[member.term - 1].arriving[Via(name, member.asker.number)]
            arriving[:] = [None] if lost else [*arriving, None]

    def receive(self, name: str) -> None:
        member = self.members[name]
        kind, what = member.received.pop(0)
        if kind == "G":  # of its former member: it has joined again at once
            assert what != member.ids[-1], "the decider has not seen a member, though it has seen later ones"
            return
        assert isinstance(what, Mapping)
        member.asker.answered(lambda ask: what.get(ask.member, 0) >= ask.serial)
        self._tell(name, what)

    def see_record(self, name: str) -> None:
        """By its watch, which it has while it asks by key."""
        self._tell(name, self.answered)

    def _tell(self, name: str, what: Mapping[str, int]) -> None:
        member = self.members[name]
        if member.waits and self._is_answered(member, what):
            member.waits = False
            member.asker.end(name)

    @staticmethod
    def _is_answered(member: Member, answered: Mapping[str, int]) -> bool:
        return any(answered.get(one, 0) >= member.serial for one in member.ids)

    def read(self, term: int, via: Via) -> None:
        decider = self.deciders[term - 1]
        frame = decider.arriving[via].pop(0)
        if frame is None:
            decider.book.end(via)
        elif isinstance(frame, Withdrawal):
            decider.book.withdraw(frame)
            self.withdrawn.add((frame.member, frame.serial))
        elif decider.book.take(frame, via, 0.0, 1):
            self._answer(term, via)

    def counting(self, decider: Decider) -> dict[str, int]:
        """The serials that count, by member: by port or by key, whatever was asked last."""
        alive = self.alive[decider.seen]
        if decider.book.catches_up(decider.seen) > 0.0:
            return {}
        found = {
            one: serial for one, serial in self.keys.items() if one in alive and serial > self.answered.get(one, 0)
        }
        for name, one in decider.book.counting(alive).items():
            if one.ask.heard < self.writes[name]:  # by its key it has asked, or withdrawn, since then
                continue
            found[name] = max(one.ask.serial, found.get(name, 0))
        return found if len({name[0] for name in found}) >= 2 else {}

    def decide(self) -> None:
        decider = self.deciders[-1]
        counting = self.counting(decider)
        for one in counting.items():
            if one in self.seated:
                raise InvariantBroken(f"two decisions answer {one}")
            if one in self.withdrawn:
                raise InvariantBroken(f"{one} is answered, and was withdrawn")
            if one[1] > self.members[one[0][0]].serial:
                raise InvariantBroken(f"{one} was never asked")
        self.seated |= counting.items()
        self.answered = {**self.answered, **counting}
        for via in decider.book.answer(self.answered):
            self._answer(len(self.deciders), via)

    def _answer(self, term: int, via: Via) -> None:
        self._deliver(term, via, "Q", dict(self.answered))

    def _deliver(self, term: int, via: Via, kind: str, what: str | Mapping[str, int]) -> None:
        """If the connection still stands: else nobody reads it."""
        member = self.members[via.process]
        if member.term == term and member.asker.is_proved and member.asker.number == via.number:
            member.received.append((kind, what))

    def end_office(self) -> None:
        """Its decider may live on, and does not know yet; the next one reads the record first."""
        self.terms -= 1
        self.deciders.append(Decider(self.answered, len(self.alive) - 1))

    # -- what must be so -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """When nothing fails any more, all that wait are answered, where two wait: none is forgotten."""
        after = self.copy()
        after.breaks = after.terms = after.give_ups = after.asks = after.leases = 0
        for _ in range(200):
            if not after._goes_on():
                break
        waiting = [name for name, member in after.members.items() if member.waits]
        if len(waiting) > 1:
            raise InvariantBroken(f"{waiting} wait for ever")

    def _goes_on(self) -> bool:
        """Have happen what must: in one order, for none matters now. Only a connection that fails goes by key."""
        for name, act in self.choices():
            if "by key" not in name:
                act(self)
                return True
        return False


def _copied(asker: Asker) -> Asker:
    new = copy.copy(asker)
    new.asks = dict(asker.asks)
    return new


def _plain(asker: Asker) -> tuple[object, ...]:
    return (
        asker.place,
        asker.number,
        asker.is_proved,
        asker.is_by_key,
        asker.asks,
        asker._is_connecting,
        asker._fails_since,
    )


def search(depth: int, members: int = 2, asks: int = 1, **faults: int) -> int:
    """Look at every order of events with so many faults of each kind; returns how many states there are."""
    start = World(members, asks, **{"breaks": 0, "terms": 0, "give_ups": 0, "leases": 0, **faults})
    return explore(start, World.events, World.check, depth, World.shape)
