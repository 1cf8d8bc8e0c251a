"""The decisions of a quorum, and what it means for each rank: torchft's own scenarios, and where we differ from it.

Times are relative to now. Unless a test says otherwise, replica `a` is member `lease-a`, the last quorum answered its
request 1, and it asks its request 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import builders
import pytest
from hypothesis import given, strategies as st
from invariants import check_quorum

from ftcoord.core.quorum import RULES, Highest, QuorumCandidate, QuorumOptions, QuorumSituation, decide
from ftcoord.core.quorum_records import IdleMember, QuorumRecord, QuorumRequest, QuorumSeat
from ftcoord.core.recovery import QuorumResult, quorum_result
from ftcoord.core.verdict import Publish, Verdict, Wait
from ftcoord.errors import FtcoordError, NotInQuorum

HOUR = 3600.0
CREATED = 1_700_000_000.5


def request(name: str, **fields: Any) -> QuorumRequest:
    default = builders.request(
        name, address=f"http://{name}:1", store_address=f"{name}:2", step=5, handles=(f"handle-{name}",)
    )
    return replace(default, **fields)


def asks(
    name: str, asked: int = 2, *, after: int = 0, joined: float = 0.0, member: str = "", **fields: Any
) -> QuorumCandidate:
    return QuorumCandidate(member or f"lease-{name}", request(name, **fields), asked, after, joined)


def beats(name: str, **more: Any) -> QuorumCandidate:
    """Alive, and does not ask."""
    return asks(name, 0, **more)


def all_ask(names: str, **more: Any) -> list[QuorumCandidate]:
    return [asks(name, **more) for name in names.split()]


def quorum(names: str, number: int = 1, id_: int = 1, idle: tuple[IdleMember, ...] = ()) -> QuorumRecord:
    seats = tuple(QuorumSeat(f"lease-{name}", 1, request(name)) for name in names.split())
    return builders.quorum(number, seats, id=id_, idle=idle, created=CREATED)


def judge(
    replicas: Sequence[QuorumCandidate],
    previous: QuorumRecord | None = None,
    min_replicas: int = 1,
    join_timeout: float = HOUR,
    **more: Any,
) -> Verdict:
    situation = QuorumSituation(replicas, previous, created=CREATED, **more)
    options = QuorumOptions(min_replicas, join_timeout)
    verdict = decide(situation, options, 0.0)
    assert verdict.rule in RULES
    if isinstance(verdict, Publish):
        check_quorum(situation, options, verdict.record)
        check_nothing_follows(situation, options, verdict)
    return verdict


def check_nothing_follows(situation: QuorumSituation, options: QuorumOptions, verdict: Publish[QuorumRecord]) -> None:
    """Nothing is due, now or ever, while its members say what they said."""
    if verdict.nothing_follows:
        then = decide(replace(situation, previous=verdict.record), options, 10 * HOUR)
        assert isinstance(then, Wait)
        assert then.until is None


def decided(verdict: Verdict) -> QuorumRecord:
    assert isinstance(verdict, Publish), verdict
    return verdict.record


def names(verdict: Verdict) -> str:
    return " ".join(one.replica_id for one in decided(verdict).requests)


def waits(verdict: Verdict, why: str, until: float | None = None) -> bool:
    assert isinstance(verdict, Wait), verdict
    return why in verdict.reason and verdict.until == until


def test_nothing_follows_a_quorum_of_all() -> None:
    verdicts = [
        judge(all_ask("a b")),
        judge([*all_ask("a b"), beats("c")], quorum("a b")),
        judge(all_ask("a c", shrink_only=True), quorum("a b")),
        judge([*all_ask("a b"), asks("b", member="another")]),
    ]
    assert [isinstance(one, Publish) and one.nothing_follows for one in verdicts] == [True, False, False, False]


# -- torchft's own scenarios --------------------------------------------------------------------------------------


def test_join_timeout() -> None:
    nobody = "New quorum not ready, only have 0 participants, need min_replicas 1 [0/0 participants healthy]"
    assert waits(judge([]), nobody)
    assert names(judge(all_ask("a b"))) == "a b"
    assert waits(judge([*all_ask("a b"), beats("c")]), "join timeout", HOUR)
    assert names(judge([asks("a", joined=-10 * HOUR), asks("b"), beats("c")])) == "a b"


def test_heartbeats() -> None:
    """Who is not alive is not given to us: it is not among the participants that are not healthy either."""
    verdict = judge([asks("a")], join_timeout=0.0)
    assert "[1/1 participants healthy][1 heartbeating]" in verdict.reason
    assert waits(judge([], join_timeout=0.0), "[0/0 participants healthy][0 heartbeating]")
    assert names(judge([asks("b")], join_timeout=0.0)) == "b"


def test_who_comes_back_first_after_all_leases_ended_is_alone_unless_min_replicas_forbids_it() -> None:
    """As with torchft's lighthouse after a restart: only those that live count, and it is all that lives."""
    back = [asks(name, member=f"later-{name}") for name in "ab"]
    assert names(judge(back[:1], quorum("a b c"), 1)) == "a"
    assert waits(judge(back[:1], quorum("a b c"), 2), "need min_replicas 2")
    assert names(judge(back, quorum("a b c"), 2)) == "a b"


