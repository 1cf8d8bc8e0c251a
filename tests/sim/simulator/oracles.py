"""What must hold in every history, judged at every revision of etcd, and at everything that a user is told."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import store_history
from store_history import Operation

from ftcoord.coordination.address import Job
from ftcoord.core.death_records import parse_death
from ftcoord.core.layout import (
    decided_key,
    decider_key,
    member_key,
    member_of,
    members_span,
    number_of,
    roll_key,
    roster_key,
    rounds_span,
    run_prefix,
    store_values_span,
)
from ftcoord.core.office import parse_office
from ftcoord.core.quorum_head import parse_quorum
from ftcoord.core.quorum_records import QuorumRecord, ReplicaRecord, parse_replica
from ftcoord.core.rendezvous_records import AnyRound, Round, RoundHead, parse_decided
from ftcoord.core.round_situation import Restart
from ftcoord.core.store_values import plain
from ftcoord.errors import StateError
from ftcoord.etcd.api import Event, KeyValue
from simulator.quorum_rules import KeptOut, Last, Member, as_read, may_decide
from simulator.timer_rules import TimersHeld
from simulator.vote_rules import RankCall, RankCalls

RUN: Final = run_prefix("/ftcoord/v1", "run")
STORE: Final = "/ftcoord/v1/@store/shared/"
FASTEST: Final = 1.011
"""How fast the fastest clock of a process is."""


GARBAGE: Final = (b"", b"garbage", b"{}", b'{"v":1}', b'{"v":9,"number":3}', b"\xff\xfe")
"""What somebody writes into keys now and then."""


def is_member_key(key: str) -> bool:
    """Whether a key is among the member keys of any group."""
    return key.rpartition("/")[0].endswith("/members")


class Violation(AssertionError):
    """A history that must not be. The text begins with the oracle that says so."""

    def __init__(self, oracle: str, text: str) -> None:
        super().__init__(f"{oracle}: {text}")
        self.oracle = oracle


def require(oracle: str, holds: object, text: str | Callable[[], str]) -> None:
    """Raises Violation unless it holds. A text that costs something is made only then."""
    if not holds:
        raise Violation(oracle, text if isinstance(text, str) else text())


@dataclass(frozen=True)
class StartedRound:
    """What a handler told its agent."""

    number: int
    roll: str
    rank: int
    size: int
    address: str
    port: int


class RoundOracle:
    """S1, S2, S3, R5 and R7 of the rounds, as etcd holds them and as handlers tell them.

    Args:
        nnodes: the fewest and the most nodes of a round.
        is_there: whether a member has a key.
        restart: which runs that are over may go on.
    """

    def __init__(self, nnodes: tuple[int, int], is_there: Callable[[str], bool], restart: Restart) -> None:
        self._nnodes, self._is_there, self._restart = nnodes, is_there, restart
        self.record: AnyRound | None = None
        self.done: set[tuple[int, str]] = set()
        """The rounds whose workers have finished."""
        self.ends: set[tuple[int, str, str]] = set()
        """The rounds in which an agent has ended the run, and how: whether it did depends on the others."""
        self._was_restored = self._is_lost = False
        self._drained: set[str] = set()
        """As long as etcd has not lost the order."""
        self._ready: set[tuple[int, str]] = set()
        self._starts: dict[object, tuple[int, str, int]] = {}
        self._ranks: dict[tuple[int, str, int], str] = {}
        self._addresses: dict[tuple[str, int], tuple[int, str]] = {}
        self._numbers: dict[str, int] = {}

    def decided(self, kv: KeyValue) -> None:
        """Somebody has written the record. What is none is the operator's garbage."""
        if kv.version == 1:
            self._lose()
        try:
            new = parse_decided(kv.key, kv.value)
        except StateError:
            self._lose()
            return
        old, self.record = self.record, new
        is_ended = not new.closed or any(self._is_end(new, *end) for end in self.ends)
        require("L2 only its workers end the run", is_ended, f"round {new.number} is closed: {new.closed}")
        least, most = self._nnodes
        is_whole = least <= new.size <= most or not new.size  # one of which nobody knows the seats has none
        require("S1 min <= n <= max", is_whole, f"round {new.number} has {new.size} seats of {least} to {most}")
        if new.ready:
            self._ready.add((new.number, new.roll))
        if old is None:
            return
        require("S2 rounds only grow", new.number >= old.number, f"{new.number} after {old.number}")
        if new.number > old.number and isinstance(new, Round):
            drained = new.nodes.keys() & self._drained
            require("S1 nobody that is drained is seated", not drained, f"{drained} in round {new.number}")
            if isinstance(old, Round) and new.seats and not self._is_lost:
                self._judge_seats(old, new)
            self._is_lost = False
        if old.closed:
            require("R7 a closed run stays closed", new.closed or self.may_go_on(old), f"{new} after {old}")
        self._drained |= {*new.drained}
        is_lost = new.recalled and not new.size  # the operator has deleted the record, and nobody knows its seats
        if new.number == old.number and old.size and not is_lost:
            same = (new.roll, new.size, new.address, new.port) == (old.roll, old.size, old.address, old.port)
            require("S1 one membership a round", same, f"round {new.number} has other seats")
            require("S1 a recall is not taken back", new.recalled or not old.recalled, f"round {new.number}")
            require("S1 a round stays ready", new.ready or not old.ready, f"round {new.number}")

    def _lose(self) -> None:
        """The operator has deleted or overwritten the record: no decider knows its seats, or who is drained."""
        self._is_lost = True
        self._drained.clear()

    def _is_end(self, closed: AnyRound, number: int, roll: str, outcome: str) -> bool:
        """Whether who has ended that round may have closed this one: if etcd has lost that, an earlier one."""
        is_this = (number, roll) == (closed.number, closed.roll) or (self._was_restored and number >= closed.number)
        return is_this and outcome == closed.outcome

    def may_go_on(self, closed: AnyRound) -> bool:
        """Whether new agents may go on from a run that is over."""
        return self._restart == "always" or (self._restart == "failed" and closed.outcome == "failed")

    def _judge_seats(self, old: Round, new: Round) -> None:
        before, after = ([one.node for one in round_.seats] for round_ in (old, new))
        first, *others = [node for node in before if node in after] or [after[0]]
        kept = {0: first} | {before.index(node): node for node in others if before.index(node) < len(after)}
        moved = {rank: node for rank, node in kept.items() if after[rank] != node}
        require("R5 ranks are kept", not moved, lambda: f"{moved} have other ranks in {after} after {before}")
        stay = [one.host for one in old.seats if self._is_there(one.member)]
        may_stay = not (old.closed and stay) or self._was_restored
        require("R7 all leave before a run goes on", may_stay, lambda: f"{stay} are there, and {new} is decided")

    def restored(self) -> None:
        self.record, self._was_restored = None, True
        self._drained.clear()

    def started(self, process: str, now: StartedRound) -> None:
        """A handler has told its agent of a round."""
        require("S1 a round starts when it is ready", (now.number, now.roll) in self._ready, f"{process}: {now}")
        require("S2 rounds only grow", now.number > self._numbers.get(process, 0), f"{process} starts {now} again")
        self._numbers[process] = now.number
        round_ = (now.number, now.roll) if self._was_restored else now.number
        told = (now.size, now.address, now.port)
        require("S1 one membership a round", self._starts.setdefault(round_, told) == told, f"{process}: {now}")
        holder = self._ranks.setdefault((now.number, now.roll, now.rank), process)
        require("S1 a rank has one holder", holder == process, f"{process} and {holder}: {now}")
        require("S1 ranks are 0 to n-1", 0 <= now.rank < now.size, f"{process}: {now}")
        other = self._addresses.setdefault((now.address, now.port), (now.number, now.roll))
        require("a round has a fresh address", other == (now.number, now.roll), f"{process}: {now}, as {other}")


