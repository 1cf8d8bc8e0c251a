"""A small world around `decide()`: three nodes at most, one record in etcd, and everything that can happen to them.

A state is what the decider sees (a RoundSituation whose times are relative to `now = 0`) and what only the nodes know.
Time passes in ticks: the settle time-out is one, the last call is two, participants have three to come back, and what
is older than that stays that old. Round numbers are counted from the present round, so that the same situation in a
later round is the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Final, NamedTuple

import exploring
from exploring import replace
from invariants import InvariantBroken, check_round, require

from ftcoord.core import rendezvous
from ftcoord.core.rendezvous import RETURN_FACTOR, RoundCandidate, RoundOptions, RoundSituation
from ftcoord.core.rendezvous_records import NO_ROUND, Away, JoinRequest, Round
from ftcoord.core.verdict import Publish, Verdict

NOW: Final = 0.0
NONE_YET: Final = Round.of(NO_ROUND)
"""The record of a run that had no round yet."""


def with_idle_times(view: RoundSituation, time: float = NOW) -> RoundSituation:
    """The same situation, with this one for every time that counts for nothing.

    That is so until what the time belongs to happens again, which sets it anew:
      - `seen` of a member that neither asks, nor holds a seat for another one, nor has a seat while seats are taken: it
        counts again once the member writes;
      - `changed_at` while nobody of the last round asks again: whoever does changes it;
      - `previous_at` while a round runs, and where there is none: the next record changes it;
      - all of them once the run is closed. None here asks to go on from it.
    """
    last = view.previous or NONE_YET
    if last.closed:
        return _with(view, [_seen_at(member, time) for member in view.members], time, time)
    taking = bool(last.seats) and not (last.ready or last.recalled)
    members: list[RoundCandidate] = []
    is_back = False
    for member in view.members:
        if _asks(member, last):
            is_back = is_back or member.ask.node in last.nodes
        elif not (member.ask.holds or (taking and member.id in last.ranks)):
            member = _seen_at(member, time)
        members.append(member)
    stands = taking or bool(last.recalled)
    return _with(view, members, view.changed_at if is_back else time, view.previous_at if stands else time)


def _seen_at(member: RoundCandidate, time: float) -> RoundCandidate:
    return member if member.seen == time else RoundCandidate(member.id, member.ask, time, member.revision)


def _with(
    view: RoundSituation, members: Sequence[RoundCandidate], changed_at: float, previous_at: float
) -> RoundSituation:
    """The same object where nothing changes, which is told at once."""
    same = all(map(is_, members, view.members))
    if same and (changed_at, previous_at) == (view.changed_at, view.previous_at):
        return view
    return replace(view, members=tuple(members), changed_at=changed_at, previous_at=previous_at)


def _asks(member: RoundCandidate, last: Round) -> bool:
    return not member.ask.holds and member.ask.after >= max(member.ask.seated, last.last_seats.get(member.id, 0))


def as_at_any_time(
    judge: Callable[[RoundSituation], Verdict[Round]], view: RoundSituation, oldest: float
) -> Verdict[Round]:
    """What it decides, when times that count for nothing are as new as they can be, and as old.

    Raises InvariantBroken if that makes a difference: then a rule looks at a time that counts for nothing here.
    """
    verdict = judge(view)
    other = with_idle_times(view, oldest)
    require("no rule looks at a time that counts for nothing", other is view or judge(other) == verdict)
    return verdict


SETTLE: Final = 1.0
LAST_CALL: Final = 2.0
RETURN: Final = LAST_CALL * RETURN_FACTOR
SEATS: Final = LAST_CALL
"""Within which all seats must be taken."""
FRESH: Final = LAST_CALL
"""For how long it counts that one was."""
TICK: Final = 1.0
NODES: Final = "ABC"
BASE: Final = 2
"""What the present round's number is counted from."""

Decide = Callable[[RoundSituation, RoundOptions, float], Verdict]


class Pending(NamedTuple):
    """A decision that is not yet published; `fresh` while the record is still that which it was computed on."""

    decider: str
    decision: Publish
    fresh: bool


