"""A small world of members that act only as `outlook` says, around one decider: every order in which they can.

Each node has heard of one record, the present one or an earlier one, and asks for something. It hears later than
others, writes what its outlook tells it to some time after it heard, and may miss records altogether. Time passes in
ticks, as in `model`; within a tick every node hears what there is and does what it has to, unless it hangs. One node
may hang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import exploring
from counted_times import as_at_any_time, with_idle_times
from exploring import replace
from invariants import InvariantBroken, check_round, require
from model import LAST_CALL, RETURN, TICK, Decide, quick

from ftcoord.core import rendezvous
from ftcoord.core.rendezvous import call_back
from ftcoord.core.rendezvous_records import (
    FAILED,
    AnyRound,
    HeardRound,
    JoinRequest,
    RollChunk,
    Round,
    RoundHead,
    chunks_of,
    encode,
    head_of,
    parse_chunk,
    parse_decided,
    roll_id,
)
from ftcoord.core.round_situation import RoundCandidate, RoundOptions, RoundSituation
from ftcoord.core.verdict import Next, Outlook, Publish, Standing, Verdict

RoundOutlook = Callable[[AnyRound | None, str, JoinRequest], Outlook[JoinRequest]]
MOST_ACTS: Final = 12
"""Of one node, with nothing happening meanwhile: more is an endless loop."""


class Mind(NamedTuple):
    """What a node does and knows.

    Args:
        node, member: its name, and its present incarnation.
        ask: what it asked last.
        heard: the last record that it heard of, and where rolls lie in chunks, what it has read of its roll.
        at_work: the round that it started; None while it waits for one.
        hangs: whether it hears and does nothing now.
        late: whether it ever hung, so that it may have missed a round that others started.
        seat: the member that it was when it started the round that it works in.
    """

    node: str
    member: str
    ask: JoinRequest
    heard: AnyRound | None
    at_work: AnyRound | None = None
    hangs: bool = False
    late: bool = False
    seat: str = ""


class State(NamedTuple):
    """The world.

    Args:
        minds: of all nodes that are there.
        started: the numbers of the rounds that some node started.
        ended: the nodes that ended because the run is over.
    """

    view: RoundSituation = RoundSituation((), 0.0, None, 0.0)
    minds: tuple[Mind, ...] = ()
    started: frozenset[int] = frozenset()
    ended: frozenset[str] = frozenset()


Step = tuple[str, State]
START: Final = State()


@dataclass
class MemberWorld:
    """The rules of one exploration, and what it found.

    Args:
        limits: the fewest and the most nodes of a round.
        nodes: how many there are at most.
        other_limits: the nodes that want others: one node more each.
        hanging: whether one node may hang.
        chunk: seats of a chunk, on average; 0 where a record has its roll in itself.
        longest: how long it may take until all are in a round, when nothing more happens.
    """

    limits: tuple[int, int]
    nodes: int = 2
    outlook: RoundOutlook = rendezvous.outlook
    decide: Decide = rendezvous.decide
    other_limits: str = ""
    hanging: bool = True
    chunk: int = 0
    options: RoundOptions = field(default_factory=quick)
    longest: float = LAST_CALL + RETURN
    met: set[Standing] = field(default_factory=set)
    _calm: set[State] = field(default_factory=set)
    _verdicts: dict[RoundSituation, Verdict] = field(default_factory=dict)
    _heard: dict[Round, dict[tuple[RollChunk | None, int], HeardRound]] = field(default_factory=dict)
    _last_told: Round | None = None
    _heard_of_last: dict[tuple[RollChunk | None, int], HeardRound] = field(default_factory=dict)

    def walk(self, *events: str) -> State:
        """Where these events lead, one after the other."""
        return exploring.walk(START, self._events, events)

    def explore(self, depth: int, start: State = START) -> int:
        """Every order of events up to this depth: the number of states. InvariantBroken says which events led there."""
        return exploring.explore(start, self._events, self._check_calm, depth)

    def explore_from(self, starts: Sequence[tuple[State, int]]) -> int:
        """As `explore`, from several states at once, each with its depth."""
        return exploring.explore_from(starts, self._events, self._check_calm)

    # -- what can happen ----------------------------------------------------------------------------------------

    def _events(self, state: State) -> Iterator[Step]:
        for name, after in self._all_events(state):
            yield name, _timed(after)

    def _all_events(self, state: State) -> Iterator[Step]:
        yield "a tick", self._tick(state, TICK)
        if (after := self._decided(state)) is not None:
            yield "decided", after
        for node in "ABC"[: self.nodes]:
            if node not in state.ended and all(mind.node != node for mind in state.minds):
                yield f"{node} joins", self._join(state, node)
                break  # the others would do the same
        for mind in state.minds:
            if mind.hangs:
                yield f"{mind.node} wakes", changed(state, mind, hangs=False)
                continue
            yield from self._events_of(state, mind)

    def _events_of(self, state: State, mind: Mind) -> Iterator[Step]:
        name = mind.node
        record = state.view.previous
        yield f"{name} dies", without(state, mind)
        if is_member(state, mind):
            yield f"{name} loses its lease", self._lose(state, mind)
        if self._is_news(mind, state):
            yield f"{name} hears", self._hear(state, mind)
        if mind.at_work is not None:
            yield f"{name} comes back", self._come_back(state, mind)
            speaks = record is not None and mind.node in record.nodes
            ended = rendezvous.close(record, "done", FAILED, speaks=speaks) if record else None
            if ended is not None and is_member(state, mind):
                closed = written(state, ended)
                yield f"{name} closes", without(closed, mind)._replace(ended=closed.ended | {name})
        elif self._look(mind).next is not Next.WAIT:
            yield f"{name} acts", self._act(state, mind)
        if self.hanging and not any(one.late for one in state.minds):
            yield f"{name} hangs", changed(state, mind, hangs=True, late=True)

    def _look(self, mind: Mind) -> Outlook[JoinRequest]:
        look = self.outlook(mind.heard, mind.member, mind.ask)
        self.met.add(look.standing)
        return look

    def _join(self, state: State, node: str, after: int = 0, old: Mind | None = None) -> State:
        """As a new member, that reads the record in the transaction that makes it one."""
        member = new_name(state, node, old)
        limits = (1, 1) if node in self.other_limits else self.limits
        ask = JoinRequest(node, f"{node}.example", port(after), after, node, "", *limits)
        heard = self._told(state.view.previous, None)
        mind = Mind(node, member, ask, heard, late=old is not None and old.late)
        there = (*state.view.members, RoundCandidate(member, ask, 0.0))
        minds = tuple(sorted((*state.minds, mind)))
        return state._replace(view=replace(state.view, members=there, changed_at=0.0), minds=minds)

    def _lose(self, state: State, mind: Mind) -> State:
        """Its lease, and know it: a node that waits starts its round all the same, if that became ready and stands."""
        gone = state._replace(view=view_without(state.view, mind.member))
        if mind.at_work is not None:
            return gone
        known, now = mind.heard, state.view.previous
        told = self._told(now, None)
        stands = known and told and rendezvous.is_same_round(known, told) and not told.closed
        if known and stands and self._look(mind).standing is Standing.ANSWERED:
            return self._start(gone, mind, known)
        return self._rejoin(gone, mind)

    def _rejoin(self, state: State, mind: Mind) -> State:
        after = max(mind.ask.after, *(known.number for known in (mind.heard, mind.at_work) if known), 0)
        return self._join(without(state, mind), mind.node, after, mind)

    def _come_back(self, state: State, mind: Mind) -> State:
        """For another round than that which it works in."""
        assert mind.at_work is not None
        if not is_member(state, mind):
            return self._rejoin(state, mind)
        after = max(mind.ask.after, mind.at_work.number)
        return _ask(state, mind, replace(mind.ask, port=port(after), after=after, seated=0, holds=""))

    def _act(self, state: State, mind: Mind) -> State:
        """What the outlook says, and nothing else."""
        look, heard = self._look(mind), mind.heard
        assert heard is not None
        if look.next is Next.READ:
            return self._read(state, mind)
        if look.next is Next.WRITE:
            has_seat = heard.rank_of(mind.member) is not None and heard.number > mind.ask.after
            require("a member takes a seat that it has", has_seat and not (heard.ready or heard.recalled))
            require(
                "a member says only that it takes its seat",
                look.ask == replace(mind.ask, seated=heard.number, failed=()),
            )
            assert look.ask is not None
            return _ask(state, mind, look.ask)
        if look.standing is Standing.ANSWERED:
            has_seat = heard.rank_of(mind.member) is not None and heard.number > mind.ask.after
            require("S1 a member starts a round that it asked for, with its seat", has_seat)
            require("S1 nobody starts before all have taken their seats", heard.ready)
            serves = heard.rank_of(mind.member) != 0 or heard.port == mind.ask.port
            require("S1 rank 0 serves the port that it holds open", serves)
            return self._start(state, mind, heard)
        if look.standing is Standing.MISSED:
            return self._ask_again(state, mind, heard)
        if look.standing is Standing.CLOSED:
            require("L2 nobody ends before the run does", bool(heard.closed))
        else:
            require("only these standings end a request", look.standing is Standing.REFUSED)
            require("L2 nobody with the run's limits is refused", heard.limits != mind.ask.limits)
        return without(state, mind)._replace(ended=state.ended | {mind.node})

    # -- what a member reads ------------------------------------------------------------------------------------

    def _told(self, record: Round | None, before: AnyRound | None) -> AnyRound | None:
        """What a member is sent of the decided record: with what it has read of the same roll before."""
        if record is None or not (self.chunk and record.seats):
            return record
        head = self._told_all(record, None, 0)
        if isinstance(before, HeardRound) and before.roll == head.roll and not before.gone:
            return self._told_all(record, before.chunk, before.at)
        return head

    def _told_all(self, record: Round, chunk: RollChunk | None, at: int) -> HeardRound:
        """What went through etcd is known by what was written: to write and to read it takes long."""
        if record is not self._last_told:  # to find a record among all takes as long as what is asked of it
            self._last_told, self._heard_of_last = record, self._heard.setdefault(record, {})
        if (known := self._heard_of_last.get((chunk, at))) is None:
            chunks = self._chunks(record)
            head = parse_decided("decided", encode(head_of(record, roll_id(record, chunks, "d"), chunks, "")))
            assert isinstance(head, RoundHead)
            known = self._heard_of_last[chunk, at] = HeardRound.of(head, chunk, at)
        return known

    def _is_news(self, mind: Mind, state: State) -> bool:
        told = self._told(state.view.previous, mind.heard)
        if isinstance(told, HeardRound) and isinstance(mind.heard, HeardRound) and mind.heard.gone:
            return HeardRound.of(mind.heard) != HeardRound.of(told)
        return told != mind.heard

    def _hear(self, state: State, mind: Mind) -> State:
        return changed(state, mind, heard=self._told(state.view.previous, mind.heard))

    def _read(self, state: State, mind: Mind) -> State:
        """Its chunk, as it is now: it is gone if another roll was decided since."""
        heard, now = mind.heard, state.view.previous
        assert isinstance(heard, HeardRound)
        present = self._told(now, None)
        if now is None or not isinstance(present, RoundHead) or present.roll != heard.roll:
            return changed(state, mind, heard=HeardRound.of(heard, gone=True))
        at = heard.chunk_of(mind.member)
        value = encode(chunks_of(now, heard.chunks)[at])
        return changed(state, mind, heard=HeardRound.of(heard, parse_chunk("chunk", value), at))

    def _chunks(self, record: Round) -> int:
        return -(-(len(record.seats) + len(record.away)) // self.chunk)

    def _start(self, state: State, mind: Mind, round_: AnyRound) -> State:
        started = frozenset(one for one in state.started if one > round_.number - 3) | {round_.number}
        return changed(state, mind, at_work=round_, seat=mind.member)._replace(started=started)

    def _ask_again(self, state: State, mind: Mind, heard: AnyRound) -> State:
        place = heard.place_of(mind.member)
        assert place is not None
        seat = max(place.last, mind.ask.seated)
        require("a member that missed nothing goes on waiting", seat > mind.ask.after)
        require("S1 all that live start a round, or none", mind.late or seat not in state.started)
        after = max(mind.ask.after, mind.ask.seated, heard.number)
        ask = replace(mind.ask, port=port(after), after=after, seated=0)
        again = self.outlook(heard, mind.member, ask).standing
        require("L1 who asks again waits for the next", again in (Standing.PENDING, Standing.SPARE))
        return _ask(state, mind, ask)

    def _decided(self, state: State) -> State | None:
        if not state.view.members:
            return None
        verdict = self._verdict(state.view)
        return written(state, verdict.record) if isinstance(verdict, Publish) else None

    def _verdict(self, view: RoundSituation) -> Verdict:
        """That of one situation is computed once: many states differ only in what the members know."""
        if (known := self._verdicts.get(view)) is None:
            known = self._verdicts[view] = as_at_any_time(self._judged, view, -RETURN)
        return known

    def _judged(self, view: RoundSituation) -> Verdict:
        verdict = self.decide(view, self.options, 0.0)
        if isinstance(verdict, Publish):
            check_round(view, verdict.record)
        return verdict

    # -- time, and what becomes of all when nothing more happens --------------------------------------------------

    def _settled(self, state: State) -> State:
        """All that do not hang hear of the present record, and do what follows."""
        for node in [mind.node for mind in state.minds if not mind.hangs]:
            for _ in range(MOST_ACTS):
                mind = next((one for one in state.minds if one.node == node), None)
                if mind is None:
                    break
                if self._is_news(mind, state):
                    state = self._hear(state, mind)
                elif mind.at_work is None and self._look(mind).next is not Next.WAIT:
                    state = self._act(state, mind)
                else:
                    break
            else:
                raise InvariantBroken("L1 what a member does comes to an end")
        return state

    def _tick(self, state: State, time: float) -> State:
        state = _passed(self._settled(state), time)
        for mind in state.minds:  # those that wait repeat that they take their seats
            waits = mind.at_work is None and not mind.hangs and is_member(state, mind)
            if waits and mind.heard is not None and mind.ask.seated == mind.heard.number:
                state = _ask(state, mind, mind.ask)
        return state

    def _check_calm(self, state: State) -> None:
        """L1 and L2: when nothing more fails, everybody is in a round, or knows why not."""
        for mind in state.minds:
            if mind.hangs:
                state = changed(state, next(one for one in state.minds if one.node == mind.node), hangs=False)
        state, path, elapsed = _timed(state), list[State](), 0.0
        while state not in self._calm:
            require("L1 it comes to an end", len(path) < 60)
            path.append(state)
            following = self._next_calm(state)
            if following is None:
                self._check_end(state)
                break
            elapsed += following[0]
            state = _timed(following[1])
        require("L1 within the last call", elapsed <= self.longest)
        self._calm.update(path)

    def _next_calm(self, state: State) -> tuple[float, State] | None:
        settled = self._settled(state)
        if settled is not state:
            return 0.0, settled
        for mind in state.minds:
            over = mind.at_work is not None and call_back(mind.heard, mind.at_work)[0] > 0
            if over or (mind.at_work is not None and not is_member(state, mind)):
                return 0.0, self._come_back(state, mind)
        if (after := self._decided(state)) is not None:
            return 0.0, after
        if not state.view.members:
            return None
        verdict = self._verdict(state.view)
        if isinstance(verdict, Publish) or verdict.until is None:
            return None
        return TICK, self._tick(state, TICK)

    def _check_end(self, state: State) -> None:
        now = state.view.previous
        if now is not None and now.closed:
            require("everybody hears of the end", not state.minds)
            return
        at_work = [mind for mind in state.minds if mind.at_work is not None]
        same = [mind for mind in at_work if now is not None and (mind.at_work or now).number == now.number]
        require("nobody works in a round that is over", len(same) == len(at_work))
        counted = [mind for mind in state.minds if mind.node not in self.other_limits]
        if self.other_limits or len(counted) < self.limits[0]:
            return
        require("L1 a round runs", now is not None and now.ready and not now.recalled)
        require("L1 nobody is left out", len(at_work) == min(self.limits[1], len(counted)))
        left = {self._look(mind).standing for mind in state.minds if mind.at_work is None}
        require("L2 a surplus member is a spare", left <= {Standing.SPARE})


def _timed(state: State) -> State:
    """The one that is explored of those that differ only in times that count for nothing."""
    view = with_idle_times(state.view)
    return state if view is state.view else state._replace(view=view)


def new_name(state: State, node: str, old: Mind | None = None) -> str:
    """Of a new member of this node: no lease's id is given again, as far as anybody can tell."""
    used = {*(state.view.previous.last_seats if state.view.previous else ()), old.member if old else ""}
    used.update(member.id for member in state.view.members)
    for mind in state.minds:
        used |= {mind.member, mind.seat, *_seats_read(mind.heard)}
        known = (one for one in (mind.heard, mind.at_work) if isinstance(one, Round))
        used.update(seat for one in known for seat in one.last_seats)
    return next(name for i in range(99) if (name := f"{node}{i}") not in used)