_Which: TypeAlias = "tuple[int, int, float, str]"


def _which(quorum: QuorumRecord) -> _Which:
    """What tells a quorum from all others, also from one of another history of etcd."""
    return quorum.number, quorum.id, quorum.created, quorum.by


class QuorumOracle:
    """torchft's rules, S2 and S5 of the quorums.

    Args:
        owner: the name of the process that a member belongs to, by the member's id.
    """

    def __init__(self, job: Job, owner: Callable[[str], str]) -> None:
        self._job, self._owner = job, owner
        self._knows: dict[str, tuple[int, int]] = {}
        """The number and the id of the highest quorums that a process was told of, or decided."""
        self._members: dict[str, tuple[Member, ReplicaRecord]] = {}
        self._views: list[dict[str, Member]] = [{}]
        self._lost_views: list[dict[str, Member]] = []
        """What the members were since the last decision, in an etcd that was restored since."""
        self._restored_from: list[dict[str, Member]] = []
        """Such views, until the restored etcd's record is known."""
        self._views_under: dict[_Which, list[dict[str, Member]]] = {}
        """What the members were while a quorum was the last one. A decider that was stopped then may know no more, and
        a restore may make that quorum the last one again, whatever else was restored or decided in between."""
        self.last: QuorumRecord | None = None
        self._last = Last(frozenset(), frozenset(), {}, -1e9)
        self.kept_out = KeptOut()
        self._by_number: dict[int, QuorumRecord] = {}
        self._by_id: dict[int, frozenset[str]] = {}
        self._told: dict[str, QuorumRecord] = {}
        self._asked_since: dict[tuple[str, int], float] = {}
        self._decided_at: dict[_Which, float] = {}
        self._lost: frozenset[_Which] = frozenset()
        """The quorums that were decided before etcd was restored."""
        self._asks_since: dict[str, float] = {}
        """Since when a process has asked: etcd may hear of that much later."""
        self._profiles: set[str] = set()
        self._garbled = self._was_restored = False

    def member(self, event: Event, now: float) -> None:
        """A member has written its record, or is gone."""
        kv, id_ = event.kv, member_of(event.kv.key)
        known = self._members.pop(id_, None)
        try:
            record = parse_replica(kv.key, kv.value) if event.kind == "put" and kv.lease else None
        except StateError:
            record = None
        if record is not None:
            request = record.request
            before = known[0] if known and known[1].asked == record.asked else None
            said = before.said if before else kv.mod_revision
            # Also through a restore: who decides has seen it since then.
            since = self._asked_since.setdefault((id_, record.asked), now)
            one = Member(
                id_,
                request.replica_id,
                record.asked,
                record.profile,
                request.shrink_only,
                since,
                kv.create_revision,
                said,
                kv.mod_revision,
                (record.heard, record.after),
            )
            self._members[id_] = one, record
        self._views.append({id_: one for id_, (one, _) in self._members.items()})
        self.kept_out.see(self._views[-1].values(), self._last, now)

    def decided(self, head: KeyValue, roster: KeyValue | None, with_: Sequence[str], now: float) -> None:
        """A quorum was decided: of what etcd held at some revision since the last one, and of what these members have
        written in the same transaction."""
        try:
            new = parse_quorum(head.key, head.value, roster.value if roster else None)
        except StateError:
            self._garbled = True
            return
        old, views, self._views = self.last, self._views, self._views[-1:]
        before, self.last = self._last, new
        if old is not None:
            self._views_under.setdefault(_which(old), []).extend(views)
        # A decision may be on its way while etcd is restored, or its decider may know the restored record, from a guard
        # that failed, before its watch has brought it the restored members. So the first decision after the restore may
        # rest on the members as they were before. A decider that was stopped may have missed more of them.
        lost, self._restored_from = self._restored_from, []
        lost_views, self._lost_views = self._lost_views, lost
        answered = {one.member: one.asked for one in (*new.idle, *new.seats)}
        names_now = frozenset(one.request.replica_id for one in new.seats)
        which = _which(new)
        is_known = which in self._decided_at  # judged before: its request arrives again, and etcd has lost the first
        at = self._decided_at.setdefault(which, now)
        self._last = Last(names_now, frozenset(new.profiles), answered, at)
        self.kept_out.see(self._views[-1].values(), self._last, now)
        garbled, self._garbled = self._garbled, False
        names = [one.request.replica_id for one in new.seats]
        require("S5 no quorum is empty", names, f"quorum {new.number}")
        require("S1 one seat for each", len(set(names)) == len(names), f"quorum {new.number}: {names}")
        if old is not None and not (garbled and self._is_forgotten(old, new, views)):
            self._check_numbers(old, new)
        self._learn(self._owner(new.by), new)
        wait = self._job.join_timeout_ms / 1000 / FASTEST - 0.01
        own = {id_: self._members[id_][0] for id_ in with_ if id_ in self._members}
        its_ask = self._asks_since.get(self._owner(new.by), now)
        profiles = frozenset(self._profiles)
        self._profiles.update(new.profiles)

        under = self._views_under[_which(old)] if old is not None and self._was_restored else []

        def allowed() -> Iterator[frozenset[str] | None]:
            """Of the newest view first, for mostly it is the one."""
            for view in reversed((*views, *lost_views, *under)):
                for seen in (view | own, view) if own else (view,):
                    if (decider := seen.get(new.by)) is not None:  # it counts from when it asked itself
                        seen = {**seen, new.by: replace(decider, since=min(decider.since, its_ask))}
                    members = [*seen.values()]
                    for last in as_read(before, members, profiles):
                        yield may_decide(members, last, self._job.min_replicas, wait, now)

        def problem() -> str:
            texts = sorted({str(sorted(one)) for one in allowed() if one})
            return f"quorum {new.number} of {sorted(names)} after {sorted(before.names)}; allowed were {texts}"

        require("torchft's rules", garbled or is_known or names_now in allowed(), problem)

    def _is_forgotten(self, old: QuorumRecord, new: QuorumRecord, views: Sequence[Mapping[str, Member]]) -> bool:
        """Whether nobody can know of the last quorum, whose record somebody has deleted: not who decided, nor a member
        that was there when it did; nor how high etcd's revision was, because etcd was restored."""
        knows = [
            *(min(max((one.knows[part] for one in view.values()), default=0) for view in views) for part in (0, 1))
        ]
        own = self._knows.get(self._owner(new.by), (0, 0))
        number, id_ = (max(pair) for pair in zip(knows, own, strict=True))
        require("S2 quorums only grow", new.number > number, f"{new.number}, and the members know {number}")
        require("S2 ids only grow", new.id >= id_, f"id {new.id}, and the members know {id_}")
        if number >= old.number or not self._was_restored:
            return False
        # Who was told of it is dead, or out of the job: others may hear of another one by its number.
        self._by_number = {one: what for one, what in self._by_number.items() if one < new.number}
        self._by_id = {one: names for one, names in self._by_id.items() if one < new.id}
        return True

    def _learn(self, process: str, quorum: QuorumRecord) -> None:
        number, id_ = self._knows.get(process, (0, 0))
        self._knows[process] = max(number, quorum.number), max(id_, quorum.id)

    def _check_numbers(self, old: QuorumRecord, new: QuorumRecord) -> None:
        require("S2 quorums only grow", new.number > old.number, f"{new.number} after {old.number}")
        require("S2 ids only grow", new.id >= old.id, f"id {new.id} after {old.id}")
        failed = any(one.request.commit_failures > 0 for one in new.seats)
        if new.id == old.id:
            require("S2 an id is of one membership", new.names == old.names and not failed, f"id {new.id}")

    def vanished(self) -> None:
        """The operator has deleted the record, or garbled it."""
        self._garbled = True

    def restored(self, events: Iterable[Event], now: float) -> None:
        self._restored_from = [*self._views, *self._lost_views]
        if self.last is not None:
            self._views_under.setdefault(_which(self.last), []).extend(self._views)
        self._members, self._views, self.last, self._garbled = {}, [{}], None, True
        self._was_restored = True
        # Who is not back yet, or is just being told, may know a number that its decider does not: it must not hear
        # another one by it.
        self._by_number, self._by_id, self._lost = {}, {}, frozenset(self._decided_at)
        self.kept_out.see((), self._last, now)
        for event in events:
            self.member(event, now)

    def asks(self, process: str, now: float) -> None:
        """A replica begins to ask for a quorum."""
        self._asks_since[process] = now

    def left(self, process: str) -> None:
        """Its replica has left the job: what comes next in this process is another one, and knows nothing."""
        self._knows.pop(process, None)
        self._told.pop(process, None)

    def told(self, process: str, name: str, quorum: QuorumRecord) -> None:
        """A replica was told of a quorum."""
        before = self._told.get(process)
        require("a replica is in its quorum", name in quorum.names, f"{process}: {quorum.number}")
        if before is not None:
            require("S2 quorums only grow", quorum.number > before.number, f"{process}: {quorum.number} again")
            require("S2 ids only grow", quorum.id >= before.id, f"{process}: id {quorum.id} after {before.id}")
            known = quorum.id != before.id or quorum.names == before.names
            require("S2 an id is of one membership", known, f"{process}: {quorum.id} is {sorted(quorum.names)} now")
        self._told[process] = quorum
        self._learn(process, quorum)
        if _which(quorum) in self._lost:
            return
        same = self._by_number.setdefault(quorum.number, quorum)
        require("S1 one quorum a number", same == quorum, f"two quorums have the number {quorum.number}")
        names = self._by_id.setdefault(quorum.id, quorum.names)
        require("S2 an id is of one membership", names == quorum.names, f"id {quorum.id}: {sorted(names)}")


