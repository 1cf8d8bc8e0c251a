"""Elections and barriers under accidents, with the real facades: who led when, and who passed with whom."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import pytest
from virtual import MemoryClient, flaky
from worlds import World, simulated

from ftcoord import concurrency
from ftcoord.core.election_records import parse_term
from ftcoord.core.layout import barrier_prefix, election_prefix, members_span, run_prefix
from ftcoord.errors import ConfigError, EtcdError, FtcoordError
from ftcoord.etcd.api import Batch, Put, Span, WatchItem
from ftcoord.recipes.barrier import Barrier
from ftcoord.recipes.election import Election, Leadership

RUN = run_prefix("/ftcoord/v1", "run")
ELECTION = election_prefix(RUN, "best")
BARRIER = barrier_prefix(RUN, "loaded")
TTL = 5
DATA = f"{ELECTION}/data"
"""What the leader writes; below the election's prefix, so that one watch shows it in order with the terms."""


class Process:
    """A process with a loop in it."""

    def __init__(self, world: World, name: str, client: MemoryClient, loop: Callable[[], None]) -> None:
        self.world, self.name, self.client = world, name, client
        self.stop = concurrency.event()
        with world.scheduler.process(name):
            self.thread = concurrency.thread(loop, f"{name}'s loop")

    def crash(self) -> None:
        self.client.cut_off()
        self.world.scheduler.pause(self.name)


def wild(world: World, number: int) -> MemoryClient:
    chances = {"refused": 0.02, "lost_requests": 0.03, "lost_answers": 0.05, "late": 0.02, "delay": 0.01}
    return world.etcd.client(flaky(100 * world.seed + number, **chances))


def finish(processes: list[Process]) -> None:
    for process in processes:
        process.stop.set()
    for process in processes:
        process.thread.join(240)
        assert not process.thread.is_alive(), process.name


# -- elections --------------------------------------------------------------------------------------------------------


class Candidate(Process):
    """Campaigns, and writes as long as it leads; also in the time in which it does not know yet that it does not."""

    def __init__(self, world: World, name: str, client: MemoryClient) -> None:
        self.terms: list[int] = []
        self.leads: Leadership | None = None
        super().__init__(world, name, client, self._work)
        self.thread.start()

    def _work(self) -> None:
        with Election("run", "best", self.name, etcd=self.client, lease_ttl=TTL) as election:
            while not self.stop.is_set():
                with contextlib.suppress(TimeoutError, EtcdError), election.campaign(timeout=2) as self.leads:
                    self.terms.append(self.leads.number)
                    self._lead(self.leads)

    def _lead(self, leadership: Leadership) -> None:
        while not (self.stop.is_set() or leadership.wait_lost(0.1)):
            with contextlib.suppress(EtcdError):
                put = Put(DATA, f"{leadership.number} {self.name}".encode())
                self.client.txn([leadership.fence], [put], timeout=1)


class History:
    """What etcd saw, in its order: a write of a leader is always the last term's."""

    def __init__(self, world: World) -> None:
        self.terms: list[int] = []
        self.writes = 0
        world.observer.watch(Span(f"{ELECTION}/", is_prefix=True), 0, self._see)

    def _see(self, item: WatchItem) -> None:
        for event in item.events if isinstance(item, Batch) else ():
            if event.kind != "put":
                continue
            if event.kv.key == f"{ELECTION}/decided":
                number = parse_term(event.kv.key, event.kv.value).number
                if not self.terms or self.terms[-1] != number:  # else the record vanished, and was put back
                    self.terms.append(number)
            elif event.kv.key == DATA:
                assert int(event.kv.value.split()[0]) == self.terms[-1], "a write of a term that is over took effect"
                self.writes += 1


def elected(world: World, candidates: list[Candidate], above: int = 0) -> Candidate:
    def leader() -> Candidate | None:
        now = [one for one in candidates if one.leads and not one.leads.lost and one.leads.number > above]
        return max(now, key=lambda one: one.leads.number if one.leads else 0, default=None)

    world.until(leader, f"somebody leads a term above {above}")
    found = leader()
    assert found is not None
    return found


def check_terms(history: History, candidates: list[Candidate]) -> None:
    assert history.terms == sorted(set(history.terms)), history.terms
    assert history.writes
    led = [number for one in candidates for number in one.terms]
    assert len(led) == len(set(led)), "two processes were told that they lead the same term"


def crashes(world: World, leader: Candidate) -> None:
    leader.crash()


def stands_still(world: World, leader: Candidate) -> None:
    world.scheduler.pause(leader.name)
    world.sleep(3 * TTL)
    world.scheduler.resume(leader.name)