def port(after: int) -> int:
    """That a node holds open while it asks for a round after this one: another one for each ask."""
    return after + 1


def _seats_read(heard: AnyRound | None) -> tuple[str, ...]:
    chunk = heard.chunk if isinstance(heard, HeardRound) else None
    return chunk.members + chunk.away if chunk else ()


def is_member(state: State, mind: Mind) -> bool:
    return any(member.id == mind.member for member in state.view.members)


def changed(state: State, mind: Mind, **changed: object) -> State:
    new = mind._replace(**changed)  # type: ignore[arg-type]
    return state._replace(minds=tuple(new if one is mind else one for one in state.minds))


def without(state: State, mind: Mind) -> State:
    minds = tuple(one for one in state.minds if one.node != mind.node)
    return state._replace(view=view_without(state.view, mind.member), minds=minds)


def view_without(view: RoundSituation, member: str) -> RoundSituation:
    members = tuple(one for one in view.members if one.id != member)
    return view if len(members) == len(view.members) else replace(view, members=members, changed_at=0.0)


def _ask(state: State, mind: Mind, ask: JoinRequest) -> State:
    """Write it. A node whose lease is gone writes nothing, and hears of that."""
    members = tuple(RoundCandidate(m.id, ask, 0.0) if m.id == mind.member else m for m in state.view.members)
    view = replace(state.view, members=members, changed_at=0.0)
    return changed(state, mind, ask=ask, at_work=None)._replace(view=view)


def written(state: State, record: Round) -> State:
    plain = replace(record, recalled=record.recalled and "recalled", waiting=0, before="")
    return state._replace(view=replace(state.view, previous=plain, previous_at=0.0))


def _passed(state: State, time: float) -> State:
    def older(at: float) -> float:
        return max(at - time, -RETURN)

    view = state.view
    members = tuple(RoundCandidate(m.id, m.ask, older(m.seen)) for m in view.members)
    aged = replace(view, members=members, changed_at=older(view.changed_at), previous_at=older(view.previous_at))
    return state._replace(view=aged)