class State(NamedTuple):
    """The world. Members are oldest first, so the first one is the decider.

    Args:
        running: the members that were given a seat since they last asked: they ask for nothing. They run workers once
            the round is ready, for which each must have taken its seat.
        pending: only where deciders race.
    """

    view: RoundSituation
    running: frozenset[str] = frozenset()
    pending: tuple[Pending, ...] = ()


Step = tuple[str, State]
START: Final = State(RoundSituation((), 0.0, None, 0.0))


def live(view: RoundSituation) -> list[str]:
    return [member.id for member in view.members]


def participants(view: RoundSituation) -> list[str]:
    """The live participants of the last round."""
    seated = {seat.member for seat in view.previous.seats} if view.previous else set()
    return [member for member in live(view) if member in seated]


def quick(recall_on_loss: bool = True) -> RoundOptions:
    """RoundOptions that fit the ticks."""
    return RoundOptions(LAST_CALL, SETTLE, recall_on_loss, seat_timeout=SEATS, fresh=FRESH)


def nameless(state: State) -> Hashable:
    """No rule depends on how nodes, members and requests are called, so the world without names is the same world."""
    return exploring.nameless(state, NODES)


# -- what must hold of every decision ---------------------------------------------------------------------------


def check(view: RoundSituation, running: frozenset[str], limits: tuple[int, int], verdict: Verdict) -> None:
    """Raises InvariantBroken."""
    if not isinstance(verdict, Publish):
        require("until is in the future", verdict.until is None or verdict.until > 0)
        return
    old, new = view.previous, verdict.record
    check_round(view, new)
    require("a closed run stays closed", not (old and old.closed))
    if old and new.number == old.number and new.ready and not old.ready:
        _check_ready(view, old, new)
    elif old and new.number == old.number:
        _check_recall(view, running, limits, old, new)
    else:
        _check_round(view, running, limits, old, new)


def _check_ready(view: RoundSituation, old: Round, new: Round) -> None:
    there = {seat.member for seat in old.seats}
    require("who took its seat long ago may be dead", all(m.seen > -FRESH for m in view.members if m.id in there))
    require("S1 being ready changes nothing else", new == replace(old, ready=True))


def _check_recall(
    view: RoundSituation, running: frozenset[str], limits: tuple[int, int], old: Round, new: Round
) -> None:
    at_work = running.intersection(participants(view))
    require("a recall says why", bool(new.recalled))
    require("a round is recalled once", not old.recalled)
    late = not old.ready and view.previous_at <= -SEATS
    require("L2 a surplus node recalls nothing", late or len(at_work) < limits[1])


def _check_round(
    view: RoundSituation, running: frozenset[str], limits: tuple[int, int], old: Round | None, new: Round
) -> None:
    members = {member.id: member for member in view.members}
    chosen = [seat.member for seat in new.seats]
    before = [seat.node for seat in old.seats] if old else []
    back = [m for m in view.members if m.ask.node in before and m.id not in running]
    out = running.intersection(participants(view))
    require("S1 min <= n <= max", limits[0] <= len(chosen) <= limits[1])
    require("rank 0 is a survivor", not back or new.seats[0].node in before)
    new_nodes = {seat.node for seat in new.seats}.difference(before)
    require("survivors go before newcomers", not new_nodes or {m.id for m in back} <= set(chosen))
    require("participants have the last call to come back", not out or view.previous_at <= -RETURN)
    require("only those that ask are seated", running.isdisjoint(chosen))
    require("who is not back is away", {away.member for away in new.away} == running.intersection(members))


# -- what can happen --------------------------------------------------------------------------------------------