def is_cut_off(world: World, leader: Candidate) -> None:
    leader.client.cut_off()
    world.sleep(3 * TTL)
    leader.client.reconnect()


def loses_its_lease(world: World, leader: Candidate) -> None:
    for key in world.keys(members_span(ELECTION).start):
        if leader.leads is not None and key.endswith(leader.leads._member):
            world.etcd.expire(int(key.rpartition("/")[2], 16))


def loses_its_key(world: World, leader: Candidate) -> None:
    """Somebody deletes it: its lease lives on, and it puts the key back."""
    assert leader.leads is not None
    world.observer.delete(Span(f"{members_span(ELECTION).start}{leader.leads._member}"))
    world.until(lambda: leader.leads is None or leader.leads.lost, "it hears of the next term")


def resigns(world: World, leader: Candidate) -> None:
    assert leader.leads is not None
    leader.leads.resign()
    leader.leads.resign()


@pytest.mark.parametrize(
    "accident",
    [crashes, stands_still, is_cut_off, loses_its_lease, loses_its_key, resigns],
    ids=lambda one: one.__name__,
)
def test_one_leads_after_another(accident: Callable[[World, Candidate], None]) -> None:
    @simulated
    def play(world: World) -> None:
        history = History(world)
        candidates = [Candidate(world, f"c{number}", world.etcd.client()) for number in range(3)]
        leader = elected(world, candidates)
        world.until(lambda: history.writes, "it writes")
        before = history.terms[-1]
        accident(world, leader)
        alive = [one for one in candidates if one is not leader or accident is not crashes]
        elected(world, alive, above=before)
        world.sleep(2)
        finish(alive)
        check_terms(history, candidates)

    play()


@simulated
def test_an_election_on_a_bad_network(world: World) -> None:
    history = History(world)
    candidates = [Candidate(world, f"c{number}", wild(world, number)) for number in range(3)]
    for _ in range(3):
        leader = elected(world, candidates)
        world.sleep(random.uniform(0, 1))
        number = history.terms[-1]
        loses_its_lease(world, leader)
        elected(world, candidates, above=number)
    finish(candidates)
    check_terms(history, candidates)


@simulated
def test_terms_go_on_when_etcd_was_wiped(world: World) -> None:
    empty = world.etcd.snapshot()
    candidates = [Candidate(world, f"c{number}", world.etcd.client()) for number in range(3)]
    for _ in range(2):
        resigns(world, elected(world, candidates))
        world.sleep(1)
    number = max(number for one in candidates for number in one.terms)
    world.etcd.rewind(empty)
    elected(world, candidates, above=number)
    finish(candidates)
    led = [number for one in candidates for number in one.terms]
    assert len(led) == len(set(led)), led


@simulated
def test_a_leadership_keeps_its_election(world: World) -> None:
    """An Election that nobody refers to leaves; one that leads is referred to."""
    leadership = Election("run", "best", etcd=world.etcd.client(), lease_ttl=TTL).campaign(10)
    assert not leadership.wait_lost(2 * TTL)
    leadership.resign()
    assert leadership.lost


@simulated
def test_a_campaign_that_gives_up_does_not_end_another(world: World) -> None:
    first = Election("run", "best", "first", etcd=world.etcd.client(), lease_ttl=TTL)
    second = Election("run", "best", "second", etcd=world.etcd.client(), lease_ttl=TTL)
    held = first.campaign(10)
    found: list[Leadership] = []
    patient = concurrency.thread(lambda: found.append(second.campaign(60)), "patient")
    patient.start()
    with pytest.raises(TimeoutError):
        second.campaign(random.uniform(0.5, 2))
    held.resign()
    patient.join(60)
    assert [one.number for one in found] == [held.number + 1]
    first.close()
    second.close()
    with pytest.raises(FtcoordError):
        second.campaign(5)
    assert not world.keys(members_span(ELECTION).start)


# -- barriers ---------------------------------------------------------------------------------------------------------


class Party(Process):
    """Passes the barrier some times, and counts how often it began to wait, and how often it passed."""

    def __init__(self, world: World, name: str, client: MemoryClient, all_parties: list[Party], times: int) -> None:
        self.begun = self.passed = 0
        self.places: list[int] = []
        self._all, self._times = all_parties, times
        all_parties.append(self)
        super().__init__(world, name, client, self._work)

    def _work(self) -> None:
        with Barrier("run", "loaded", len(self._all), etcd=self.client, lease_ttl=TTL) as barrier:
            while self.passed < self._times:
                concurrency.event().wait(random.uniform(0, 0.5))
                self.begun = self.passed + 1
                try:
                    place = barrier.wait(60)
                except (TimeoutError, EtcdError):
                    continue
                assert all(one.begun >= self.begun for one in self._all), "it passed before all had arrived"
                self.passed += 1
                self.places.append(place)


