"""A small world of replicas that act only as `core.quorum.outlook` says, around one decider.

Each hears late, may miss quorums altogether, loses its lease and comes back under a new one, gives up, dies, and shares
its replica id with another one where a world says so. It leaves its profile out of a request when the quorum that it
heard of has that; the decider then knows it from the last quorum only. Time passes in ticks: the join time-out is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import exploring
from exploring import replace
from invariants import check_quorum, require

from ftcoord.core import quorum
from ftcoord.core.quorum import QuorumCandidate, QuorumOptions, QuorumSituation
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest
from ftcoord.core.verdict import Next, Outlook, Publish, Standing, Verdict, Wait

QuorumOutlook = Callable[[QuorumRecord | None, Sequence[str], str, int, QuorumRequest | None], Outlook[int]]
TICK: Final = 1.0
ASKS: Final = 3
"""How often a replica that has its answer asks again while others wait: as one that goes on training."""
OLDEST: Final = -2.0
"""What is older than that stays that old."""


class Mind(NamedTuple):
    """What a replica does and knows.

    Args:
        name: of its process; the first letter is its replica id.
        ids: all members that it was, the present one last.
        asked: its last request.
        waits: whether that is open.
        asked_after: the number of the quorum that was decided last when it asked.
        heard: the last quorum that it heard of.
        answer: the last quorum that it returned to its caller.
        short: whether its last request was written without its profile.
    """

    name: str
    ids: tuple[str, ...]
    asked: int = 0
    waits: bool = False
    asked_after: int = 0
    heard: QuorumRecord | None = None
    answer: QuorumRecord | None = None
    short: bool = False

    @property
    def request(self) -> QuorumRequest:
        """What it asks. Two processes with one replica id have two addresses, and so two profiles."""
        return QuorumRequest(self.name[0], self.name, "", 0, 1, False, "", 0, ())


class State(NamedTuple):
    """The world. Members are oldest first; their revisions are ranks among those that are there. A member is whole here
    if it wrote its profile; a decider may know the profile of another one too."""

    members: tuple[QuorumCandidate, ...] = ()
    record: QuorumRecord | None = None
    record_at: float = OLDEST
    minds: tuple[Mind, ...] = ()


Step = tuple[str, State]
START: Final = State()


@dataclass
class QuorumWorld:
    """The rules of one exploration, and what it found.

    Args:
        names: of the processes; two that begin alike are two processes with one replica id.
    """

    names: Sequence[str] = ("a", "b")
    options: QuorumOptions = field(default_factory=lambda: QuorumOptions(1, TICK))
    outlook: QuorumOutlook = quorum.outlook
    met: set[Standing] = field(default_factory=set)
    _verdicts: dict[tuple[object, ...], Verdict[QuorumRecord]] = field(default_factory=dict)
    _calm: set[State] = field(default_factory=set)

    def walk(self, *events: str) -> State:
        """Where these events lead, one after the other."""
        return exploring.walk(START, self._events, events)

    def explore(self, depth: int, start: State = START) -> int:
        """Every order of events up to this depth: the number of states. InvariantBroken says which events led there."""
        return exploring.explore(start, self._events, self._check_calm, depth)

    # -- what can happen ----------------------------------------------------------------------------------------

    def _events(self, state: State) -> Iterator[Step]:
        for name, after in self._all_events(state):
            yield name, _timed(after)

    def _all_events(self, state: State) -> Iterator[Step]:
        yield "a tick", _passed(state)
        if (after := self._decided(state)) is not None:
            yield "decided", after
        for name in self.names:
            if all(mind.name != name for mind in state.minds):
                yield f"{name} comes", self._come(state, Mind(name, ()))
        for mind in state.minds:
            yield from self._events_of(state, mind)

    def _events_of(self, state: State, mind: Mind) -> Iterator[Step]:
        name = mind.name
        minds = tuple(one for one in state.minds if one is not mind)
        yield f"{name} dies", state._replace(members=_without(state, mind), minds=minds)
        yield f"{name} loses its lease", self._come(state._replace(members=_without(state, mind), minds=minds), mind)
        if mind.heard != state.record:
            yield f"{name} hears", _with(state, mind, heard=state.record)
        if not mind.waits:
            yield f"{name} asks", self._ask(state, mind)
            return
        if _hidden(state, mind):
            yield f"{name} writes again", _wrote_again(state, mind)
        yield f"{name} gives up", _said(_with(state, mind, waits=False), mind, 0)
        if self._look(mind).next is not Next.WAIT:
            yield f"{name} acts", self._act(state, mind)

    def _look(self, mind: Mind) -> Outlook[int]:
        look = self.outlook(mind.heard, mind.ids, mind.name[0], mind.asked, mind.request if mind.short else None)
        self.met.add(look.standing)
        return look

    def _come(self, state: State, mind: Mind) -> State:
        """As a new member, which asks what its process has open."""
        used = _ids(state) | {*mind.ids}  # a lease's id never comes again
        member = next(text for i in range(99) if (text := f"{mind.name}{i}") not in used)
        now = mind._replace(ids=(*mind.ids, member))
        asked = mind.asked if mind.waits else 0
        one = QuorumCandidate(member, mind.request, asked, _known(mind), 0.0, 99, 99, 99, not mind.short)
        return _ranked(
            state._replace(
                members=(*state.members, one), minds=tuple(sorted((*state.minds, now), key=lambda one: one.name))
            )
        )

    def _ask(self, state: State, mind: Mind) -> State:
        after = state.record.number if state.record else 0
        asked, short = mind.asked + 1, mind.heard is not None and mind.heard.has_profile_of(mind.request)
        now = mind._replace(asked=asked, waits=True, asked_after=after, short=short)
        return _said(_with(state, now), now, asked)

    def _act(self, state: State, mind: Mind) -> State:
        """What the outlook says, and nothing else."""
        look, heard = self._look(mind), mind.heard
        assert heard is not None
        seated = mind.name[0] in heard.names
        if look.standing is Standing.PENDING:
            unknown = mind.short and not heard.has_profile_of(mind.request)
            require("only an unknown profile is written again", look.next is Next.WRITE and unknown)
            whole = mind._replace(short=False)
            return _said(_with(state, whole), whole, mind.asked)
        if look.standing is Standing.MISSED:
            require("a replica that has its answer does not ask again", look.next is Next.WRITE and not seated)
            after = self._ask(state, mind)
            mine = next(one for one in after.minds if one.name == mind.name)
            again = self._look(mine).standing
            require("L1 who asks again waits for the next", again is Standing.PENDING)
            return after
        require("only an answer ends a request", look.standing is Standing.ANSWERED and look.next is Next.RETURN)
        require("S1 an answer has a seat for the replica", seated)
        require("S1 nobody is answered by a quorum from before it asked", heard.number > mind.asked_after)
        if (before := mind.answer) is not None:
            require("S2 nobody is answered twice by one quorum", heard.number > before.number)
            require("S2 ids never go back", heard.id >= before.id)
            require("S2 an id is of one membership", heard.id > before.id or heard.names == before.names)
        answered = _with(state, mind, waits=False, answer=heard)
        # A seat of an earlier member may leave the request of the present one open.
        return answered if mind.ids[-1] in heard.answered else _said(answered, mind, 0)

    def _verdict(self, state: State) -> Verdict[QuorumRecord]:
        """That of one situation is computed once: many states differ only in what the members know.

        Times that count for nothing make no difference, be they as new as they can be or as old.
        """
        key = (state.members, state.record, state.record_at)
        if (known := self._verdicts.get(key)) is None:
            known = self._verdicts[key] = self._judged(state)
            other = _timed(state, 0.0)
            require("no rule looks at a time that counts for nothing", known == self._judged(other))
        return known

    def _judged(self, state: State) -> Verdict[QuorumRecord]:
        record = state.record
        members = [
            one if one.is_whole or record is None else replace(one, is_whole=record.has_profile_of(one.request))
            for one in state.members
        ]
        situation = QuorumSituation(members, record, state.record_at)
        verdict = quorum.decide(situation, self.options, 0.0)
        if isinstance(verdict, Publish):
            check_quorum(situation, self.options, verdict.record)
        return verdict

    def _decided(self, state: State) -> State | None:
        verdict = self._verdict(state)
        return state._replace(record=verdict.record, record_at=0.0) if isinstance(verdict, Publish) else None

    # -- what becomes of all when nothing more happens ------------------------------------------------------------

    def _check_calm(self, state: State) -> None:
        """L1: when nothing more fails and all go on asking, all are answered, also processes of one replica id."""
        path, state = list[State](), _timed(state)
        asks = Counter({mind.name: 0 for mind in state.minds})
        while state not in self._calm:
            require("L1 it comes to an end", len(path) < 90)
            path.append(state)
            following = self._next_calm(state, asks)
            if following is None:
                self._check_end(state)
                break
            state = _timed(following)
        # Of the later states it is not known what becomes of them with nobody having asked before.
        self._calm.update(path[:1])

    def _next_calm(self, state: State, asks: Counter[str]) -> State | None:
        for mind in state.minds:
            if mind.heard != state.record:
                return _with(state, mind, heard=state.record)
            if mind.waits and self._look(mind).next is not Next.WAIT:
                return self._act(state, mind)
            if mind.waits and _hidden(state, mind):
                return _wrote_again(state, mind)
        if (after := self._decided(state)) is not None:
            return after
        verdict = self._verdict(state)
        if isinstance(verdict, Wait) and verdict.until is not None:
            return _passed(state)
        someone_waits = any(mind.waits for mind in state.minds)
        for mind in sorted(state.minds, key=lambda one: asks[one.name]):
            if not mind.waits and asks[mind.name] < (ASKS if someone_waits else 1):
                asks[mind.name] += 1
                return self._ask(state, mind)
        return None

    def _check_end(self, state: State) -> None:
        names = {mind.name[0] for mind in state.minds}
        waiting = any(mind.waits for mind in state.minds)
        require("L1 nobody waits for ever", not waiting or len(names) < self.options.min_replicas)


def _timed(state: State, idle: float = OLDEST) -> State:
    """The one that is explored of those that differ only in times that count for nothing, which are this one then.

    `joined` counts while the member has a request open, and is set by each request. When the record came counts while
    somebody has one open: who asks later joins later than that, and a quorum waits for the later of both.
    """
    answered = state.record.answered if state.record else {}
    opens = [one.asked > answered.get(one.member, 0) for one in state.members]
    members = tuple(
        one if is_open or one.joined == idle else replace(one, joined=idle)
        for one, is_open in zip(state.members, opens, strict=True)
    )
    return state._replace(members=members, record_at=state.record_at if any(opens) else idle)


def _known(mind: Mind) -> int:
    """The highest quorum id that it heard of."""
    return max((one.id for one in (mind.heard, mind.answer) if one is not None), default=0)


def _ids(state: State) -> set[str]:
    """All that stand somewhere: no new member may have one of these."""
    records = [state.record, *(mind.heard for mind in state.minds), *(mind.answer for mind in state.minds)]
    ids = {member for mind in state.minds for member in mind.ids} | {one.member for one in state.members}
    return ids.union(*(record.answered for record in records if record))


def _with(state: State, mind: Mind, **changed: object) -> State:
    new = mind._replace(**changed)  # type: ignore[arg-type]
    return state._replace(minds=tuple(new if one.name == mind.name else one for one in state.minds))


def _without(state: State, mind: Mind) -> tuple[QuorumCandidate, ...]:
    return tuple(one for one in state.members if one.member != mind.ids[-1])


def _said(state: State, mind: Mind, asked: int) -> State:
    """Its member writes what it asks, or that it asks nothing."""
    new = (
        replace(one, asked=asked, after=_known(mind), joined=0.0, asked_at=99, wrote_at=99, is_whole=not mind.short)
        if one.member == mind.ids[-1]
        else one
        for one in state.members
    )
    return _ranked(state._replace(members=tuple(new)))


def _ranked(state: State) -> State:
    """Revisions as ranks: only their order matters."""
    revisions = {at for one in state.members for at in (one.came_at, one.asked_at, one.wrote_at)}
    rank = {at: place for place, at in enumerate(sorted(revisions), 1)}
    return state._replace(
        members=tuple(
            replace(one, came_at=rank[one.came_at], asked_at=rank[one.asked_at], wrote_at=rank[one.wrote_at])
            for one in state.members
        )
    )


def _hidden(state: State, mind: Mind) -> bool:
    """Whether a member of its replica id came after this replica last wrote."""
    mine = next(one for one in state.members if one.member == mind.ids[-1])
    return any(
        one.came_at > mine.wrote_at for one in state.members if one.request.replica_id == mine.request.replica_id
    )


def _wrote_again(state: State, mind: Mind) -> State:
    members = (replace(one, wrote_at=99) if one.member == mind.ids[-1] else one for one in state.members)
    return _ranked(state._replace(members=tuple(members)))


def _passed(state: State) -> State:
    members = tuple(replace(one, joined=max(one.joined - TICK, OLDEST)) for one in state.members)
    return state._replace(members=members, record_at=max(state.record_at - TICK, OLDEST))