def test_the_id_is_of_the_membership_and_nothing_else() -> None:
    other = {"address": "x", "store_address": "y", "step": 9, "world_size": 8, "data": "{}", "handles": ()}
    again = decided(judge(all_ask("a b", **other), quorum("a b", 7, 3)))
    assert (again.number, again.id) == (8, 3)
    assert decided(judge(all_ask("a c"), quorum("a b", 7, 3))).id == 4
    assert decided(judge(all_ask("a b c"), quorum("a b", 7, 3))).id == 4


# -- the rules, one by one ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replicas", "min_replicas", "reason"),
    [
        pytest.param([], 0, "only have 0 participants, need min_replicas 1 ", id="never empty"),
        pytest.param(all_ask("a b"), 3, "only have 2 participants, need min_replicas 3 ", id="too few"),
        pytest.param([asks("a"), beats("b")], 2, "need min_replicas 2 ", id="too few is said before no majority"),
        pytest.param([*all_ask("a b"), beats("c"), beats("d")], 1, "at least half of 4 healthy", id="half is too few"),
    ],
)
def test_what_time_does_not_change_has_no_limit(
    replicas: list[QuorumCandidate], min_replicas: int, reason: str
) -> None:
    assert waits(judge(replicas, min_replicas=min_replicas), reason)


def test_the_earliest_who_asks_starts_the_join_timeout() -> None:
    replicas = [asks("a", joined=-3.0), asks("b", joined=-7.0), beats("c", joined=-99.0)]
    assert waits(judge(replicas, join_timeout=10.0), "join timeout [2/2 participants healthy][3 heartbeating]", 3.0)
    assert names(judge(replicas, join_timeout=7.0)) == "a b"


def test_fast_needs_neither_min_nor_majority_nor_the_join_timeout() -> None:
    replicas = [asks("a"), *(beats(name) for name in "bcdef")]
    assert names(judge(replicas, quorum("a"), min_replicas=4)) == "a"
    assert "Fast quorum" in judge(replicas, quorum("a")).reason


def test_one_who_asks_to_shrink_shrinks_for_all() -> None:
    verdict = judge([asks("a", shrink_only=True), *all_ask("b c")], quorum("a b"))
    assert names(verdict) == "a b"
    assert decided(verdict).idle == ()
    assert names(judge(all_ask("a b c", shrink_only=True))) == "a b c"


def test_seats_are_ordered_by_bytes() -> None:
    mixed = ["rep_2", "a", "rep_10", "Z", "é", "\uffff", "\U00010000", ""]
    assert [one.replica_id for one in decided(judge([asks(name) for name in mixed])).requests] == sorted(
        mixed, key=str.encode
    )


def test_requests_are_returned_as_sent() -> None:
    sent = request("a", data='{"k": [1]}', handles=("x", "y"), step=-1, world_size=2)
    verdict = judge([QuorumCandidate("lease", sent, 9, 0, 0.0)])
    assert decided(verdict) == builders.quorum(1, (QuorumSeat("lease", 9, sent),), created=CREATED)


# -- who asks -----------------------------------------------------------------------------------------------------


def test_an_answered_request_is_not_asked_again() -> None:
    assert waits(judge(all_ask("a b", asked=1), quorum("a b")), "only have 0 participants")
    assert waits(judge([asks("a", 1), asks("b")], quorum("a b")), "at least half of 2")


