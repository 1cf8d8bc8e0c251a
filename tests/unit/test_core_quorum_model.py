"""Random histories of a quorum: against torchft's rules written down a second time, and for S2 with records lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from hypothesis import given
from hypothesis import strategies as st
from invariants import check_quorum

from ftcoord.core.quorum import QuorumCandidate, QuorumOptions, QuorumSituation, decide
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest
from ftcoord.core.verdict import Publish, Wait

NAMES = "abcde"
BEAT_TIMEOUT, JOIN_TIMEOUT = 5, 8


def request(name: str, shrink_only: bool, failures: int) -> QuorumRequest:
    return QuorumRequest(name, "", "", 0, 1, shrink_only, "", failures, ())


# -- torchft's lighthouse, as its rules are described: one map of who asks, one of beats --------------------------


@dataclass
class Lighthouse:
    min_replicas: int
    asking: dict[str, tuple[QuorumRequest, int]] = field(default_factory=dict)
    beats: dict[str, int] = field(default_factory=dict)
    last: list[QuorumRequest] | None = None
    id: int = 0

    def decide(self, now: int) -> str:
        """Why it waits, or that it published; then everybody left out has queued again."""
        alive = [name for name in self.beats if now - self.beats[name] < BEAT_TIMEOUT]
        live = {name: self.asking[name] for name in sorted(alive) if name in self.asking}
        chosen = [one for one, _ in live.values()]
        why = "found"
        if self.last is not None:
            before = [one.replica_id for one in self.last]
            if any(one.shrink_only for one in chosen):
                chosen = [one for one in chosen if one.replica_id in before]
            if all(name in live for name in before):
                why = "Fast"
        if why != "Fast":
            if len(live) < self.min_replicas:
                return "need min_replicas"
            if len(live) <= len(alive) // 2:
                return "need at least half"
            if len(chosen) < self.min_replicas:  # where ftcoord differs: torchft publishes this
                return "of the last quorum, need min_replicas"
            if len(live) != len(alive) and now - min(at for _, at in live.values()) < JOIN_TIMEOUT:
                return "join timeout"
        self._publish(chosen, now)
        return why

    def _publish(self, chosen: list[QuorumRequest], now: int) -> None:
        same = self.last is not None and [one.replica_id for one in self.last] == [one.replica_id for one in chosen]
        if not same or any(one.commit_failures > 0 for one in chosen):
            self.id += 1
        self.last = chosen
        seated = [one.replica_id for one in chosen]
        self.asking = {name: (one, now) for name, (one, _) in self.asking.items() if name not in seated}


# -- ours, fed with the same ---------------------------------------------------------------------------------------


@dataclass
class Ours:
    options: QuorumOptions
    members: dict[str, QuorumCandidate] = field(default_factory=dict)
    last: QuorumRecord | None = None
    last_at: float = -1.0
    leases: int = 0

    def ask(self, one: QuorumRequest, now: int) -> None:
        known = self.members[one.replica_id]
        self.members[one.replica_id] = QuorumCandidate(known.member, one, known.asked + 1, known.after, float(now))

    def beat(self, name: str) -> None:
        if name not in self.members:
            self.leases += 1
            lease = f"lease-{self.leases}"
            self.members[name] = QuorumCandidate(lease, request(name, False, 0), 0, 0, 0.0)

    def decide(self, now: int) -> str:
        situation = QuorumSituation([*self.members.values()], self.last, self.last_at)
        verdict = decide(situation, self.options, float(now))
        if isinstance(verdict, Publish):
            check_quorum(situation, self.options, verdict.record)
            self.last, self.last_at = verdict.record, float(now)
        return verdict.reason


Event: TypeAlias = "tuple[str, str, bool, int]"
events = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(NAMES), st.integers(0, 7).map(lambda n: n == 0), st.integers(0, 1)),
        st.tuples(st.just("all ask"), st.just(""), st.just(False), st.sampled_from([0, 0, 0, 1])),
        st.tuples(st.just("beat"), st.sampled_from(NAMES), st.just(False), st.just(0)),
        st.tuples(st.just("all beat"), st.just(""), st.just(False), st.just(0)),
        st.tuples(st.just("time"), st.just(""), st.just(False), st.integers(1, 6)),
    ),
    min_size=1,
    max_size=60,
)


@given(st.integers(1, 3), events)
def test_torchfts_rules(min_replicas: int, history: list[Event]) -> None:
    theirs, ours = Lighthouse(min_replicas), Ours(QuorumOptions(min_replicas, float(JOIN_TIMEOUT)))
    now = 0
    for what, name, shrink_only, number in history:
        names = list(theirs.beats) if what.startswith("all") else [name]
        if what == "time":
            now += number
        for each in names if what != "time" else []:
            theirs.beats[each] = now
            ours.beat(each)
            if what.endswith("ask"):
                one = request(each, shrink_only, number)
                theirs.asking[each] = (one, now)
                ours.ask(one, now)
        for each in [each for each, at in theirs.beats.items() if now - at >= BEAT_TIMEOUT]:
            # It has died: with torchft what it asked would count again, should it come back.
            del theirs.beats[each], ours.members[each]
            theirs.asking.pop(each, None)
        reason = ours.decide(now)
        assert theirs.decide(now) in reason
        assert (list(ours.last.requests) if ours.last else None) == theirs.last
        assert (ours.last.id if ours.last else 0) == theirs.id


# -- S2: ids and numbers only grow, and an id is of one membership --------------------------------------------------


@dataclass
class History:
    """A run whose members come, learn and die, and whose record is lost or restored from a backup."""

    options: QuorumOptions
    members: dict[str, QuorumCandidate] = field(default_factory=dict)
    records: list[QuorumRecord] = field(default_factory=list)
    last: QuorumRecord | None = None
    leases: int = 0
    asked: int = 0
    ids: dict[int, list[str]] = field(default_factory=dict)

    def act(self, what: str, name: str, number: int) -> None:
        known = self.members.get(name)
        if what == "ask":
            self.asked += 1
            member, after = (known.member, known.after) if known else (self._lease(), 0)
            self.members[name] = QuorumCandidate(
                member, request(name, number == 0, number // 6), self.asked, after, 0.0
            )
        elif what == "learn" and known and self.last and known.member in self.last.seated:
            after = max(known.after, self.last.id)
            self.members[name] = QuorumCandidate(known.member, known.request, known.asked, after, known.joined)
        elif what == "die":
            self.members.pop(name, None)
        elif what == "lose" and self._somebody_knows():
            self.last = self.records[number] if number < len(self.records) - 1 else None

    def _lease(self) -> str:
        self.leases += 1
        return f"lease-{self.leases}"

    def _somebody_knows(self) -> bool:
        return max((one.after for one in self.members.values()), default=0) >= max(self.ids, default=1)

    def decide(self) -> None:
        situation = QuorumSituation([*self.members.values()], self.last)
        verdict = decide(situation, self.options, 1.0)
        if isinstance(verdict, Wait):
            return
        check_quorum(situation, self.options, verdict.record)
        new, old = verdict.record, self.last
        names = [one.replica_id for one in new.requests]
        assert new.id >= max(self.ids, default=1)
        assert self.ids.setdefault(new.id, names) == names
        assert new.number == (old.number if old else 0) + 1
        self.last = new
        self.records.append(new)


acts = st.tuples(
    st.sampled_from(["ask", "ask", "ask", "ask", "learn", "learn", "die", "lose"]),
    st.sampled_from(NAMES),
    st.integers(0, 6),
)


@given(st.integers(1, 3), st.sampled_from([0.0, 9.0]), st.lists(acts, max_size=80))
def test_ids_are_never_used_again(min_replicas: int, join_timeout: float, history: list[tuple[str, str, int]]) -> None:
    run = History(QuorumOptions(min_replicas, join_timeout))
    for act in history:
        run.act(*act)
        run.decide()
