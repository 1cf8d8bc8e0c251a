"""Members that lose their leases while their workers run, and take their seats again (R9): every order of that.

The world of `members_model`, from a round that runs. Beside what happens there, a node's lease ends, or its key
outlives the lease that the node has; it comes back under another one; it dies with a cause, or its host is lost with
its key left behind; a worker of its fails; it leaves. Deciders change, and decide on what they saw a while ago. An etcd
is wiped, or restored.

Of the times that `RendezvousPolicy` notes this keeps two copies: what the decider noticed, which a new one has not, and
what is true, by which every recall is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

import exploring
from exploring import replace
from invariants import check_round, require
from members_model import MemberWorld, Mind, State, changed, is_member, new_name, port, view_without, without, written
from model import LAST_CALL, RETURN, TICK, quick

from ftcoord.core import rendezvous, round_situation
from ftcoord.core.event_records import WorkerFailure
from ftcoord.core.rendezvous import REATTACHING
from ftcoord.core.rendezvous_records import NO_ROUND, AnyRound, JoinRequest, Round
from ftcoord.core.round_situation import MOMENT, RoundCandidate, RoundOptions, RoundSituation
from ftcoord.core.verdict import Publish, Wait

FAILED: Final = (WorkerFailure(7, 0, 0, 1, fate="exited with code 1"),)
LEASE: Final = 2.0
"""A lease's time: two ticks, and a tick is longer than a moment."""
LONG_AGO: Final = -RETURN
"""What is older than that stays that old."""

CallBack = Callable[[AnyRound | None, AnyRound], tuple[int, str]]
Vacant = Callable[[Round, Collection[RoundCandidate]], Collection[str]]


class Vacancy(NamedTuple):
    """A seat whose member is gone, and nobody holds it: since when, and whether its cause is known."""

    seat: str
    since: float
    died: bool = False


class Late(NamedTuple):
    """A decision that is not yet published: only if the record is still that which it was made on."""

    decider: str
    record: Round


class Seats(NamedTuple):
    """The world: that of the members, and what is known of seats.

    Args:
        noticed: the vacancies that the decider has noticed.
        vacated: those that there are.
        taken: the seats that were taken again, and when.
        causes: the members of whom etcd has a cause.
        late: a decision on its way.
    """

    world: State
    noticed: tuple[Vacancy, ...] = ()
    vacated: tuple[Vacancy, ...] = ()
    taken: tuple[tuple[str, float], ...] = ()
    causes: frozenset[str] = frozenset()
    late: Late | None = None


Step = tuple[str, Seats]