def test_who_is_left_behind_is_idle_until_it_asks_again() -> None:
    """`b` trains on while the others form a quorum without it."""
    second = decided(judge([asks("a", joined=-HOUR), asks("b", 1), asks("c", 1)], quorum("a b"), join_timeout=1.0))
    assert [seat.member for seat in second.seats] == ["lease-a", "lease-c"]
    assert second.idle == (IdleMember("lease-b", 1),)
    assert second.answered == {"lease-a": 2, "lease-b": 1, "lease-c": 1}

    third = judge([asks("a", 3), asks("b", 1), asks("c", 2)], second)
    assert names(third) == "a c"
    assert decided(third).idle == second.idle
    assert names(judge([asks("a", 3), asks("b", 2), asks("c", 2)], second)) == "a b c"


def test_the_idle_that_are_gone_are_forgotten() -> None:
    """One that lives may repeat what was answered, by port: its answer was lost."""
    previous = quorum("a", idle=(IdleMember("lease-b", 1), IdleMember("lease-c", 1)))
    assert decided(judge([asks("a"), asks("b", 1)], previous)).idle == (IdleMember("lease-b", 1),)
    assert decided(judge([asks("a"), beats("b")], previous)).idle == (IdleMember("lease-b", 1),)
    assert decided(judge([asks("a")], previous)).idle == ()


def test_a_new_decider_waits_until_those_that_asked_the_one_before_can_have_asked_it() -> None:
    replicas = [*all_ask("a b", joined=-5.0), beats("c")]
    assert waits(judge(replicas, join_timeout=0.1, gathers_until=0.3), "join timeout", 0.4)
    assert names(judge(replicas, join_timeout=0.1, gathers_until=-0.2)) == "a b"
    assert names(judge(replicas[:2], gathers_until=0.3)) == "a b"


def test_who_is_left_out_goes_on_asking_and_joins_anew() -> None:
    """Else `c` and `d` would at once form a quorum without `a`, which just got one."""
    replicas = [asks("a", shrink_only=True), *all_ask("c d", asked=1, joined=-5.0)]
    shrunk = decided(judge(replicas, quorum("a"), join_timeout=5.0))
    assert names(Publish(shrunk, "")) == "a"
    assert waits(judge(replicas, shrunk, join_timeout=5.0, previous_at=-1.0), "join timeout", 4.0)
    assert names(judge(replicas, shrunk, join_timeout=5.0, previous_at=-5.0)) == "c d"


def test_members_of_one_name_are_one_replica() -> None:
    first, last = asks("a", 3, member="first"), asks("a", member="last", step=0)
    verdict = judge([first, last, asks("b")])
    assert [seat.member for seat in decided(verdict).seats] == ["last", "lease-b"]
    assert decided(verdict).requests[0].step == 0
    assert decided(verdict).idle == (IdleMember("first", 3),)
    assert "[2/2 participants healthy][2 heartbeating]" in verdict.reason


def test_one_of_them_may_beat_for_the_other() -> None:
    verdict = judge([asks("a"), beats("a", member="beats"), asks("b")])
    assert [seat.member for seat in decided(verdict).seats] == ["lease-a", "lease-b"]
    assert decided(verdict).idle == ()
    assert "[2/2 participants healthy][2 heartbeating]" in verdict.reason


def test_members_of_a_name_that_is_left_out_go_on_asking() -> None:
    shrunk = decided(judge([asks("a", shrink_only=True), asks("c"), asks("c", member="other")], quorum("a")))
    assert (names(Publish(shrunk, "")), shrunk.idle) == ("a", ())


@pytest.mark.parametrize(
    ("old", "new", "seated"),
    [
        ((2, 9), (0, 0), "old"),
        ((2, 7), (0, 0), None),
        ((2, 9), (1, 10), "new"),
        ((2, 11), (1, 10), "old"),
        ((1, 11), (1, 10), "new"),
        ((1, 11), (0, 0), None),
    ],
    ids=["asks, or again", "asked before", "both, new last", "both, old last", "old was answered", "nobody asks"],
)
def test_of_two_incarnations_the_last_to_ask_counts(
    old: tuple[int, int], new: tuple[int, int], seated: str | None
) -> None:
    """Each asks this, and said so at that revision; the new one came at 8, and the old one's first request is over."""
    previous = quorum("x", idle=(IdleMember("old", 1),))
    both = [
        replace(asks("a", asked, member=member), came_at=came_at, asked_at=asked_at, wrote_at=asked_at)
        for member, came_at, (asked, asked_at) in (("old", 3, old), ("new", 8, new))
    ]
    verdict = judge(both, previous)
    if seated is None:
        assert waits(verdict, "only have 0 participants")
    else:
        assert [seat.member for seat in decided(verdict).seats] == [seated]
        assert "[1 heartbeating]" in verdict.reason


