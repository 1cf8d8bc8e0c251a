"""The barrier's two halves: each rule, then every order of arrivals, lost leases, decisions and late hearing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
from exploring import checked, explore
from invariants import check_generation

from ftcoord.core.barrier import BarrierSituation, decide, outlook
from ftcoord.core.barrier_records import Arrival, Generation, Passed, encode, parse_arrival, parse_generation
from ftcoord.core.outlook import Next, Standing
from ftcoord.core.situation import Asking, Situation
from ftcoord.core.verdict import Publish, Verdict, Wait
from ftcoord.errors import StateError


def asking(member: str, after: int = 0, parties: int = 2, party: str = "", known: int = 0) -> Asking[Arrival]:
    return Asking(member, Arrival(party or member, parties, after, known))


A, B = asking("a"), asking("b")


def published(situation: BarrierSituation) -> Generation:
    found = decide(situation)
    assert isinstance(found, Publish), found
    return found.record


def test_nobody_passes_before_enough_have_arrived() -> None:
    assert decide(Situation([])) == Wait("nobody has arrived", rule="B2 arriving")
    assert decide(Situation([A])) == Wait("1 of 2 parties have arrived", rule="B2 arriving")


def test_the_oldest_pass_together() -> None:
    found = published(Situation([A, B, asking("c")]))
    assert found == Generation(1, 2, (Passed("a", 1, 0), Passed("b", 1, 1)))


def test_who_has_passed_has_not_arrived_again() -> None:
    last = Generation(1, 2, (Passed("a", 1, 0), Passed("b", 1, 1)))
    assert isinstance(decide(Situation([A, B, asking("c")], last, highest=1)), Wait)
    assert published(Situation([A, asking("b", 1), asking("c")], last, highest=1)).passed == (
        Passed("a", 1, 0),
        Passed("b", 2, 0),
        Passed("c", 2, 1),
    )


def test_a_party_with_another_lease_counts_once() -> None:
    assert isinstance(decide(Situation([A, asking("a2", party="a")])), Wait)
    last = Generation(1, 2, (Passed("a", 1, 0), Passed("b", 1, 1)))
    assert isinstance(decide(Situation([asking("b", 1), asking("a2", party="a")], last, highest=1)), Wait), (
        "it has passed through its old lease, and is about to hear of it"
    )


def test_a_number_of_parties_counts_as_long_as_somebody_wants_it() -> None:
    three = asking("c", parties=3)
    last = Generation(4, 2, ())
    assert published(Situation([three, A], last, highest=4)) == Generation(4, 2, (), ("c",))
    assert outlook(Generation(4, 2, (), ("c",)), ["c"], three.ask).standing is Standing.REFUSED
    assert published(Situation([three], last, highest=4)) == Generation(4, 3, (), ())
    assert outlook(last, ["c"], three.ask).standing is Standing.PENDING, "those who wanted two may be long gone"
    assert published(Situation([A, three])).refused == ("c",)


def test_what_a_party_hears() -> None:
    now = Generation(5, 2, (Passed("a", 3, 1), Passed("b", 5, 0)))
    assert outlook(None, ["a"], A.ask).standing is Standing.PENDING
    assert outlook(now, ["other"], replace(A.ask, after=2)).next is Next.RETURN, "late, and through another lease"
    assert outlook(now, ["a"], replace(A.ask, after=3)).standing is Standing.PENDING


def test_a_record_that_vanished_is_put_back() -> None:
    last = Generation(5, 2, (Passed("a", 5, 0), Passed("b", 5, 1)))
    assert published(Situation([asking("a", 4), asking("b", 5)], last, vanished=True, highest=5)) == last


def test_no_generation_is_used_twice_though_etcd_lost_writes() -> None:
    assert published(Situation([asking("a", 7), asking("b", 7)])).number == 8
    assert published(Situation([asking("a", known=9), B])).number == 10
    assert published(Situation([A, B], highest=9)).number == 10


def test_records_are_read_as_they_were_written() -> None:
    arrival, record = Arrival("p", 2, 3, 4, "nonce"), Generation(3, 2, (Passed("p", 3, 0),), ("c",), "a 7")
    assert parse_arrival("/k", encode(arrival)) == arrival
    assert parse_generation("/k", encode(record)) == record


@pytest.mark.parametrize(
    "bad", [Arrival("p", 0, 0), Arrival("p", 2, -1), Arrival("p", 2, 0, 2**62), Arrival("p", 2, 2**62)], ids=str
)
def test_arrivals_that_cannot_be_are_refused(bad: Arrival) -> None:
    with pytest.raises(StateError, match="/k"):
        parse_arrival("/k", encode(bad))


# -- every order of events --------------------------------------------------------------------------------------------

PARTIES, WAITS, LEASES = 2, 2, (2, 2, 1)
"""How many pass together, how often each process waits, and how many leases it may have."""
ALL = 1000
"""Deeper than any state: explore to the end."""
Decide = Callable[[BarrierSituation], Verdict[Generation]]


class Process(NamedTuple):
    """One process.

    Args:
        left: how many leases it may still have.
        leases: how many it had; the last one's key holds its ask.
        waits: how many waits it has begun; `waiting` in the last one.
        after: the last generation that it knows to have passed.
        counted: the generation that its present wait was counted in, 0 for none: the truth, which it may not know.
        heard: the last record that it heard of.
    """

    left: int
    leases: int = 0
    waits: int = 0
    waiting: bool = False
    after: int = 0
    counted: int = 0
    heard: Generation | None = None

    def with_lease(self) -> Process:
        return self._replace(left=self.left - 1, leases=self.leases + 1)


class Now(NamedTuple):
    """The whole world. A member's id is its process and the number of its lease; a party's is its process."""

    processes: tuple[Process, ...]
    members: tuple[Asking[Arrival], ...] = ()
    record: Generation | None = None

    def with_process(self, at: int, process: Process) -> Now:
        return self._replace(processes=(*self.processes[:at], process, *self.processes[at + 1 :]))


def lease_of(member: Asking[Arrival]) -> tuple[int, int]:
    """Whose key that is, and under which of its leases."""
    at, lease = member.member.split(".")
    return int(at), int(lease)


def nameless(now: Now) -> Hashable:
    """Two worlds with one of these differ only in which process is called what. They are numbered in the order of the
    keys of their last leases, which no event takes away."""
    keys = [(*lease_of(one), one.ask.after) for one in now.members]
    newest = [at for at, lease, _ in keys if lease == now.processes[at].leases]
    fresh = sorted((at for at in range(len(now.processes)) if at not in newest), key=lambda at: now.processes[at].left)
    places = {at: place for place, at in enumerate([*newest, *fresh])}

    def told(record: Generation | None) -> Hashable:
        return record and (record.number, *((places[int(one.party)], one.number, one.index) for one in record.passed))

    processes = [now.processes[at] for at in places]
    known = ((one.left, one.waits, one.waiting, one.after, one.counted, told(one.heard)) for one in processes)
    there = ((places[at], lease == now.processes[at].leases, after) for at, lease, after in keys)
    return tuple(known), tuple(there), told(now.record)


def writes(now: Now, at: int, process: Process) -> Now:
    """It says that it has arrived, in the key of its last lease."""
    one = Asking(f"{at}.{process.leases}", Arrival(str(at), PARTIES, process.after))
    there = any(other.member == one.member for other in now.members)
    kept = tuple(one if other.member == one.member else other for other in now.members)
    return now.with_process(at, process)._replace(members=kept if there else (*kept, one))


def after_decision(now: Now, decide: Decide) -> Now | None:
    highest = now.record.number if now.record else 0
    verdict = decide(Situation(now.members, now.record, False, highest))
    if isinstance(verdict, Wait):
        return None
    record = verdict.record
    passed = [one for one in record.passed if one.number == record.number]
    if record.number == highest:
        return now._replace(record=record)
    assert record.number == highest + 1
    assert len({one.party for one in passed}) == PARTIES, "some party counts twice"
    assert sorted(one.index for one in passed) == list(range(PARTIES))
    processes = list(now.processes)
    for one in passed:
        process = processes[int(one.party)]
        assert process.waiting, "it has not arrived"
        assert not process.counted, "it was counted before"
        processes[int(one.party)] = process._replace(counted=record.number)
    return now._replace(processes=tuple(processes), record=record)


def events(now: Now, decide: Decide) -> list[tuple[str, Now]]:
    found = [*following(now, decide)]
    waiting = sum(one.waiting for one in now.processes)
    assert found or waiting < PARTIES, "enough have arrived, and nobody passes"
    return found


def following(now: Now, decide: Decide) -> Iterator[tuple[str, Now]]:
    for at, process in enumerate(now.processes):
        if not process.waiting and process.waits < WAITS:
            begun = process if process.leases else process.with_lease()
            yield f"{at} waits", writes(now, at, begun._replace(waits=process.waits + 1, waiting=True, counted=0))
        if process.leases and process.waiting and process.left:  # lost; the old key may live on
            yield f"{at} takes another lease", writes(now, at, process.with_lease())
        if now.record is not None and process.waiting and process.heard != now.record:
            yield f"{at} hears", now.with_process(at, hears(process, at, now.record))
    for one in now.members:
        at, lease = lease_of(one)
        if lease < now.processes[at].leases:  # a lease that was lost ends at last
            left = tuple(other for other in now.members if other != one)
            yield f"the lease {one.member} ends", now._replace(members=left)
    if now.members and (decided := after_decision(now, decide)) is not None:
        yield "decided", decided


def hears(process: Process, at: int, record: Generation) -> Process:
    heard = process._replace(heard=record)
    ask = Arrival(str(at), PARTIES, process.after)
    if outlook(record, [f"{at}.{process.leases}"], ask).standing is not Standing.ANSWERED:
        return heard
    mine = next(one for one in record.passed if one.party == str(at))
    assert mine.number == process.counted, "it passes a generation that it was not counted in"
    return heard._replace(waiting=False, after=mine.number)


def explored(decide: Decide) -> int:
    return explore(start_of(LEASES), lambda now: events(now, decide), lambda now: None, ALL, nameless)


def start_of(leases: tuple[int, ...]) -> Now:
    return Now(tuple(map(Process, leases)))


def test_every_order_of_events() -> None:
    assert explored(checked(decide, check_generation)) > 5_000


def test_what_can_happen_does_not_depend_on_names() -> None:
    """So one state of those that differ only in names is enough."""
    all_of_them, without_names = set[Hashable](), set[Hashable]()
    start = start_of((2, 2))
    count = explore(start, lambda now: events(now, decide), lambda now: all_of_them.add(nameless(now)), ALL)
    explore(start, lambda now: events(now, decide), lambda now: without_names.add(nameless(now)), ALL, nameless)
    assert all_of_them == without_names
    assert len(all_of_them) < count


def counts_who_has_passed(situation: BarrierSituation) -> Verdict[Generation]:
    return decide(
        replace(situation, members=[asking(one.member, 10**6, 2, one.ask.party) for one in situation.members])
    )


def too_few(situation: BarrierSituation) -> Verdict[Generation]:
    found = decide(situation)
    if isinstance(found, Publish) and found.record.passed:
        return replace(found, record=replace(found.record, passed=found.record.passed[:-1]))
    return found


def forgets_who_passed(situation: BarrierSituation) -> Verdict[Generation]:
    last = situation.previous
    return decide(replace(situation, previous=replace(last, passed=()) if last else None))


def never(situation: BarrierSituation) -> Verdict[Generation]:
    found = decide(situation)
    return Wait("forever") if isinstance(found, Publish) and found.record.number == 2 else found


@pytest.mark.parametrize("planted", [counts_who_has_passed, too_few, forgets_who_passed, never])
def test_planted_faults_are_found(planted: Decide) -> None:
    with pytest.raises(AssertionError):
        explored(planted)