@dataclass
class SeatsWorld(MemberWorld):
    """The rules of one exploration.

    Args:
        happens: what may happen beside leases that end and nodes that come back: see `_others`.
        call_back, vacant: those of `core.rendezvous`, or wrong ones.
        before: an earlier record, see `running`.
    """

    happens: Collection[str] = ()
    options: RoundOptions = field(default_factory=lambda: replace(quick(), return_to_seat=LEASE))
    longest: float = LAST_CALL + RETURN + LEASE
    call_back: CallBack = rendezvous.call_back
    vacant: Vacant = round_situation.vacant
    before: Round | None = None
    _ends: set[Seats] = field(default_factory=set)

    def running(self, nodes: str) -> Seats:
        """The second round that these nodes work in; the first one is what etcd may be restored to."""
        joined = [f"{node} joins" for node in nodes]
        take = [f"{node} {does}" for node in nodes for does in ("hears", "acts")]
        back = [f"{node} comes back" for node in nodes]
        passes = ["a tick"] * (0 if len(nodes) == self.limits[1] else int(LAST_CALL))
        first = [*joined, *passes, "decided", *take, "decided", *take]
        world = MemberWorld(self.limits, self.nodes)
        self.before = world.walk(*first).view.previous
        return Seats(world.walk(*first, back[0], "decided", *back[1:], "decided", *take, "decided", *take))

    def follow(self, start: Seats, *events: str) -> Seats:
        """Where these events lead, one after the other."""
        return exploring.walk(start, self._seat_events, events)

    def explore_seats(self, depth: int, start: Seats) -> int:
        """Every order of events up to this depth: the number of states. InvariantBroken says which events led there."""
        return exploring.explore(start, self._seat_events, self._check_seats, depth)

    # -- what can happen ----------------------------------------------------------------------------------------

    def _seat_events(self, state: Seats) -> Iterator[Step]:
        for name, after in self._all_events(state):
            yield name, self._noticing(after)

    def _all_events(self, state: Seats) -> Iterator[Step]:
        world = state.world
        yield "a tick", self._passed(state)
        if (record := self._decision(state)) is not None:
            yield "decided", self._published(state, record)
        for member in _strangers(world):
            yield f"{member}'s lease ends", _lost(state, member)
        for mind in world.minds:
            for name, after in self._of_node(world, mind):
                yield name, state._replace(world=after)
            yield from self._of_seat(state, mind)
        yield from self._others(state)

    def _of_node(self, world: State, mind: Mind) -> Iterator[tuple[str, State]]:
        """As in the world of members."""
        name = mind.node
        if self._is_news(mind, world):
            yield f"{name} hears", self._hear(world, mind)
        if mind.at_work is not None:
            yield f"{name} comes back", self._come_back(world, mind)
        elif self._look(mind).next is not rendezvous.Next.WAIT:
            yield f"{name} acts", self._act(world, mind)

    def _of_seat(self, state: Seats, mind: Mind) -> Iterator[Step]:
        name, world = mind.node, state.world
        if mind.at_work is None:
            if is_member(world, mind):
                after = self._lose(world, mind)
                yield f"{name} loses its lease", state._replace(world=after)
                if "keys outlive leases" in self.happens:
                    yield f"{name} takes another lease", state._replace(world=_beside(after, world))
            return
        if is_member(world, mind):
            yield f"{name} loses its lease", _lost(state, mind.member)
            if "keys outlive leases" in self.happens:
                yield f"{name} takes another lease", self._take_again(state, mind)
        elif not self._is_called(mind):
            yield f"{name} takes another lease", self._take_again(state, mind)
        if "failures" in self.happens and not (mind.ask.failed or self._is_called(mind)):
            yield f"a worker of {name} fails", self._fail(state, mind)

    def _others(self, state: Seats) -> Iterator[Step]:
        world, happens = state.world, self.happens
        if "newcomers" in happens:
            there = {mind.node for mind in world.minds} | world.ended
            for node in sorted({*"ABC"[: self.nodes]} - there)[:1]:
                yield f"{node} joins", state._replace(world=self._join(world, node))
        if "wipes" in happens and (world.view.members or world.view.previous):
            yield "etcd is wiped", self._rewound(state, None)
            yield "etcd is restored", self._rewound(state, self.before)
        if "deciders" in happens:
            yield "the decider changes", _with_another_decider(state)
            yield from self._decide_late(state)
        for mind in world.minds:
            if "deaths" in happens:
                yield f"{mind.node} dies", _died(state, mind)
            if "lost hosts" in happens:
                yield f"{mind.node}'s host is lost", state._replace(world=_ended(world, mind, world.view))
            if "farewells" in happens and mind.at_work is not None and is_member(world, mind):
                yield f"{mind.node} leaves", _left(state, mind)

    def _decide_late(self, state: Seats) -> Iterator[Step]:
        members = state.world.view.members
        if state.late is not None:
            if any(member.id == state.late.decider for member in members):
                yield f"{state.late.decider} publishes", self._published(state, state.late.record)
        elif members and (record := self._decision(state)) is not None:
            for member in {members[0].id, members[-1].id}:
                yield f"{member} decides", state._replace(late=Late(member, record))

    def _take_again(self, state: Seats, mind: Mind, failed: tuple[WorkerFailure, ...] = ()) -> Seats:
        """Its seat, under another lease, whose key it reads the record with. Its old key may be there still."""
        world, mine = state.world, mind.at_work
        assert mine is not None
        ask = self._hold(mind, failed)
        new = RoundCandidate(new_name(world, mind.node, mind), ask, 0.0)
        view = replace(world.view, members=(*world.view.members, new), changed_at=0.0)
        heard = self._told(world.view.previous, None)
        world = changed(world, mind, member=new.id, ask=ask, heard=heard)._replace(view=view)
        return state._replace(world=world, taken=_noted(state.taken, mind.seat))

    def _fail(self, state: Seats, mind: Mind) -> Seats:
        """It says so, under another lease where its own is lost."""
        if not is_member(state.world, mind):
            return self._take_again(state, mind, FAILED)
        return state._replace(world=_wrote(state.world, mind, self._hold(mind, FAILED)))

    def _hold(self, mind: Mind, failed: tuple[WorkerFailure, ...]) -> JoinRequest:
        assert mind.at_work is not None
        number = mind.at_work.number
        after = max(mind.ask.after, number)
        said = JoinRequest(mind.node, mind.ask.address, port(after), after, mind.node, "", *self.limits)
        return replace(said, seated=number, holds=mind.seat, failed=mind.ask.failed or failed)

    def _is_called(self, mind: Mind) -> bool:
        if mind.at_work is None or self.call_back(mind.heard, mind.at_work)[0] == 0:
            return False
        known = mind.heard is not None and mind.heard.number >= mind.at_work.number
        require("R9 nobody is called back by an etcd that has lost the round", known)
        return True

    def _is_news(self, mind: Mind, state: State) -> bool:
        """A node that lost its lease hears nothing."""
        return is_member(state, mind) and super()._is_news(mind, state)

    def _rewound(self, state: Seats, record: Round | None) -> Seats:
        """To an earlier record. The members that it names have their leases still, and put their keys back; the others
        have lost theirs, and who waits asks again."""
        view = state.world.view
        members = tuple(RoundCandidate(m.id, m.ask, 0.0) for m in view.members if record and m.id in record.ranks)
        world = state.world._replace(view=RoundSituation(members, 0.0, record, 0.0))
        for mind in world.minds:
            if mind.at_work is None and not is_member(world, mind):
                world = self._rejoin(world, mind)
        return Seats(world)

    # -- deciding -----------------------------------------------------------------------------------------------

    def _situation(self, state: Seats) -> RoundSituation:
        since = min((one.since for one in state.noticed), default=0.0)
        deaths = {one.seat: "died" for one in state.noticed if one.died}
        view = state.world.view
        oldest = view.members[0].id if view.members else ""
        mine = next((mind.at_work for mind in state.world.minds if mind.member == oldest), None)
        return replace(view, gone_since=since, deaths=deaths, mine=mine)

    def _decision(self, state: Seats) -> Round | None:
        if not state.world.view.members:
            return None
        verdict = self.decide(self._situation(state), self.options, 0.0)
        if not isinstance(verdict, Publish):
            if verdict.rule == REATTACHING:
                self._check_wait(state, verdict)
            return None
        check_round(state.world.view, verdict.record)
        self._check_recall(state, verdict.record)
        return verdict.record

    def _check_recall(self, state: Seats, new: Round) -> None:
        """R9: of nodes that have only lost their leases nobody is called back before they had time to come back."""
        view = state.world.view
        old = view.previous
        if old is None or not (old.ready and new.recalled) or old.recalled or new.number != old.number:
            return
        asks = [member.ask for member in view.members]
        ended = any(ask.node in old.nodes and not ask.holds and ask.after >= old.number for ask in asks)
        if ended or any(ask.failed for ask in asks) or _is_told(state):
            return
        if not state.vacated:
            at_work = [m for m in state.world.minds if m.at_work is not None and is_member(state.world, m)]
            require("L2 a surplus node recalls nothing", len(at_work) < self.limits[1])
            return
        since = min(one.since for one in state.vacated)
        require("R9 a lost lease is no lost node", -since >= _grace(state, since))
        left = old.size - len(state.vacated)
        lost = self.options.recall_on_loss or left == 0 or len(asks) > left
        require("R9 who is gone is only replaced if that is asked for", lost)

    def _check_wait(self, state: Seats, verdict: Wait) -> None:
        """R9: nobody waits for the dead, nor longer than was said for the others."""
        view = state.world.view
        if any(member.ask.seated > (view.previous or NO_ROUND).number for member in view.members):
            until = view.changed_at + LEASE
            require("R9 nobody waits for long", verdict.until is not None and verdict.until <= until)
            return
        require("R9 nobody waits for one of whom it is known", not _is_told(state))
        require("R9 only of a round that was ready", view.previous is not None and view.previous.ready)
        if _strangers(state.world) or any(member.seen <= view.read_at for member in view.members):
            return  # who cannot tell that a key is nobody's, or when a seat was taken again, waits rather too long
        require("R9 nobody waits for who is there", bool(state.noticed))
        since = min(one.since for one in state.noticed)
        require("R9 nobody waits for long", verdict.until is not None and verdict.until <= since + _grace(state, since))

    def _published(self, state: Seats, record: Round) -> Seats:
        old = state.world.view.previous
        grows = old is None or record.number > old.number or (record.number == old.number and record.seats == old.seats)
        require("S1 S2 one membership for each number", grows)
        return state._replace(world=written(state.world, record), late=None)

    # -- what is noticed ----------------------------------------------------------------------------------------

    def _noticing(self, state: Seats) -> Seats:
        """What the decider notes of seats that are vacant, and what is true of them."""
        view, last = state.world.view, state.world.view.previous
        if last is None or last.recalled or not last.seats:
            return state._replace(noticed=(), vacated=(), taken=(), causes=frozenset())
        causes = state.causes.intersection(last.ranks)
        at_work = [m for m in state.world.minds if _works_in(m, last) and is_member(state.world, m)]
        held = {mind.seat for mind in at_work if mind.member != mind.seat}
        manned = held.union(member.id for member in view.members)
        return state._replace(
            noticed=_vacancies(state.noticed, self.vacant(last, view.members), causes),
            vacated=_vacancies(state.vacated, last.ranks.keys() - manned, causes),
            taken=tuple(one for one in state.taken if one[0] in held),
            causes=causes,
        )

    # -- time, and what becomes of all when nothing more happens --------------------------------------------------

    def _passed(self, state: Seats) -> Seats:
        def older(at: float) -> float:
            return max(at - TICK, LONG_AGO)

        world = self._tick(state.world, TICK)
        read_at = world.view.read_at
        return state._replace(
            world=world._replace(view=replace(world.view, read_at=-inf if read_at == -inf else older(read_at))),
            noticed=tuple(one._replace(since=older(one.since)) for one in state.noticed),
            vacated=tuple(one._replace(since=older(one.since)) for one in state.vacated),
            taken=tuple((seat, older(at)) for seat, at in state.taken),
        )

    def _check_seats(self, state: Seats) -> None:
        """L1: when nothing more fails, all that live are in one round, in time."""
        path, elapsed = [], 0.0
        state = self._noticing(state._replace(late=None))
        while state not in self._ends:
            require("L1 it comes to an end", len(path) < 80)
            path.append(state)
            following = self._next(state)
            if following is None:
                self._check_together(state.world)
                break
            elapsed += following[0]
            state = self._noticing(following[1])
        require("L1 within the last call", elapsed <= self.longest)
        self._ends.update(path)

    def _next(self, state: Seats) -> tuple[float, Seats] | None:
        world = state.world
        for member in _strangers(world):
            return 0.0, _lost(state, member)
        settled = self._settled(world)
        if settled != world:
            return 0.0, state._replace(world=settled)
        for mind in world.minds:
            if self._is_called(mind) or (mind.at_work is not None and mind.ask.failed):
                return 0.0, state._replace(world=self._come_back(world, mind))
            if mind.at_work is not None and not is_member(world, mind):
                return 0.0, self._take_again(state, mind)
        if (record := self._decision(state)) is not None:
            return 0.0, self._published(state, record)
        if not world.view.members or self.decide(self._situation(state), self.options, 0.0).until is None:  # type: ignore[union-attr]
            return None
        return TICK, self._passed(state)

    def _check_together(self, world: State) -> None:
        now = world.view.previous
        rounds = {(mind.at_work.number, mind.at_work.roll) for mind in world.minds if mind.at_work is not None}
        require("S1 nobody works in a round that is over", len(rounds) <= 1)
        if any(now is None or now.number < number for number, _ in rounds):  # etcd has lost it: it runs on in silence
            require("L1 who asks is heard in a lost round", all(mind.at_work is not None for mind in world.minds))
            whole = all(mind.at_work.size == len(world.minds) for mind in world.minds if mind.at_work)
            require("L1 a lost round has all of its nodes", whole or not self.options.recall_on_loss)
            return
        if len(world.minds) < self.limits[0]:
            return
        require("L1 a round runs", now is not None and now.ready and not now.recalled)
        at_work = sum(mind.at_work is not None for mind in world.minds)
        require("L1 nobody is left out", at_work == min(self.limits[1], len(world.minds)))
        require("S1 nobody works in a round that is over", rounds <= {(now.number, now.roll)} if now else not rounds)