def test_an_old_incarnation_that_was_answered_does_not_ask_when_the_new_one_is_gone() -> None:
    previous = builders.quorum(1, (QuorumSeat("old", 4, request("a")),), id=1, created=CREATED)
    old, new = asks("a", 4, member="old"), asks("a", 1, member="new")
    second = decided(judge([old, new], previous))
    assert ([seat.member for seat in second.seats], second.idle) == (["new"], (IdleMember("old", 4),))
    assert waits(judge([old], second), "only have 0 participants")


# -- where we differ from torchft ---------------------------------------------------------------------------------


def test_shrinking_to_nobody_waits() -> None:
    """torchft publishes an empty quorum."""
    newcomers = all_ask("c d", shrink_only=True)
    why = "only have 2 participants, 0 of them of the last quorum, need min_replicas 1 [2/2 participants healthy]"
    assert waits(judge(newcomers, quorum("a b")), why)
    assert waits(judge(newcomers, quorum("a b"), 0, join_timeout=0.0), why)


def test_min_replicas_holds_after_shrinking() -> None:
    """torchft counts the newcomers that it then leaves out."""
    replicas = all_ask("a c d", shrink_only=True)
    assert waits(judge(replicas, quorum("a b"), 2), "1 of them of the last quorum, need min_replicas 2")
    assert names(judge(replicas, quorum("a b"), 1)) == "a"


@pytest.mark.parametrize("shrink_only", [False, True])
def test_an_empty_quorum_is_none(shrink_only: bool) -> None:
    """In torchft, one replica is then enough for any min_replicas; and nobody when it shrinks."""
    assert waits(judge(all_ask("a", shrink_only=shrink_only), quorum("", 3, 5), 2), "need min_replicas 2")
    formed = decided(judge(all_ask("a b", shrink_only=shrink_only), quorum("", 3, 5), 2))
    assert (formed.number, formed.id, len(formed.seats)) == (4, 6, 2)


@pytest.mark.parametrize(
    ("replicas", "previous", "id_"),
    [
        pytest.param(all_ask("a b"), None, 1, id="the first is 1"),
        pytest.param([asks("a", after=41), asks("b")], None, 42, id="the record is lost, one replica knows"),
        pytest.param([*all_ask("a b"), beats("c", after=41)], None, 42, id="one that does not ask knows"),
        pytest.param([asks("a", after=8), asks("b")], quorum("a b", 4, 6), 9, id="an older record was restored"),
        pytest.param([asks("a", after=6), asks("b", after=5)], quorum("a b", 4, 6), 6, id="all know this one"),
        pytest.param([asks("c", after=2)], quorum("a b", 4, 6), 7, id="others than before"),
        pytest.param([asks("a", after=-5)], None, 1, id="nonsense does not lower it"),
        pytest.param(all_ask("c"), quorum("a b", 4, -7), 1, id="nor does it in the record"),
        pytest.param([asks("a", commit_failures=1), asks("b")], quorum("a b", 4, 6), 7, id="a step failed"),
    ],
)
def test_ids(replicas: list[QuorumCandidate], previous: QuorumRecord | None, id_: int) -> None:
    verdict = judge(replicas, previous, join_timeout=0.0)
    assert decided(verdict).id == id_
    assert decided(verdict).number == (previous.number + 1 if previous else 1)


@pytest.mark.parametrize("previous", [None, quorum("a b", 4, 6)])
def test_what_the_decider_ever_heard_of_does_not_come_again(previous: QuorumRecord | None) -> None:
    """Though it is the record of before that etcd has, with the same members, and none of these knows better."""
    third = decided(judge(all_ask("a b"), previous, highest=Highest(9, 7)))
    assert (third.number, third.id) == (10, 8)


def test_a_number_that_only_a_member_has_heard_of_does_not_come_again() -> None:
    """etcd was restored, and who decides never heard of what others know."""
    knows = replace(asks("b"), heard=9)
    assert decided(judge([asks("a"), knows], quorum("a b", 4, 6))).number == 10


def test_commit_failures_of_one_that_is_left_out_change_nothing() -> None:
    replicas = [asks("a", shrink_only=True), asks("c", commit_failures=3)]
    assert decided(judge(replicas, quorum("a", 4, 6))).id == 6


# -- what a quorum means for a rank -------------------------------------------------------------------------------


def group(*steps: int, **fields: Any) -> list[QuorumRequest]:
    return [request(f"r{place}", step=step, **fields) for place, step in enumerate(steps)]


