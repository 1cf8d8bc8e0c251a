"""What must hold in every history, judged at every revision of etcd, and at everything that a user is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import store_history
from store_history import Operation

from ftcoord.coordination.address import Job
from ftcoord.core.death_records import parse_death
from ftcoord.core.layout import (
    all_seats_span,
    decided_key,
    decider_key,
    fence_key,
    member_key,
    member_of,
    members_span,
    run_prefix,
    seats_span,
    store_values_span,
)
from ftcoord.core.office import parse_office
from ftcoord.core.quorum_records import QuorumRecord, ReplicaRecord, parse_quorum, parse_replica
from ftcoord.core.rendezvous import Restart
from ftcoord.core.rendezvous_records import Round, parse_decided, seated
from ftcoord.core.store_values import plain
from ftcoord.errors import StateError
from ftcoord.etcd.api import Event, KeyValue
from simulator.quorum_rules import KeptOut, Last, Member, may_decide
from simulator.timer_rules import TimersHeld
from simulator.vote_rules import RankCall, RankCalls

RUN: Final = run_prefix("/ftcoord/v2", "run")
STORE: Final = "/ftcoord/v2/@store/shared/"
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
    """What a handler told its agent. `name` is the round's: its number and its token."""

    number: int
    name: str
    rank: int
    size: int
    address: str
    port: int


class RoundOracle:
    """S1, S2, R5 and R7 of the rounds, as etcd holds them and as handlers tell them.

    Args:
        nnodes: the fewest and the most nodes of a round.
        is_there: whether a member has a key.
        restart: which runs that are over may go on.
    """

    def __init__(self, nnodes: tuple[int, int], is_there: Callable[[str], bool], restart: Restart) -> None:
        self._nnodes, self._is_there, self._restart = nnodes, is_there, restart
        self.record: Round | None = None
        self.done: set[str] = set()
        """The rounds whose workers have finished, by name."""
        self.ends: set[tuple[str, str]] = set()
        """The rounds in which an agent has ended the run, and how: whether it did depends on the others."""
        self._had_accident = False
        self._drained: set[str] = set()
        self._ready: set[str] = set()
        self._starts: dict[object, tuple[int, str, int]] = {}
        self._ranks: dict[tuple[str, int], str] = {}
        self._addresses: dict[tuple[str, int], str] = {}
        self._numbers: dict[str, int] = {}

    def accident(self) -> None:
        """The record may go back, or begin again: from now on only what a process is told is judged."""
        self._had_accident, self.record = True, None

    def decided(self, new: Round) -> None:
        """Somebody has written the record."""
        old, self.record = self.record, new
        if new.ready:
            self._ready.add(new.name)
        if self._had_accident:
            return
        is_ended = not new.closed or (new.name, new.outcome) in self.ends
        require("L2 only its workers end the run", is_ended, f"round {new.name} is closed: {new.closed}")
        least, most = self._nnodes
        is_whole = least <= new.size <= most or not new.number
        require("S1 min <= n <= max", is_whole, f"round {new.name} has {new.size} seats of {least} to {most}")
        if old is None:
            return
        require("S2 rounds only grow", new.number >= old.number, f"{new.number} after {old.number}")
        if new.number > old.number:
            drained = new.nodes.keys() & self._drained
            require("S1 nobody that is drained is seated", not drained, f"{drained} in round {new.name}")
            if new.seats:
                self._judge_seats(old, new)
        if old.closed:
            require("R7 a closed run stays closed", new.closed or self.may_go_on(old), f"{new} after {old}")
        self._drained |= {*new.drained}
        if new.number == old.number:
            same = (new.token, new.seats, new.address, new.port) == (old.token, old.seats, old.address, old.port)
            require("S1 one membership a round", same, f"round {new.number} has other seats")
            require("S1 a recall is not taken back", new.recalled or not old.recalled, f"round {new.number}")
            require("S1 a round stays ready", new.ready or not old.ready, f"round {new.number}")

    def may_go_on(self, closed: Round) -> bool:
        """Whether new agents may go on from a run that is over."""
        return self._restart == "always" or (self._restart == "failed" and closed.outcome == "failed")

    def _judge_seats(self, old: Round, new: Round) -> None:
        before, after = ([one.node for one in round_.seats] for round_ in (old, new))
        first, *others = [node for node in before if node in after] or [after[0]]
        kept = {0: first} | {before.index(node): node for node in others if before.index(node) < len(after)}
        moved = {rank: node for rank, node in kept.items() if after[rank] != node}
        require("R5 ranks are kept", not moved, lambda: f"{moved} have other ranks in {after} after {before}")
        stay = [one.host for one in old.seats if self._is_there(one.member)]
        may_stay = not (old.closed and stay)
        require("R7 all leave before a run goes on", may_stay, lambda: f"{stay} are there, and {new} is decided")

    def left(self, process: str) -> None:
        """Its agent has ended: what comes next in this process is another one, and knows nothing."""
        self._numbers.pop(process, None)

    def started(self, process: str, now: StartedRound) -> None:
        """A handler has told its agent of a round."""
        require("S1 a round starts when it is ready", now.name in self._ready, f"{process}: {now}")
        require("S2 rounds only grow", now.number > self._numbers.get(process, 0), f"{process} starts {now} again")
        self._numbers[process] = now.number
        round_ = now.name if self._had_accident else now.number
        told = (now.size, now.address, now.port)
        require("S1 one membership a round", self._starts.setdefault(round_, told) == told, f"{process}: {now}")
        holder = self._ranks.setdefault((now.name, now.rank), process)
        require("S1 a rank has one holder", holder == process, f"{process} and {holder}: {now}")
        require("S1 ranks are 0 to n-1", 0 <= now.rank < now.size, f"{process}: {now}")
        other = self._addresses.setdefault((now.address, now.port), now.name)
        require("a round has a fresh address", other == now.name, f"{process}: {now}, as {other}")