def _is_told(state: Seats) -> bool:
    """Whether somebody with a seat is known to be dead, or has said that it leaves."""
    return any(one.died for one in state.noticed) or any(m.ask.leaving for m in state.world.view.members)


def _grace(state: Seats, since: float) -> float:
    """How long those have to come back of whom the first went then."""
    last = state.world.view.previous
    assert last is not None
    many = 2 * len(state.vacated) > last.size or any(at > since - LEASE for _, at in state.taken)
    return LEASE if many else MOMENT


def _works_in(mind: Mind, round_: Round) -> bool:
    return mind.at_work is not None and rendezvous.is_same_round(mind.at_work, round_)


def _strangers(world: State) -> list[str]:
    """The members that are nobody's any more: their leases are still to end."""
    known = {mind.member for mind in world.minds}
    return [member.id for member in world.view.members if member.id not in known]


def _lost(state: Seats, member: str) -> Seats:
    """Its lease, and its key with it."""
    return state._replace(world=state.world._replace(view=view_without(state.world.view, member)))


def _beside(after: State, before: State) -> State:
    """All keys of before are there still, and those of members that came since."""
    old = {one.id for one in before.view.members}
    members = (*before.view.members, *(one for one in after.view.members if one.id not in old))
    return after._replace(view=replace(after.view, members=members))


