"""Random histories of a quorum, against torchft's rules written down a second time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from hypothesis import given, strategies as st
from invariants import check_quorum

from ftcoord.core.quorum import QuorumCandidate, QuorumOptions, QuorumSituation, decide
from ftcoord.core.quorum_records import QuorumRecord, QuorumRequest
from ftcoord.core.verdict import Publish

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
