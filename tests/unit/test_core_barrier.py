"""Who passes a barrier: each rule, and what every order of events keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from ftcoord.core.barrier import decide, outlook
from ftcoord.core.barrier_records import Arrival, Generation, Passed, encode, parse_arrival, parse_generation
from ftcoord.core.outlook import Next, Standing
from ftcoord.core.situation import Asking, Situation
from ftcoord.core.verdict import Publish, Wait
from ftcoord.errors import StateError


def arrived(*members: str, parties: int = 2, after: int = 0) -> list[Asking[Arrival]]:
    return [Asking(member, Arrival(parties, after)) for member in members]


def decided(situation: Situation[Generation, Arrival]) -> Generation:
    verdict = decide(situation)
    assert isinstance(verdict, Publish), verdict
    return verdict.record


def test_nobody_passes_before_all_have_arrived() -> None:
    assert isinstance(decide(Situation(arrived("a"))), Wait)
    assert isinstance(decide(Situation([])), Wait)


def test_they_pass_together_in_the_order_in_which_they_came() -> None:
    assert decided(Situation(arrived("b", "a"))) == Generation(1, 2, (Passed("b", 1, 0), Passed("a", 1, 1)))


def test_one_that_is_too_many_waits_for_the_next_generation() -> None:
    first = decided(Situation(arrived("a", "b", "c")))
    assert [one.member for one in first.passed] == ["a", "b"]
    assert isinstance(decide(Situation(arrived("a", "b", "c"), first, highest=1)), Wait)
    again = [*arrived("a", after=1), *arrived("b"), *arrived("c")]
    second = decided(Situation(again, first, highest=1))
    assert {one.member: (one.number, one.index) for one in second.passed} == {"a": (2, 0), "b": (1, 1), "c": (2, 1)}


def test_one_that_left_is_forgotten_and_counts_for_nothing() -> None:
    first = decided(Situation(arrived("a", "b")))
    second = decided(Situation([*arrived("b", after=1), *arrived("c")], first, highest=1))
    assert {one.member for one in second.passed} == {"b", "c"}


def test_all_must_want_the_same_number_of_parties() -> None:
    both = [*arrived("a", parties=2), *arrived("b", parties=3)]
    stated = decided(Situation(both))
    assert (stated.number, stated.parties, stated.passed) == (0, 2, ())
    assert isinstance(decide(Situation(both, stated)), Wait)
    only = decided(Situation(arrived("b", parties=3), stated))
    assert only.parties == 3


def test_a_record_that_vanished_is_put_back() -> None:
    first = decided(Situation(arrived("a", "b")))
    assert decided(Situation(arrived("a", "b"), first, vanished=True, highest=1)) == first


@pytest.mark.parametrize(
    "situation",
    [Situation(arrived("a", "b"), highest=9), Situation(arrived("a", "b", after=9))],
    ids=["seen, and lost", "known to a member"],
)
def test_a_generation_is_above_all_that_were_ever_known(situation: Situation[Generation, Arrival]) -> None:
    assert decided(situation).number == 10


def test_outlook() -> None:
    ask = Arrival(2, 3)
    assert outlook(None, ["x"], ask).standing is Standing.PENDING
    assert outlook(Generation(3, 2, (Passed("x", 3, 0),)), ["x"], ask).standing is Standing.PENDING
    assert outlook(Generation(4, 2, (Passed("y", 4, 0),)), ["x"], ask).standing is Standing.PENDING
    assert outlook(Generation(4, 3, ()), ["x"], ask).next is Next.RETURN
    assert outlook(Generation(4, 3, ()), ["x"], ask).standing is Standing.REFUSED


def test_one_that_hears_late_has_passed_under_whatever_lease() -> None:
    now = Generation(6, 2, (Passed("old", 4, 1), Passed("y", 6, 0)))
    look = outlook(now, ["old", "new"], Arrival(2, 3))
    assert (look.standing, look.next) == (Standing.ANSWERED, Next.RETURN)


@dataclass(frozen=True)
class World:
    """Members by age, with the last generation that each has heard that it passed; and the record."""

    alive: tuple[tuple[str, int], ...] = ()
    record: Generation | None = None
    vanished: bool = False
    numbers: tuple[int, ...] = ()

    def next(self) -> Iterator[World]:
        names = {name for name, _ in self.alive}
        for name in set("abc") - names:
            yield replace(self, alive=(*self.alive, (name, 0)))
        for one in self.alive:
            yield replace(self, alive=tuple(other for other in self.alive if other != one))
            heard = max(
                (p.number for p in (self.record.passed if self.record else ()) if p.member == one[0]), default=0
            )
            if heard > one[1]:
                yield replace(self, alive=tuple((one[0], heard) if other == one else other for other in self.alive))
        if self.record is not None and not self.vanished:
            yield replace(self, vanished=True)
        members = [Asking(name, Arrival(2, after)) for name, after in self.alive]
        verdict = decide(Situation(members, self.record, self.vanished, max(self.numbers, default=0)))
        if isinstance(verdict, Publish):
            self.check(verdict.record)
            yield replace(
                self, record=verdict.record, vanished=False, numbers=(*self.numbers, verdict.record.number)[-2:]
            )

    def check(self, now: Generation) -> None:
        """What a new generation must be, after this."""
        last = self.numbers[-1] if self.numbers else 0
        if now.number > last:
            new = [one for one in now.passed if one.number == now.number]
            assert sorted(one.index for one in new) == [0, 1]
            waited = dict(self.alive)
            before = {one.member: one.number for one in (self.record.passed if self.record else ())}
            assert all(one.member in waited for one in new)
            assert all(waited[one.member] >= before.get(one.member, 0) for one in new), "it had not arrived again"
        else:
            assert now == self.record


def test_every_order_of_events_lets_two_pass_who_both_arrived() -> None:
    seen, new = {World()}, [World()]
    for _ in range(9):
        new = [state for state in {state for world in new for state in world.next()} if state not in seen]
        seen.update(new)
    assert max(world.record.number for world in seen if world.record) > 2


@pytest.mark.parametrize("record", [Arrival(2, 3, "x"), Generation(3, 2, (Passed("m", 3, 1),), "by")])
def test_records_are_read_as_they_were_written(record: Arrival | Generation) -> None:
    parse, other = (
        (parse_arrival, parse_generation) if isinstance(record, Arrival) else (parse_generation, parse_arrival)
    )
    assert parse("/k", encode(record)) == record
    with pytest.raises(StateError, match="/k"):
        other("/k", encode(record))


def test_a_barrier_of_nobody_is_no_request() -> None:
    with pytest.raises(StateError, match="parties"):
        parse_arrival("/k", encode(Arrival(0, 0)))