def _ended(world: State, mind: Mind, view: RoundSituation) -> State:
    """No node of this name comes again: a process that is started anew has another one."""
    return without(world, mind)._replace(view=view, ended=world.ended | {mind.node})


def _died(state: Seats, mind: Mind) -> Seats:
    """Its sentinel says of all leases that it had what it died of, if it stood by one; then the last one ends."""
    world = state.world
    causes = {mind.member, mind.seat} if is_member(world, mind) else set()
    ended = _ended(world, mind, view_without(world.view, mind.member))
    return state._replace(world=ended, causes=state.causes | causes)


def _left(state: Seats, mind: Mind) -> Seats:
    """It says so in its key, which is there a while longer."""
    assert mind.at_work is not None
    parting = replace(mind.ask, seated=mind.at_work.number, holds=mind.seat, leaving="it leaves")
    said = _wrote(state.world, mind, parting)
    return state._replace(world=_ended(said, mind, said.view))


def _wrote(world: State, mind: Mind, ask: JoinRequest) -> State:
    """What says nothing about another round."""
    members = tuple(RoundCandidate(m.id, ask, 0.0) if m.id == mind.member else m for m in world.view.members)
    return changed(world, mind, ask=ask)._replace(view=replace(world.view, members=members, changed_at=0.0))


def _with_another_decider(state: Seats) -> Seats:
    """It has noticed nothing, and read the members just now."""
    view = state.world.view
    members = tuple(RoundCandidate(member.id, member.ask, 0.0) for member in view.members)
    view = replace(view, members=members, changed_at=0.0, previous_at=0.0, read_at=0.0)
    return state._replace(world=state.world._replace(view=view), noticed=())


def _vacancies(before: tuple[Vacancy, ...], vacant: Collection[str], causes: Collection[str]) -> tuple[Vacancy, ...]:
    """Each is noted once, with the cause that is known then."""
    noted = {one.seat: one for one in before}
    return tuple(noted.get(seat) or Vacancy(seat, 0.0, seat in causes) for seat in sorted(vacant))


def _noted(taken: tuple[tuple[str, float], ...], seat: str) -> tuple[tuple[str, float], ...]:
    return tuple(sorted({**dict(taken), seat: 0.0}.items()))
