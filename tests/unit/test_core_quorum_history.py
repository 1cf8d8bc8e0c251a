"""What a job's history says of its quorums."""

from __future__ import annotations

from dataclasses import replace

import builders
import pytest

from ftcoord.core.event_records import HistoryEvent, encode, read_history
from ftcoord.core.quorum_history import REPEATED, LateEnds, quorum_events
from ftcoord.core.quorum_records import QuorumRecord, QuorumSeat

TIMEOUT = 5.0


def quorum(id_: int, *names: str, incarnation: int = 1) -> QuorumRecord:
    """The member of each is its name and a number."""
    requests = [builders.request(name) for name in names]
    seats = tuple(QuorumSeat(f"{one.replica_id}{incarnation}", 1, one) for one in requests)
    return builders.quorum(id_, seats, by="me")


def seated(id_: int, *members: str) -> QuorumRecord:
    """Each member's replica is called by its first letter."""
    seats = tuple(QuorumSeat(one, 1, builders.request(one[0])) for one in members)
    return builders.quorum(id_, seats, by="me")


def said(events: list[HistoryEvent]) -> list[tuple[str, int, str]]:
    return [(one.kind, one.number, one.node) for one in events]


def test_who_died_or_left_is_told_at_once_and_once() -> None:
    late = LateEnds(TIMEOUT)
    late.follow(quorum(3, "a", "b", "c"), {"a1", "b1", "c1"})
    assert (late.asks_for({"a1", "b1", "c1"}, 0.0), late.due) == ([], None)
    assert late.asks_for({"a1"}, 1.0) == ["b1", "c1"]
    ends = late.ends({"a1"}, {"a"}, {"b1": ("b was killed", 7)}, {"c1": "it left"}, 1.0)
    assert said(ends) == [("died", 3, "b"), ("left", 3, "c")]
    assert (ends[0].reason, ends[0].noted, ends[1].reason) == ("b: b was killed", 7, "c left (it left)")
    late.follow(quorum(3, "a", "b", "c"), {"a1"})  # the next step's: the same replicas
    assert late.asks_for({"a1"}, 2.0) == []
    after = quorum_events(quorum(3, "a", "b", "c"), quorum(4, "a"), {"b1": ("b was killed", 7)}, {"c1": "it left"})
    assert said(late.untold(after)) == [("quorum", 4, "")]


def test_who_is_gone_without_a_word_is_told_when_nobody_of_its_name_is_back_in_time() -> None:
    late = LateEnds(TIMEOUT)
    late.follow(quorum(3, "a", "b", "c"), {"a1", "b1", "c1"})
    assert late.ends({"a1"}, {"a"}, {}, {}, 1.0) == []
    assert late.due == 1.0 + TIMEOUT
    assert late.asks_for({"a1", "b2"}, 1.0 + TIMEOUT) == ["b1", "c1"]
    ends = late.ends({"a1", "b2"}, {"a", "b"}, {}, {}, 1.0 + TIMEOUT)
    assert said(ends) == [("lost", 3, "c")]
    assert late.due is None
    late.follow(quorum(3, "a", "b", incarnation=2), {"a2", "b2"})
    assert said(late.ends({"a2"}, {"a"}, {"b2": ("b was killed", 9)}, {}, 9.0)) == [("died", 3, "b")]


def test_a_cause_that_is_said_later_counts() -> None:
    late = LateEnds(TIMEOUT)
    late.follow(quorum(3, "a", "b"), {"a1", "b1"})
    assert late.ends({"a1"}, {"a"}, {}, {}, 1.0) == []
    ends = late.ends({"a1"}, {"a"}, {"b1": ("its host went down", 8)}, {}, 1.0 + TIMEOUT)
    assert [(one.kind, one.noted) for one in ends] == [("died", 8)]


def test_a_quorum_went_on_without_a_replica_that_was_there_and_its_loss_is_told_later() -> None:
    """Its host was lost, and the others did not wait for its lease to end."""
    late, there = LateEnds(TIMEOUT), {"a1", "b1", "c1"}
    late.follow(quorum(3, "a", "b", "c"), there)
    late.follow(quorum(4, "a", "b"), there)
    assert late.asks_for(there, 1.0) == []
    assert late.ends(there - {"c1"}, {"a", "b"}, {}, {}, 2.0) == []
    assert said(late.ends(there - {"c1"}, {"a", "b"}, {}, {}, 2.0 + TIMEOUT)) == [("lost", 3, "c")]
    assert said(late.ends({"a1"}, {"a"}, {"b1": ("b was killed", 9)}, {}, 9.0)) == [("died", 4, "b")]


def test_the_lease_of_who_came_back_under_another_one_ends_unseen() -> None:
    late, there = LateEnds(TIMEOUT), {"a1", "b1", "a2", "b2"}
    late.follow(quorum(3, "a", "b"), there)
    late.follow(quorum(4, "a", "b", incarnation=2), there)
    assert late.asks_for(there, 1.0) == []
    assert late.asks_for({"a2", "b2"}, 1.0) == ["a1", "b1"]
    assert late.ends({"a2", "b2"}, {"a", "b"}, {}, {}, 1.0) == []
    assert late.ends({"a2", "b2"}, {"a", "b"}, {}, {}, 1.0 + TIMEOUT) == []
    assert late.asks_for({"a2", "b2"}, 1.0 + TIMEOUT) == []