def recovery(requests: Sequence[QuorumRequest], replica_id: str, rank: int, init_sync: bool) -> QuorumResult:
    seats = [QuorumSeat(f"m{place}", 1, one) for place, one in enumerate(requests)]
    return quorum_result(builders.quorum(1, seats, id=1), replica_id, rank, init_sync)


def plan(steps: Sequence[int], me: int, rank: int, init_sync: bool = True) -> tuple[int | None, tuple[int, ...]]:
    """Whom it heals from, and who heals from it."""
    result = recovery(group(*steps), f"r{me}", rank, init_sync)
    assert result.heal == (result.recover_src_replica_rank is not None)
    source = result.recover_src_replica_rank
    assert result.recover_src_manager_address == ("" if source is None else f"http://r{source}:1")
    return source, tuple(result.recover_dst_replica_ranks)


@pytest.mark.parametrize(
    ("steps", "me", "rank", "init_sync", "source", "healing"),
    [
        pytest.param([0, 0], 0, 0, True, None, (1,), id="first step: the primary sends"),
        pytest.param([0, 0], 1, 0, True, 0, (), id="first step: the other heals"),
        pytest.param([0, 0], 1, 1, True, None, (0,), id="first step: another primary for another rank"),
        pytest.param([0, 0], 0, 1, True, 1, (), id="first step: and the first heals from it"),
        pytest.param([0, 0], 0, 0, False, None, (), id="first step, no sync: nobody sends"),
        pytest.param([0, 0], 1, 0, False, None, (), id="first step, no sync: nobody heals"),
        pytest.param([1, 0], 1, 0, False, 0, (), id="no sync is for the first step only"),
        pytest.param([0, 1, 0, 1, 0], 0, 0, True, 1, (), id="recovery: the first that is behind"),
        pytest.param([0, 1, 0, 1, 0], 1, 0, True, None, (0, 4), id="recovery: a source of two"),
        pytest.param([0, 1, 0, 1, 0], 3, 0, True, None, (2,), id="recovery: a source of one"),
        pytest.param([0, 1, 0, 1, 0], 1, 1, True, None, (2,), id="recovery: rank 1 has them the other way round"),
        pytest.param([0, 1, 0, 1, 0], 3, 1, True, None, (0, 4), id="recovery: so that the load is spread"),
        pytest.param([7, 7, 7], 2, 5, True, None, (), id="nobody is behind"),
    ],
)
def test_who_heals_from_whom(
    steps: list[int], me: int, rank: int, init_sync: bool, source: int | None, healing: tuple[int, ...]
) -> None:
    assert plan(steps, me, rank, init_sync) == (source, healing)


def test_the_result_of_a_lone_replica() -> None:
    alone = [request("r0", step=123, commit_failures=3)]
    assert recovery(alone, "r0", 0, True) == QuorumResult(
        quorum_id=1,
        replica_rank=0,
        replica_world_size=1,
        recover_src_manager_address="",
        recover_src_replica_rank=None,
        recover_dst_replica_ranks=[],
        store_address="r0:2",
        max_step=123,
        max_replica_rank=0,
        max_world_size=1,
        heal=False,
        replica_ids=["r0"],
        reconfigure_handles=["handle-r0"],
    )


def test_the_store_is_that_of_the_ranks_primary() -> None:
    stores = [recovery(group(3, 9, 9), "r0", rank, True).store_address for rank in range(4)]
    assert stores == ["r1:2", "r2:2", "r1:2", "r2:2"]


def test_who_is_behind_has_no_place_among_those_at_the_highest_step() -> None:
    results = [recovery(group(9, 3, 9), f"r{me}", 0, True) for me in range(3)]
    assert [result.max_replica_rank for result in results] == [0, None, 1]
    assert {(result.max_world_size, result.max_step) for result in results} == {(2, 9)}


def test_handles_are_those_of_the_rank() -> None:
    pair = [request("r0", handles=("x0", "x1")), request("r1", handles=("y0",)), request("r2", handles=())]
    assert recovery(pair, "r1", 0, True).reconfigure_handles == ["x0", "y0", ""]
    assert recovery(pair, "r1", 1, True).reconfigure_handles == ["x1", "", ""]


@pytest.mark.parametrize("requests", [[], group(1, 1)])
def test_who_has_no_seat_has_no_result(requests: list[QuorumRequest]) -> None:
    with pytest.raises(NotInQuorum, match="replica X not participating in returned quorum") as caught:
        recovery(requests, "X", 0, True)
    assert caught.value.replica_id == "X"
    assert isinstance(caught.value, LookupError)
    assert isinstance(caught.value, FtcoordError)