class QuorumOracle:
    """torchft's rules, S2 and S5 of the quorums.

    Args:
        owner: the name of the process that a member belongs to, by the member's id.
        by_key: whether all that replicas ask is in etcd.
    """

    def __init__(self, job: Job, owner: Callable[[str], str], *, by_key: bool) -> None:
        self._job, self._owner, self._by_key = job, owner, by_key
        self._members: dict[str, tuple[Member, ReplicaRecord]] = {}
        self._views: list[dict[str, Member]] = [{}]
        """What the members were since the last decision."""
        self.last: QuorumRecord | None = None
        self._last = Last(frozenset(), {}, -1e9)
        self.kept_out = KeptOut()
        self._by_number: dict[int, QuorumRecord] = {}
        self._by_id: dict[int, frozenset[str]] = {}
        self._told: dict[tuple[str, str], QuorumRecord] = {}
        self._asked_since: dict[tuple[str, int], float] = {}
        self._asks_since: dict[tuple[str, str], float] = {}
        """By process and replica: since when it has asked. etcd may receive that much later."""
        self.waits: dict[tuple[str, str], tuple[float, bool]] = {}
        """By process and replica that waits for an answer: since when, and whether it lets nobody new in."""
        self.all_is_well = False
        """Whether what somebody asks no more is soon withdrawn."""
        self._had_accident = False

    def accident(self) -> None:
        """The record may go back, or begin again: from now on only what a process is told is judged."""
        self._had_accident = True

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
            since = self._asked_since.setdefault((id_, record.asked), now)
            one = Member(
                id_,
                request.replica_id,
                record.asked,
                request.shrink_only,
                since,
                kv.create_revision,
                said,
                kv.mod_revision,
            )
            self._members[id_] = one, record
        self._views.append({id_: one for id_, (one, _) in self._members.items()})
        self.kept_out.see(self._views[-1].values(), self._last, now)

    def decided(self, new: QuorumRecord, with_: Sequence[str], now: float) -> None:
        """A quorum was decided: of what etcd held at some revision since the last one, and of what these members have
        written in the same transaction."""
        old, views, self._views = self.last, self._views, self._views[-1:]
        before, self.last = self._last, new
        names_now = frozenset(one.request.replica_id for one in new.seats)
        answered = {one.member: one.asked for one in (*new.idle, *new.seats)}
        self._last = Last(names_now, answered, now)
        self.kept_out.see(self._views[-1].values(), self._last, now)
        names = [one.request.replica_id for one in new.seats]
        require("S5 no quorum is empty", names, f"quorum {new.number}")
        require("S1 one seat for each", len(set(names)) == len(names), f"quorum {new.number}: {names}")
        if self.all_is_well:
            absent = {*names} - {name for _, name in self.waits}
            require("who has a seat has asked", not absent, f"quorum {new.number}: {absent} wait for none")
        if self._had_accident:
            return
        if old is not None:
            self._check_numbers(old, new)
        wait = self._job.join_timeout_ms / 1000 / FASTEST - 0.01
        own = {id_: self._members[id_][0] for id_ in with_ if id_ in self._members}

        def allowed() -> Iterator[frozenset[str] | None]:
            """Of the newest view first, for mostly it is the one."""
            for view in reversed(views):
                for seen in (view | own, view) if own else (view,):
                    if (decider := seen.get(new.by)) is not None:  # it counts from when it asked itself
                        its_ask = self._asks_since.get((self._owner(new.by), decider.name), now)
                        seen = {**seen, new.by: replace(decider, since=min(decider.since, its_ask))}
                    members = [*seen.values()]
                    yield may_decide(members, before, self._job.min_replicas, wait, now)

        def problem() -> str:
            texts = sorted({str(sorted(one)) for one in allowed() if one})
            return f"quorum {new.number} of {sorted(names)} after {sorted(before.names)}; allowed were {texts}"

        if self._by_key:  # else etcd does not have what they ask
            require("torchft's rules", names_now in allowed(), problem)

    def _check_numbers(self, old: QuorumRecord, new: QuorumRecord) -> None:
        require("S2 quorums only grow", new.number > old.number, f"{new.number} after {old.number}")
        require("S2 ids only grow", new.id >= old.id, f"id {new.id} after {old.id}")
        failed = any(one.request.commit_failures > 0 for one in new.seats)
        if new.id == old.id:
            require("S2 an id is of one membership", new.names == old.names and not failed, f"id {new.id}")

    def restored(self, events: Iterable[Event], now: float) -> None:
        """etcd has these members now."""
        self._members, self._views = {}, [{}]
        self.kept_out.see((), self._last, now)
        for event in events:
            self.member(event, now)

    def asks(self, process: str, name: str, now: float, *, shrinks: bool = False) -> None:
        """A replica begins to ask for a quorum."""
        self._asks_since[process, name] = now
        self.waits[process, name] = now, shrinks

    def left(self, process: str, name: str) -> None:
        """A replica has left the job: what comes next in this process is another one, and knows nothing."""
        self._told.pop((process, name), None)

    def told(self, process: str, name: str, quorum: QuorumRecord) -> None:
        """A replica was told of a quorum."""
        before = self._told.get((process, name))
        self.waits.pop((process, name), None)
        require("a replica is in its quorum", name in quorum.names, f"{process}: {quorum.number}")
        if before is not None:
            require("S2 quorums only grow", quorum.number > before.number, f"{process}: {quorum.number} again")
            require("S2 ids only grow", quorum.id >= before.id, f"{process}: id {quorum.id} after {before.id}")
            known = quorum.id != before.id or quorum.names == before.names
            require("S2 an id is of one membership", known, f"{process}: {quorum.id} is {sorted(quorum.names)} now")
        self._told[process, name] = quorum
        if self._had_accident:  # others may have been told of another one by this number
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
    by_key: bool
    """Whether all that replicas ask is in etcd."""
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rounds = RoundOracle(self.nnodes, lambda member: member_key(RUN, member) in self.kvs, self.restart)
        self.quorums = QuorumOracle(self.job, self.owner, by_key=self.by_key)
        self.had_accident = False
        """Whether somebody has restored or wiped etcd, or deleted or overwritten our keys."""
        self.operations: list[Operation] = []
        self.timers = TimersHeld()
        self.calls: list[tuple[str, RankCalls]] = []
        """What the ranks of each manager called for, and its process."""
        self.kvs: dict[str, KeyValue] = {}
        self._store: dict[str, list[tuple[int, bytes | None]]] = {}
        self._fences = f"{RUN}/rounds/"
        self._round_stores = f"{RUN}/store/"
        self._data = store_values_span(STORE).start
        self._members = members_span(self.job.prefix)
        self._decided = decided_key(RUN), decided_key(self.job.prefix)

    def committed(self, events: Sequence[Event], now: float) -> None:
        """etcd has done this, in one revision. Raises Violation."""
        self.counts["changes"] += len(events)
        for event in events:
            if event.kind == "put":
                self.kvs[event.kv.key] = event.kv
            else:
                self.kvs.pop(event.kv.key, None)
        with_ = [member_of(event.kv.key) for event in events if event.kv.key in self._members]
        # What a quorum rests on comes before it.
        for event in sorted(events, key=lambda one: one.kv.key in self._decided):
            self._judge(event, with_, now)

    def accident(self) -> None:
        """Somebody is about to restore or wipe etcd, or to delete or overwrite our keys. From now on what etcd holds is
        judged no more; what processes are told is, and that they go on."""
        self.had_accident = True
        self.rounds.accident()
        self.quorums.accident()

    def restored(self, kvs: Iterable[KeyValue], now: float) -> None:
        """etcd holds this now, whatever it held before."""
        self.kvs = {kv.key: kv for kv in kvs}
        self.quorums.restored([Event("put", kv) for kv in self.kvs.values() if kv.key in self._members], now)
        for key in self._decided:
            if kv := self.kvs.get(key):
                self._judge(Event("put", kv), (), now)

    def leftovers(self) -> list[str]:
        """The keys of rounds that are over, when all have left: what the last one has stays for a while."""
        last = self.rounds.record
        name = last.name if last is not None else ""
        seats = all_seats_span(RUN).start
        mine = f"{self._fences}{name}", f"{self._round_stores}{name}/", f"{seats}{name}/"
        kept = self._fences, self._round_stores, seats
        return [key for key in self.kvs if key.startswith(kept) and not key.startswith(mine)]

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

    def _judge(self, event: Event, with_: Sequence[str], now: float) -> None:
        kv = event.kv
        if kv.key in self._decided:
            if event.kind == "put" and kv.value not in GARBAGE:
                self.counts["decisions"] += 1
                self._judge_decision(kv, with_, now)
        elif kv.key in self._members:
            self.quorums.member(event, now)
        elif kv.key.startswith(self._fences):
            others = [key for key in self.kvs if key.startswith(self._fences) and key != kv.key]
            is_alone = event.kind == "delete" or self.had_accident or not others
            require("S3 one round may be written to", is_alone, f"{kv.key} begins, and {others} are there")
        elif kv.key.startswith(self._round_stores):
            name = kv.key.removeprefix(self._round_stores).partition("/")[0]
            open_ = event.kind == "delete" or self.had_accident or fence_key(RUN, name) in self.kvs
            require("S3 no late writes", open_, f"{kv.key} is written, and round {name} is over")
            holder = self.kvs.get(member_key(RUN, f"{kv.lease:016x}"))
            is_members = kv.lease and holder is not None and holder.lease == kv.lease  # somebody may write such a key
            require("a round's store outlives its members", not is_members, f"{kv.key} ends with {kv.lease:x}")
        elif kv.key.startswith(self._data):
            value = plain(kv.value, kv.version) if event.kind == "put" else None
            self._store.setdefault(kv.key, []).append((kv.mod_revision, value))
        elif "/deaths/" in kv.key and event.kind == "put" and kv.value not in GARBAGE:
            member = member_of(kv.key)
            may_be = self.is_dead(member) or parse_death(kv.key, kv.value).left
            require("who is said to be dead is dead", may_be, f"{kv.key}: {self.owner(member)} lives")

    def _judge_decision(self, kv: KeyValue, with_: Sequence[str], now: float) -> None:
        """A decided record can be read as a whole, and its decider has the office."""
        try:
            if kv.key == decided_key(RUN):
                head = parse_decided(kv.key, kv.value)
                seats = seats_span(RUN, head.name).start
                chunks = {key: one.value for key, one in self.kvs.items() if key.startswith(seats)}
                round_ = seated(RUN, head, chunks)
                self._judge_decider(RUN, round_.by)
                self.rounds.decided(round_)
            else:
                quorum = parse_quorum(kv.key, kv.value)
                self._judge_decider(self.job.prefix, quorum.by)
                self.quorums.decided(quorum, with_, now)
        except StateError as error:
            raise Violation("S1 a decision can be read", str(error)) from None

    def _judge_decider(self, prefix: str, by: str) -> None:
        by = by.partition(" ")[0]
        if not self.had_accident and (owner := self.owner(by)):  # else it was an operator, who drains a node
            office = self.kvs.get(decider_key(prefix))
            holder = parse_office(office.key, office.value).member if office is not None else ""
            require("S1 who decides has the office", by == holder, f"{by} of {owner} decides {prefix}, not {holder}")