def pass_together(world: World, parties: list[Party], accident: Callable[[], None] = lambda: None) -> None:
    times = parties[0]._times
    for one in parties:
        one.thread.start()
    while not all(one.passed == times for one in parties):
        world.sleep(random.uniform(0, 1))
        accident()
        assert world.scheduler.time < 1000
    finish(list(parties))
    assert all(
        sorted(places) == list(range(len(parties))) for places in zip(*(one.places for one in parties), strict=True)
    )


@simulated
def test_a_barrier_on_a_bad_network(world: World) -> None:
    parties: list[Party] = []
    for number in range(3):
        Party(world, f"p{number}", wild(world, number), parties, times=4)
    pass_together(world, parties)


@simulated
def test_a_barrier_whose_parties_lose_their_leases(world: World) -> None:
    """A party passes each generation once, whatever leases it has had."""
    parties: list[Party] = []
    for number in range(3):
        Party(world, f"p{number}", world.etcd.client(), parties, times=4)

    def expire_some() -> None:
        for key in world.keys(members_span(BARRIER).start):
            if random.random() < 0.3:
                world.etcd.expire(int(key.rpartition("/")[2], 16))

    pass_together(world, parties, expire_some)


@simulated
def test_a_barrier_while_etcd_comes_and_goes(world: World) -> None:
    parties: list[Party] = []
    for number in range(3):
        Party(world, f"p{number}", world.etcd.client(), parties, times=3)

    def accident() -> None:
        world.etcd.change_leader()
        with world.etcd.outage():
            world.sleep(random.uniform(0, 2 * TTL))

    pass_together(world, parties, accident)


@simulated
def test_a_party_that_was_counted_under_a_lost_lease_does_not_count_again(world: World) -> None:
    """It hears only through its next lease that it has passed."""
    client = world.etcd.client()
    deaf, other = (Barrier("run", "loaded", 2, etcd=one, lease_ttl=TTL) for one in (client, world.etcd.client()))
    client.loses = lambda event: event.kv.key == f"{BARRIER}/decided"
    places: list[int] = []
    thread = concurrency.thread(lambda: places.append(deaf.wait(60)), "deaf")
    thread.start()
    world.until(lambda: world.keys(members_span(BARRIER).start), "it has arrived")
    key = next(iter(world.keys(members_span(BARRIER).start)))
    other.wait(60)
    world.etcd.expire(int(key.rpartition("/")[2], 16))
    thread.join(60)
    assert len(places) == 1
    with pytest.raises(TimeoutError):
        other.wait(3)
    thread = concurrency.thread(lambda: places.append(deaf.wait(60)), "deaf")
    client.loses = lambda event: False
    thread.start()
    other.wait(60)
    thread.join(60)
    assert len(places) == 2


@simulated
def test_who_gives_up_has_not_arrived(world: World) -> None:
    first = Barrier("run", "loaded", 2, etcd=world.etcd.client(), lease_ttl=TTL)
    with pytest.raises(TimeoutError):
        first.wait(random.uniform(0, 1))
    assert not world.keys(members_span(BARRIER).start)
    second = Barrier("run", "loaded", 2, etcd=world.etcd.client(), lease_ttl=TTL)
    with pytest.raises(TimeoutError):
        second.wait(1)
    places: list[int] = []
    thread = concurrency.thread(lambda: places.append(first.wait(60)), "first")
    thread.start()
    places.append(second.wait(60))
    thread.join(10)
    assert sorted(places) == [0, 1]


@simulated
def test_another_number_of_parties(world: World) -> None:
    """It is refused as long as somebody wants the other one; those who are gone refuse nobody."""
    with Barrier("run", "loaded", 1, etcd=world.etcd.client(), lease_ttl=TTL) as alone:
        assert alone.wait(10) == 0
        two = Barrier("run", "loaded", 2, etcd=world.etcd.client(), lease_ttl=TTL)
        with two, pytest.raises(ConfigError, match="parties"):
            two.wait(10)
    three = [Barrier("run", "loaded", 3, etcd=world.etcd.client(), lease_ttl=TTL) for _ in range(3)]
    places: list[int] = []
    threads = [concurrency.thread(lambda one=one: places.append(one.wait(30)), "party") for one in three]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(places) == [0, 1, 2]