@dataclass
class World:
    """The rules of one exploration, and what it found.

    Args:
        limits: the fewest and the most nodes of a round, which all want.
        nodes: how many, at most.
        deciders: 1, or 2 that race: each publishes some time after it decided, guarded by the record's revision.
        guarded: whether that guard is there.
        hanging: whether to ask of every state also what becomes of the others when one participant never comes back.
    """

    limits: tuple[int, int]
    options: RoundOptions = field(default_factory=lambda: quick())
    nodes: int = 3
    deciders: int = 1
    guarded: bool = True
    hanging: bool = True
    decide: Decide = rendezvous.decide
    _records: dict[Round, Round] = field(default_factory=dict)
    _verdicts: dict[tuple[RoundSituation, frozenset[str]], Verdict] = field(default_factory=dict)
    _calm: dict[tuple[State, str | None], tuple[float, State]] = field(default_factory=dict)

    def walk(self, *events: str) -> State:
        """Where these events lead, one after the other."""
        return exploring.walk(START, self._events, events)

    def explore(self, depth: int, start: State = START) -> int:
        """Every order of events up to this depth: the number of states. InvariantBroken says which events led there."""
        return self.explore_from([(start, depth)])

    def explore_from(self, starts: Sequence[tuple[State, int]]) -> int:
        """As `explore`, from several states at once, each with its depth."""
        return exploring.explore_from(starts, self._events, self._check_liveness, nameless)

    def _events(self, state: State) -> Iterator[Step]:
        for name, after in self._all_events(state):
            yield name, self._timed(after)

    def _timed(self, state: State) -> State:
        """A decision on its way was made on times that count then: until it has arrived, none is dropped."""
        if state.pending:
            return state
        view = with_idle_times(state.view)
        return state if view is state.view else state._replace(view=view)

    def _all_events(self, state: State) -> Iterator[Step]:
        view = state.view
        yield "a tick", _canonical(_pass(state, TICK))
        yield "the decider changes", _canonical(_restart_timers(state))
        for member in view.members:
            yield f"{member.id} is gone", self._lose(state, member.id)
            if member.id in state.running:
                yield f"{member.id} comes back", _canonical(self._ask(state, member.id))
            if member.id in self._untaken(state):
                yield f"{member.id} takes its seat", _canonical(self._take_seat(state, member.id))
        yield from self._joins(state)
        if view.previous is None or not view.previous.closed:
            yield "closed", self._written(state, replace(view.previous or NONE_YET, closed="closed"))
        if self.deciders == 1:
            if view.members and (after := self._decided(state)) is not None:
                yield "decided", after
            return
        yield from self._race(state)

    def _joins(self, state: State) -> Iterator[Step]:
        """A fresh process knows of no round; one that lost its lease knows the last one."""
        view = state.view
        known = {0, view.previous.number if view.previous else 0}
        text = _written_names(state)
        fresh_one = False
        for node in NODES[: self.nodes]:
            if any(member.ask.node == node for member in view.members):
                continue
            if node not in text:
                if fresh_one:
                    continue  # it differs in nothing from the fresh node before
                fresh_one = True
            member = next(name for i in range(9) if (name := f"{node}{i}") not in text)
            for after in known:
                joined = RoundCandidate(member, self._new_ask(node, after, text), 0.0)
                there = replace(view, members=(*view.members, joined), changed_at=0.0)
                yield f"{member} joins after round {after}", _canonical(state._replace(view=there))

    def _lose(self, state: State, member: str) -> State:
        view = state.view
        left = tuple(other for other in view.members if other.id != member)
        after = State(
            replace(view, members=left, changed_at=0.0),
            state.running - {member},
            tuple(p for p in state.pending if p.decider != member),
        )
        if left and view.members[0].id == member:
            after = _restart_timers(after, view.previous_at)
        return _canonical(after)

    def _ask(self, state: State, member: str) -> State:
        """A participant wants another round than that which it took part in."""
        view = state.view
        text = _written_names(state)
        last_seat = view.previous.last_seats.get(member, 0) if view.previous else 0

        def asking(old: RoundCandidate) -> RoundCandidate:
            after = max(old.ask.after, last_seat)
            return RoundCandidate(old.id, self._new_ask(old.ask.node, after, text), 0.0)

        members = tuple(asking(old) if old.id == member else old for old in view.members)
        return state._replace(view=replace(view, members=members, changed_at=0.0), running=state.running - {member})

    def _new_ask(self, node: str, after: int, text: str) -> JoinRequest:
        nonce = next(name for i in range(9) if (name := f"{node}-{i}") not in text)
        return JoinRequest(node, f"{node}.example", 1, after, node, nonce, *self.limits)

    def _untaken(self, state: State) -> list[str]:
        """The members with a seat in a round that is to start, who have not yet said that they take it."""
        view, last = state.view, state.view.previous
        if last is None or last.ready or last.recalled or last.closed:
            return []
        there = [m for m in view.members if m.id in state.running and last.rank_of(m.id) is not None]
        return [member.id for member in there if member.ask.seated != last.number or member.seen <= -FRESH]

    def _take_seat(self, state: State, member: str) -> State:
        view = state.view
        assert view.previous is not None
        number = view.previous.number
        members = tuple(
            RoundCandidate(m.id, replace(m.ask, seated=number), 0.0) if m.id == member else m for m in view.members
        )
        return state._replace(view=replace(view, members=members, changed_at=0.0))

    def _decided(self, state: State) -> State | None:
        verdict = self._verdict(state)
        return self._written(state, verdict.record) if isinstance(verdict, Publish) else None

    def _verdict(self, state: State) -> Verdict:
        """That of one situation is computed once: it is asked for by the state's events, and by all that end in it."""
        key = (state.view, state.running)
        if (known := self._verdicts.get(key)) is None:
            judge = partial(self._judged, state.running)
            known = judge(state.view) if state.pending else as_at_any_time(judge, state.view, -RETURN)
            self._verdicts[key] = known
        return known

    def _judged(self, running: frozenset[str], view: RoundSituation) -> Verdict:
        verdict = self.decide(view, self.options, 0.0)
        check(view, running, self.limits, verdict)
        return verdict

    def _written(self, state: State, record: Round) -> State:
        """The record is written, and those who have a seat of a new round take it."""
        view, old = state.view, state.view.previous
        seated = {m.id for m in view.members if record.rank_of(m.id) is not None and m.ask.after < record.number}
        took = state.running if old and old.number == record.number else state.running | seated
        plain = replace(record, recalled=record.recalled and "recalled", waiting=0, before="")
        plain = self._records.setdefault(plain, plain)  # one object for one record computes once who sits where
        pending = tuple(p._replace(fresh=False) for p in state.pending if not self.guarded)
        view = replace(view, previous=plain, previous_at=0.0)
        return _canonical(State(view, took, pending))

    def _race(self, state: State) -> Iterator[Step]:
        for member in live(state.view)[: self.deciders]:
            verdict = self._verdict(state)
            if isinstance(verdict, Publish) and all(p.decider != member for p in state.pending):
                pending = (*state.pending, Pending(member, replace(verdict, reason=""), True))
                older_first = tuple(sorted(pending, key=lambda one: live(state.view).index(one.decider)))
                yield f"{member} decides", state._replace(pending=older_first)
        for p in state.pending:
            left = state._replace(pending=tuple(q for q in state.pending if q is not p))
            if p.fresh or not self.guarded:
                self._check_written(state, p.decision.record)
                yield f"{p.decider} publishes", self._written(left, p.decision.record)

    def _check_written(self, state: State, new: Round) -> None:
        old = state.view.previous
        grows = old is None or new.number > old.number or (new.number == old.number and new.seats == old.seats)
        require("S1 S2 one membership for each number", grows and not (old and old.closed))

    # -- when events stop ---------------------------------------------------------------------------------------

    def _check_liveness(self, state: State) -> None:
        """L1: when nothing more fails, as many as can be are in a round by the end of the last call.

        That is so when all participants come back that are called, and for the others when one of them hangs.
        """
        calm = self._timed(state._replace(pending=()))
        for hung in (None, *(sorted(state.running) if self.hanging else ())):
            try:
                self._check_end(*self._calmed(calm, hung), hung)
            except InvariantBroken as broken:
                raise InvariantBroken(f"{broken}, when {hung or 'nobody'} hangs") from None

    def _check_end(self, elapsed: float, end: State, hung: str | None) -> None:
        view, last = end.view, end.view.previous
        others = len(view.members) - (hung is not None)
        if others < self.limits[0] or (last and last.closed):
            return
        at_work = end.running.intersection(participants(view))
        require("L1 a round runs", last is not None and last.ready and not last.recalled)
        require("L1 nobody is left out", len(at_work) >= min(self.limits[1], others))
        # Who hangs may first have to miss its seat, and then the recall.
        require("L1 within the last call", elapsed <= (LAST_CALL if hung is None else LAST_CALL + RETURN))

    def _calmed(self, state: State, hung: str | None) -> tuple[float, State]:
        """How long it takes until nothing more is to be done, and what the world is then."""
        path: list[tuple[State, float]] = []
        while (known := self._calm.get((state, hung))) is None:
            require("L1 it comes to an end", len(path) < 30)
            following = self._next_calm(state, hung)
            if following is None:
                known = (0.0, state)
                break
            path.append((state, following[0]))
            state = self._timed(following[1])
        elapsed, end = known
        for before, took in reversed(path):
            elapsed += took
            self._calm[before, hung] = (elapsed, end)
        return elapsed, end

    def _next_calm(self, state: State, hung: str | None) -> tuple[float, State] | None:
        view = state.view
        if not view.members or (view.previous and view.previous.closed):
            return None
        stay = participants(view) if view.previous and not view.previous.recalled else []
        for member in live(view):
            if member in state.running and member not in stay and member != hung:
                return 0.0, _canonical(self._ask(state, member))
        for member in self._untaken(state):
            if member != hung:
                return 0.0, _canonical(self._take_seat(state, member))
        verdict = self._verdict(state)
        if isinstance(verdict, Publish):
            return 0.0, self._written(state, verdict.record)
        return None if verdict.until is None else (verdict.until, _canonical(_pass(state, verdict.until)))