@dataclass
class Oracles:
    """All of them, fed with every change of etcd."""

    job: Job
    owner: Callable[[str], str]
    """The name of the process that a member belongs to, by the member's id."""
    is_dead: Callable[[str], bool]
    """Whether that process was killed, by the member's id."""
    is_killed: Callable[[str], bool]
    """Whether a process was killed, by its name."""
    nnodes: tuple[int, int]
    """The fewest and the most nodes of a round."""
    restart: Restart
    """Which runs that are over new agents may go on from."""
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rounds = RoundOracle(self.nnodes, lambda member: member_key(RUN, member) in self.kvs, self.restart)
        self.quorums = QuorumOracle(self.job, self.owner)
        self.was_restored = False
        self.operations: list[Operation] = []
        self.timers = TimersHeld()
        self.calls: list[tuple[str, RankCalls]] = []
        """What the ranks of each manager called for, and its process."""
        self.kvs: dict[str, KeyValue] = {}
        self._store: dict[str, list[tuple[int, bytes | None]]] = {}
        self._fences = rounds_span(RUN)
        self._round_stores = f"{RUN}/store/"
        self._data = store_values_span(STORE).start
        self._members = members_span(self.job.prefix)
        self._head = decided_key(self.job.prefix)
        self._roster = roster_key(self._head)
        self._decided: dict[str, Callable[[KeyValue], None]] = {decided_key(RUN): self.rounds.decided}
        self._groups = {decided_key(prefix): prefix for prefix in (RUN, self.job.prefix)}

    def committed(self, events: Sequence[Event], now: float) -> None:
        """etcd has done this, in one revision. Raises Violation."""
        self.counts["changes"] += len(events)
        is_quorum = False
        for event in events:
            key = event.kv.key
            if event.kind == "put":
                self.kvs[key] = event.kv
            else:
                self.kvs.pop(key, None)
            is_quorum |= key in (self._head, self._roster)
        for event in events:
            self._judge(event, now)
        if is_quorum:
            with_ = [member_of(event.kv.key) for event in events if event.kv.key in self._members]
            is_decided = any(event.kind == "put" and event.kv.key == self._head for event in events)
            self._judge_quorum(now, with_, is_decided=is_decided)

    def restored(self, kvs: Iterable[KeyValue], now: float) -> None:
        """etcd holds this now, whatever it held before."""
        self.was_restored = True
        self.kvs = {kv.key: kv for kv in kvs}
        self.rounds.restored()
        self.quorums.restored([Event("put", kv) for kv in self.kvs.values() if kv.key in self._members], now)
        for key, kv in self.kvs.items():
            if key in self._decided:
                self._decided[key](kv)
        self._judge_quorum(now)

    def leftovers(self) -> list[str]:
        """The keys of rounds that are over, when all have left: what the last one has stays for a while."""
        last = self.rounds.record
        number, roll = (last.number, last.roll) if last is not None else (0, "")
        fences = [key for key in self.kvs if key in self._fences and number_of(key) != number]
        here = f"{self._round_stores}{number}/"
        stores = [key for key in self.kvs if key.startswith(self._round_stores) and not key.startswith(here)]
        rolls = [key for key in self.kvs if key.startswith(f"{RUN}/rolls/") and key.split("/")[-2] != roll]
        return [*fences, *stores, *rolls]

    def reaped(self, by: str, worker: str, now: float) -> None:
        """A worker is about to be killed, at that time of its host's clock."""
        self.counts["reaped"] += 1
        may = self.timers.may_be_killed(worker, now)
        require("timers kill only what was late", may, lambda: f"{by} kills {worker} at {now}: {self.timers}")

    def voted(self, process: str, calls: RankCalls, vote: RankCall) -> None:
        """A rank was told what its vote came to."""
        problem = calls.problem_of_vote(vote)
        require("a vote is the AND of all ranks", not problem, f"{process}, {vote}: {problem}")

    def finish(self) -> None:
        """Votes and S4, when nothing is under way any longer."""
        for process, calls in self.calls:
            for vote in calls.votes:
                self.voted(process, calls, vote)
        states = {key.removeprefix(self._data): history for key, history in self._store.items()}
        findings = store_history.check(self.operations, states)
        require("S4 a store operation happens once", not findings, lambda: repr(findings)[:2000])

    def _judge(self, event: Event, now: float) -> None:
        kv = event.kv
        if kv.key in self._decided:
            if event.kind == "put":
                self.counts["decisions"] += 1
                self._decided[kv.key](kv)
                self._judge_decider(kv)
                self._judge_roll(kv)
        elif kv.key in self._members:
            self.quorums.member(event, now)
        elif kv.key in self._fences:
            self._judge_fences(event)
        elif kv.key.startswith(self._round_stores):
            number = int(kv.key.removeprefix(self._round_stores).partition("/")[0])
            open_ = event.kind == "delete" or f"{self._fences.start}{number}" in self.kvs
            require("S3 no late writes", open_, f"{kv.key} is written, and round {number} is over")
            holder = self.kvs.get(member_key(RUN, f"{kv.lease:016x}"))
            is_members = kv.lease and holder is not None and holder.lease == kv.lease  # somebody may write such a key
            require("a round's store outlives its members", not is_members, f"{kv.key} ends with {kv.lease:x}")
        elif kv.key.startswith(self._data):
            value = plain(kv.value, kv.version) if event.kind == "put" else None
            self._store.setdefault(kv.key, []).append((kv.mod_revision, value))
        elif "/deaths/" in kv.key and event.kind == "put":
            member = member_of(kv.key)
            may_be = self.is_dead(member) or parse_death(kv.key, kv.value).left
            require("who is said to be dead is dead", may_be, f"{kv.key}: {self.owner(member)} lives")

    def _judge_fences(self, event: Event) -> None:
        if event.kind == "put":
            now, number = self.rounds.record, number_of(event.kv.key)
            others = [key for key in self.kvs if key in self._fences and number_of(key) != number]
            require("S3 one round may be written to", not others, f"{event.kv.key} begins, and {others} are there")
            # The record is written in the same revision, and its event may come first or last.
            grows = now is None or number >= now.number
            require("S2 rounds only grow", grows, lambda: f"the fence of {number} in {now}")

    def _judge_decider(self, kv: KeyValue) -> None:
        if kv.value in GARBAGE:
            return
        by = json.loads(kv.value)["by"].partition(" ")[0]
        if owner := self.owner(by):  # else it was an operator, who drains a node
            office = self.kvs.get(decider_key(self._groups[kv.key]))
            holder = parse_office(office.key, office.value).member if office is not None else ""
            require("S1 who decides has the office", by == holder, f"{by} of {owner} decides {kv.key}, not {holder}")

    def _judge_roll(self, kv: KeyValue) -> None:
        """Who reads a head must find all chunks of its roll."""
        head = self.rounds.record
        if kv.key == decided_key(RUN) and isinstance(head, RoundHead):
            keys = [roll_key(RUN, head.roll, chunk) for chunk in range(head.chunks)]
            lost = [key for key in keys if key not in self.kvs]
            require("S1 a round has its whole roll", not lost, f"round {head.number} names {lost}")

    def _judge_quorum(self, now: float, with_: Sequence[str] = (), *, is_decided: bool = False) -> None:
        head = self.kvs.get(self._head)
        if head is None:
            self.quorums.vanished()
        else:
            self.counts["decisions"] += 1
            roster = self.kvs.get(self._roster)
            if is_decided:
                self._judge_decider(head)
                is_whole = head.value in GARBAGE or _can_be_read(head, roster)
                require("S1 a quorum has its roster", is_whole, f"{head.value!r} goes with {roster}")
            self.quorums.decided(head, roster, with_, now)


def _can_be_read(head: KeyValue, roster: KeyValue | None) -> bool:
    try:
        parse_quorum(head.key, head.value, roster.value if roster else None)
    except StateError:
        return False
    return True