groups = st.lists(st.integers(0, 3), min_size=1, max_size=7).map(lambda steps: group(*steps))


@given(groups, st.integers(0, 9), st.booleans(), st.randoms())
def test_all_replicas_have_plans_that_fit_together(
    requests: list[QuorumRequest], rank: int, sync: bool, chance: Any
) -> None:
    results = [recovery(requests, one.replica_id, rank, sync) for one in requests]
    chance.shuffle(requests)
    assert results == [recovery(requests, f"r{me}", rank, sync) for me in range(len(requests))]
    assert [result.replica_rank for result in results] == list(range(len(requests)))
    assert len({result.store_address for result in results}) == 1
    assert not all(result.heal for result in results)
    for me, result in enumerate(results):
        for other in result.recover_dst_replica_ranks:
            assert results[other].recover_src_replica_rank == me
        if result.heal:
            assert result.recover_src_replica_rank is not None
            source = results[result.recover_src_replica_rank]
            assert not source.heal
            assert me in source.recover_dst_replica_ranks
        else:
            assert result.max_replica_rank is not None
    loads = [len(result.recover_dst_replica_ranks) for result in results if not result.heal]
    assert max(loads) - min(loads) <= 1


# -- whatever the situation ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    replicas: list[QuorumCandidate]
    previous: QuorumRecord | None
    options: QuorumOptions
    previous_at: float

    def verdict(self, now: float = 0.0) -> Verdict:
        situation = QuorumSituation(self.replicas, self.previous, self.previous_at, created=CREATED)
        return decide(situation, self.options, now)

    @property
    def alive(self) -> set[str]:
        return {one.request.replica_id for one in self.replicas}

    @property
    def asking(self) -> set[str]:
        answered = self.previous.answered if self.previous else {}
        return {one.request.replica_id for one in self.replicas if one.asked > answered.get(one.member, 0)}

    @property
    def is_fast(self) -> bool:
        before = {one.replica_id for one in self.previous.requests} if self.previous else set()
        return bool(before) and before <= self.asking


times = st.integers(-60, 0).map(float)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    def one(name: str) -> QuorumCandidate:
        fields = {"shrink_only": draw(st.integers(0, 4)) == 0, "commit_failures": draw(st.sampled_from([0, 0, 0, 1]))}
        asked, after = draw(st.integers(0, 3)), draw(st.integers(0, 4))
        member = f"lease-{name}{draw(st.sampled_from(['', '', 2]))}"
        return asks(name, asked, after=after, joined=draw(times), member=member, **fields)

    living = [one(name) for name in draw(st.lists(st.sampled_from("abcde"), max_size=7))]
    unique = list({replica.member: replica for replica in living}.values())
    before = sorted(draw(st.sets(st.sampled_from("abcdef"), max_size=4)))
    idle = tuple(IdleMember(f"lease-{name}2", 2) for name in draw(st.sets(st.sampled_from("abc"))))
    previous = draw(st.none() | st.just(quorum(" ".join(before), 3, draw(st.integers(1, 4)), idle)))
    options = QuorumOptions(draw(st.integers(0, 4)), draw(st.sampled_from([0.0, 10.0, HOUR])))
    return Case(unique, previous, options, draw(times))


@given(cases())
def test_a_decision_is_not_followed_by_another_at_once(case: Case) -> None:
    verdict = case.verdict()
    if isinstance(verdict, Publish) and case.options.join_timeout > 0:
        assert isinstance(replace(case, previous=verdict.record, previous_at=0.0).verdict(), Wait)


@given(cases(), st.integers(-(2**20), 2**20).map(float))
def test_only_time_differences_matter(case: Case, shift: float) -> None:
    replicas = [replace(one, joined=one.joined + shift) for one in case.replicas]
    moved = replace(case, replicas=replicas, previous_at=case.previous_at + shift).verdict(shift)
    if isinstance(moved, Wait) and moved.until is not None:
        moved = replace(moved, until=moved.until - shift)
    assert moved == case.verdict()


@given(cases(), st.integers(0, 100).map(float))
def test_time_alone_changes_nothing_before_it_was_named_and_then_decides(case: Case, later: float) -> None:
    verdict = case.verdict()
    if isinstance(verdict, Publish) or verdict.until is None:
        assert case.verdict(later) == verdict
    else:
        assert verdict.until > 0.0
        assert isinstance(case.verdict(verdict.until), Publish)
        assert case.verdict(min(later, verdict.until - 0.5)) == verdict