def _written_names(state: State) -> str:
    """A text that has all the names in it that the record holds, or soon may: no newcomer may have one of these."""
    records = [state.view.previous, *(one.decision.record for one in state.pending)]
    deciders = [one.decider for one in state.pending]
    return " ".join([*deciders, *(name for record in records if record for name in record.last_seats)])


def _pass(state: State, time: float) -> State:
    def older(at: float) -> float:
        return max(at - time, -RETURN)

    view = state.view
    members = tuple(RoundCandidate(m.id, m.ask, older(m.seen)) for m in view.members)
    return state._replace(
        view=replace(view, members=members, changed_at=older(view.changed_at), previous_at=older(view.previous_at))
    )


def _restart_timers(state: State, previous_at: float = 0.0) -> State:
    """A new decider has only just seen all that there is."""
    members = tuple(RoundCandidate(m.id, m.ask, 0.0) for m in state.view.members)
    return state._replace(view=replace(state.view, members=members, changed_at=0.0, previous_at=previous_at))


def _canonical(state: State) -> State:
    """Count round numbers from the last one: only their order matters to anybody."""
    view, last = state.view, state.view.previous
    if last is None or last.number < BASE or not all(p.fresh for p in state.pending):
        return state
    members = tuple(_count_from(member, last) for member in view.members)
    away = tuple(Away(away.member, BASE - 1) for away in last.away if away.member in live(view))
    if last.number == BASE and members == view.members and away == last.away:
        return state
    return state._replace(view=replace(view, members=members, previous=replace(last, number=BASE, away=away)))


def _count_from(member: RoundCandidate, last: Round) -> RoundCandidate:
    """What is before the last round is one of two: before or not before the seat that an away member last had."""
    seat = last.last_seats.get(member.id, 0)
    before = BASE - 1 if 0 < seat <= member.ask.after else 0
    after = member.ask.after - last.number + BASE if member.ask.after >= last.number else before
    seated = BASE if member.ask.seated == last.number else 0
    if (after, seated) == (member.ask.after, member.ask.seated):
        return member
    return RoundCandidate(member.id, replace(member.ask, after=after, seated=seated), member.seen)