def test_who_died_is_told_though_it_was_back_before_anybody_noticed() -> None:
    late = LateEnds(TIMEOUT)
    late.follow(seated(3, "a1", "b1", "c1", "d1"), {"a1", "b1", "c1", "d1"})
    late.follow(seated(3, "a1", "b2", "c2", "d2"), {"a1", "b2", "c2", "d1", "d2"})
    assert late.asks_for({"a1", "b2", "c2", "d1", "d2"}, 1.0) == ["b1", "c1"]
    ends = late.ends({"a1", "b2", "c2", "d1", "d2"}, {*"abcd"}, {"b1": ("killed", 7)}, {"c1": "it left"}, 1.0)
    assert said(ends) == [("died", 3, "b"), ("left", 3, "c")]
    late.follow(seated(4, "a1", "b2", "c2", "d2", "e1"), {"a1", "b2", "c2", "d1", "d2", "e1"})
    late_one = late.ends({"a1", "b2", "c2", "d2", "e1"}, {*"abcde"}, {"d1": ("killed", 9)}, {}, 2.0)
    assert said(late_one) == [("died", 3, "d")]


def test_a_lease_that_ends_after_its_replica_was_back_is_no_loss_though_that_is_gone_again() -> None:
    late = LateEnds(TIMEOUT)
    late.follow(seated(3, "a1", "b1"), {"a1", "b1"})
    late.follow(seated(3, "a1", "b2"), {"a1", "b1", "b2"})
    assert said(late.ends({"a1"}, {"a"}, {"b2": ("killed", 9)}, {}, 1.0)) == [("died", 3, "b")]
    assert late.ends({"a1"}, {"a"}, {}, {}, 1.0 + TIMEOUT) == []


def test_a_replica_that_dies_twice_within_one_quorum_id_is_told_twice() -> None:
    """But what two deciders say of one death counts once."""
    late, ends = LateEnds(TIMEOUT), list[HistoryEvent]()
    for life, revision in (("b1", 7), ("b2", 9)):
        late.follow(seated(3, "a1", life), {"a1", life})
        ends += late.ends({"a1"}, {"a"}, {life: ("killed", revision)}, {}, 1.0)
    assert [(one.kind, one.number, one.member) for one in ends] == [("died", 3, "b1"), ("died", 3, "b2")]
    again = replace(ends[1], number=2, by="another decider")
    past = read_history((str(at), encode(one), at) for at, one in enumerate([*ends, again]))
    assert [one.event for one in past] == ends


@pytest.mark.parametrize("others_go_on", [False, True])
def test_the_death_of_who_had_lost_a_lease_is_told_once(others_go_on: bool) -> None:
    """Its sentinel writes the cause for both of its members, in one transaction."""
    late, cause = LateEnds(TIMEOUT), ("killed", 7)
    late.follow(seated(3, "a1", "b1"), {"a1", "b1"})
    late.follow(seated(3, "a1", "b2"), {"a1", "b1", "b2"} if others_go_on else {"a1", "b2"})
    if others_go_on:  # the lease that was lost ends last
        written = quorum_events(seated(3, "a1", "b2"), seated(4, "a1"), {"b2": cause}, {})[:1]
        late.follow(seated(4, "a1"), {"a1", "b1"})
    else:
        assert late.ends({"a1", "b2"}, {"a", "b"}, {}, {}, 0.0) == []
        written = late.ends({"a1"}, {"a"}, {"b2": cause}, {}, 1.0)
    written += late.ends({"a1"}, {"a"}, {"b1": cause}, {}, TIMEOUT)
    past = read_history((str(at), encode(one), at) for at, one in enumerate(written))
    assert [(one.event.kind, one.event.member) for one in past] == [("died", "b2")]


def test_the_loss_of_who_got_its_seat_back_from_another_process_of_its_name_is_told() -> None:
    late = LateEnds(TIMEOUT)
    for member in ("b1", "b2", "b1"):
        late.follow(seated(3, "a1", member), {"a1", "b1", "b2"})
    assert late.ends({"a1"}, {"a"}, {}, {}, 1.0) == []
    assert said(late.ends({"a1"}, {"a"}, {}, {}, 1.0 + TIMEOUT)) == [("lost", 3, "b")]


def test_a_successor_tells_of_the_decider_before_it_without_which_another_one_decided() -> None:
    """Of others that are not in the last quorum it knows nothing: whoever decided that has told of them."""
    late = LateEnds(TIMEOUT)
    assert late.begins
    for one in (quorum(3, "a", "b", "c", "d"), quorum(4, "b", "c")):
        late.follow(one, {"a1", "b1", "c1"})
    assert not late.begins
    assert late.asks_for({"b1", "c1"}, 1.0) == ["a1"]
    assert said(late.ends({"b1", "c1"}, {"b", "c"}, {"a1": ("a was killed", 7)}, {}, 1.0)) == [("died", 3, "a")]


def test_of_quorums_after_failed_commits_the_first_of_a_while_is_told() -> None:
    """Others of the same replicas follow each other within moments, without end."""
    first, second, third = (replace(quorum(id_, "a", "b"), created=float(id_)) for id_ in (3, 4, 5))
    other = quorum(2, "a", "b", "c")
    assert said(quorum_events(first, second, {}, {}, before=other)) == [("quorum", 4, "")]
    assert quorum_events(second, third, {}, {}, before=first) == []
    later = replace(third, created=first.created + REPEATED)
    assert said(quorum_events(second, later, {}, {}, before=first)) == [("quorum", 5, "")]
    assert said(quorum_events(second, quorum(5, "a"), {}, {}, before=first)) == [("lost", 4, "b"), ("quorum", 5, "")]
