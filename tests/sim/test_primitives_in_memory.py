"""Sessions, writes, stores, feeds and heartbeats under accidents, in virtual time: what each of them promises."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from doors import Door
from torch.distributed import DistStoreError
from virtual import Call, Fate, MemoryClient, MemoryEtcd, flaky
from worlds import TTL, World, play, simulated

from ftcoord import concurrency
from ftcoord.core.layout import store_values_span
from ftcoord.core.lease import TRUST_FOR, SessionState
from ftcoord.errors import (
    ConfigError,
    EtcdError,
    EtcdNoSpace,
    EtcdUnavailable,
    OutcomeUnknown,
    RequestRefused,
)
from ftcoord.etcd.api import Event, Get, KeyValue, Put, RangeResult, Span, TxnResult, absent
from ftcoord.primitives.exactly_once import ExactlyOnceWriter
from ftcoord.primitives.feed import Feed
from ftcoord.primitives.renewal import INTRODUCED_AFTER
from ftcoord.primitives.sentinel import SentinelFor
from ftcoord.primitives.session import Session
from ftcoord.primitives.write_once import write_once
from ftcoord.store import EtcdStore

CONNECTED, SUSPENDED, LOST = SessionState.CONNECTED, SessionState.SUSPENDED, SessionState.LOST


def wild(seed: int) -> Callable[[Call], Fate]:
    """A network on which anything happens to one call in four."""
    return flaky(seed, refused=0.05, lost_requests=0.06, lost_answers=0.08, late=0.06, delay=0.02)


# -- leases -----------------------------------------------------------------------------------------------------------


BAD_TTLS = (0, -1, 86_401, 1e300, 2.5, math.inf, math.nan, True, None, "soon")


@pytest.mark.parametrize("ttl", BAD_TTLS)
def test_a_session_asks_etcd_for_no_lease_that_makes_no_sense(ttl: Any) -> None:
    """etcd would grant 2 s where 0 is asked for by mistake, or decades."""

    def scenario(world: World) -> None:
        with pytest.raises(
            ConfigError, match=r"^ttl(=.* is not valid| is missing): give a whole number from 1 to 86400 \(seconds\)"
        ):
            Session(world.etcd.client(), ttl)
        assert not world.etcd.leases

    play(scenario, 0)


@pytest.mark.parametrize("ttl", BAD_TTLS)
def test_a_store_refuses_such_a_ttl_before_it_has_a_client(ttl: Any) -> None:
    """And not with its first change. Its endpoints are refused where there is nothing else to refuse."""
    with pytest.raises(ConfigError, match=r"^ttl(=| is missing)"):
        EtcdStore("no endpoint", ttl=ttl)
    with pytest.raises(ConfigError, match=r"^endpoints="):
        EtcdStore("no endpoint", ttl=60)


@simulated
def test_a_session_is_suspended_before_anybody_can_see_its_lease_end(world: World) -> None:
    told: list[tuple[SessionState, float]] = []
    client = world.etcd.client()
    session = Session(client, TTL, lambda state: told.append((state, concurrency.now())))
    client.put("/key", b"", session.lease_id)
    world.sleep(random.uniform(0, 3 * TTL))
    client.cut_off()
    cut = concurrency.now()
    world.until(lambda: not world.keys("/key"), "its key is gone")
    (state, when), gone = told[0], concurrency.now()
    assert state is SUSPENDED
    assert cut + TTL * (TRUST_FOR - 1 / 3) - 0.1 < when < gone - TTL * (1 - TRUST_FOR) + 0.1
    assert session.state is SUSPENDED, "only etcd can say that it is lost"
    client.reconnect()
    world.until(lambda: session.state is LOST, "it is told")
    assert [state for state, _ in told] == [SUSPENDED, LOST]


@simulated
def test_leases_whose_etcd_hangs_cost_the_others_none(world: World) -> None:
    """All are renewed by one thread of the process."""
    with MemoryEtcd() as away:
        far = away.client()
        hanging = [Session(far, 3) for _ in range(5)]
        kept = [Session(world.observer, 6) for _ in range(5)]
        far.cut_off()
        world.sleep(10 * 6)
        assert [session.state for session in kept] == [CONNECTED] * 5
        assert [session.state for session in hanging] == [SUSPENDED] * 5
        for session in (*kept, *hanging):
            session.orphan()


class Notes:
    """A bystander that notes what it is told of one lease: when it was renewed last, and whether it is to rest."""

    def __init__(self) -> None:
        self.renewed_at: float | None = None
        self.rests = False

    def keep(self, lease_id: int, ttl: float, sent_at: float) -> None:
        self.renewed_at, self.rests = concurrency.now(), False

    def rest(self, lease_id: int) -> None:
        self.rests = True

    def drop(self, lease_id: int) -> None:
        self.renewed_at = None


@simulated
def test_a_bystander_stands_by_while_etcd_revokes_the_lease(world: World) -> None:
    """The process may be killed meanwhile. It renews nothing, though: what is not revoked is to end by time."""
    client, notes, over = world.etcd.client(), Notes(), concurrency.event()

    def close() -> None:
        with contextlib.suppress(EtcdUnavailable, OutcomeUnknown):
            session.close(timeout=2)
        over.set()

    with mock.patch.object(SentinelFor, "of", return_value=notes):
        session = Session(client, TTL, deaths="/deaths")
    world.sleep(random.uniform(INTRODUCED_AFTER + 0.1, 2 * TTL))
    client.cut_off()
    world.sleep(random.uniform(0, 0.5))  # a renewal may be under way
    concurrency.thread(close, "closes").start()
    world.sleep(1)
    assert not over.is_set()
    assert notes.renewed_at is not None
    assert notes.rests
    if random.random() < 0.5:
        client.reconnect()
    over.wait()
    world.sleep(TTL)  # after which no renewal is under way
    assert notes.renewed_at is None


# -- writes -----------------------------------------------------------------------------------------------------------


@simulated
def test_what_etcd_has_no_space_for_and_writes_all_the_same_is_written(world: World) -> None:
    world.observer.put("/beside", b"")
    world.etcd.set_no_space(True, let_in=1)
    outcome = write_once(
        world.observer, Put("/key", b"1"), None, before=[Get(Span("/beside"))], reads=[Get(Span("/", is_prefix=True))]
    )
    beside, below = outcome.reads
    assert (outcome.done, outcome.kv) == (True, world.observer.get("/key").one)
    assert [kv.key for kv in (*beside.kvs, *below.kvs)] == ["/beside", "/beside", "/key"]
    assert outcome.revision == beside.revision == below.revision
    with pytest.raises(EtcdNoSpace):
        write_once(world.observer, Put("/other", b"1"), None)
    assert world.observer.get("/other").one is None


@simulated
def test_a_change_is_made_once_or_never(world: World) -> None:
    """Behind a gate that opens and closes: what was made is there once, and what was refused never comes, also late."""
    made: dict[str, bool] = {}
    stop = concurrency.event()

    def change(writer: int) -> None:
        client = world.etcd.client(wild(10 * world.seed + writer))
        changes = ExactlyOnceWriter(client, f"/ops/{writer}/", 600, None, None, concurrency.event())
        for number in range(6):
            name = f"/made/{writer}/{number}"
            made[name] = changes.make([Put(name, b"")], [absent("/gate")], "/gate", concurrency.now() + 60).done
        changes.close()

    def open_and_close() -> None:
        while not stop.wait(random.uniform(0, 0.5)):
            world.observer.put("/gate", b"")
            stop.wait(random.uniform(0, 0.5))
            world.observer.delete(Span("/gate"))

    gate = concurrency.thread(open_and_close, "gate")
    gate.start()
    run(world, *(lambda writer=writer: change(writer) for writer in range(3)))
    world.sleep(10)  # what was late has arrived
    stop.set()
    gate.join()
    there = world.observer.range(Get(Span("/made/", is_prefix=True)))
    assert {kv.key: kv.version for kv in there.kvs} == {name: 1 for name, done in made.items() if done}
    assert len(made) == 18


STORE_OPERATIONS: dict[str, Callable[[EtcdStore], object]] = {
    "add": lambda store: store.add("key", 1),
    "append": lambda store: store.append("key", "1"),
}


@pytest.mark.parametrize("operate", STORE_OPERATIONS.values(), ids=STORE_OPERATIONS)
def test_an_operation_that_others_always_overtake_ends_in_time(operate: Callable[[EtcdStore], object]) -> None:
    @simulated
    def play(world: World) -> None:
        class Overtaken(Door):
            tries = 0

            def txn(self, *args: Any, **how: Any) -> TxnResult:
                self.tries += 1
                assert self.tries < 100, "it tries and tries"
                world.observer.delete(Span(f"{store_values_span('/s/').start}key"))
                world.observer.put(f"{store_values_span('/s/').start}key", b"1")
                return super().txn(*args, **how)

        store = EtcdStore(Overtaken(world.observer), "/s/", timedelta(seconds=5))
        began = concurrency.now()
        with pytest.raises(DistStoreError, match="others changed 'key'"):
            operate(store)
        assert concurrency.now() - began < 8
        store.close()

    play()


@pytest.mark.parametrize("operate", STORE_OPERATIONS.values(), ids=STORE_OPERATIONS)
def test_an_operation_succeeds_though_others_change_the_key_all_the_time(
    operate: Callable[[EtcdStore], object],
) -> None:
    """The key keeps its value for 3 ms, and a request takes 2 ms."""

    @simulated
    def play(world: World) -> None:
        client = world.etcd.client(lambda call: Fate(arrives=0.001, answers=0.001))
        store = EtcdStore(client, "/s/", timedelta(seconds=60))
        stop = concurrency.event()

        def overwrite() -> None:
            while not stop.is_set():
                world.observer.put(f"{store_values_span('/s/').start}key", b"1")
                world.sleep(0.003)

        def change() -> None:
            for _ in range(10):
                operate(store)
            stop.set()

        run(world, overwrite, change)
        store.close()

    play()


@simulated
def test_adding_zero_does_not_compete_with_those_who_add(world: World) -> None:
    """Not even if the first of them adds between the read and the put."""

    class Preceded(Door):
        def txn(self, *args: Any, **how: Any) -> TxnResult:
            asked.append("txn")
            adding.add("key", 5)
            return super().txn(*args, **how)

        def range(self, *args: Any, **how: Any) -> RangeResult:
            asked.append("range")
            return super().range(*args, **how)

    asked: list[str] = []
    adding = EtcdStore(world.observer, "/s/", timedelta(seconds=5))
    reading = EtcdStore(Preceded(world.observer), "/s/", timedelta(seconds=5))
    assert reading.add("key", 0) == 5
    assert asked == ["range", "txn"]
    assert (adding.add("key", 5), reading.add("key", 0)) == (10, 10)
    assert asked == ["range", "txn", "range"]
    for store in (adding, reading):
        store.close()


@simulated
def test_adding_zero_to_what_is_no_number_is_refused(world: World) -> None:
    """Also if somebody sets it between the read and the put."""

    class Preceded(Door):
        def txn(self, *args: Any, **how: Any) -> TxnResult:
            world.observer.put(f"{store_values_span('/s/').start}key", b"text")
            return super().txn(*args, **how)

    store = EtcdStore(Preceded(world.observer), "/s/", timedelta(seconds=5))
    for _ in range(2):
        with pytest.raises(DistStoreError, match="holds no decimal number"):
            store.add("key", 0)
    store.close()


# -- copies and changes of keys ---------------------------------------------------------------------------------------


def disturb(world: World, client: MemoryClient, chance: random.Random) -> None:
    """Something that happens to a watch."""

    def compact() -> None:
        with contextlib.suppress(RequestRefused):  # it is compacted already
            world.etcd.compact(max(world.etcd.revision - chance.randrange(3), 1))

    chance.choice((world.etcd.change_leader, client.cut_off, client.reconnect, compact, lambda: None))()


def write_at_random(world: World, chance: random.Random, leases: list[int]) -> None:
    key = f"/f/{chance.randrange(4)}"
    kind = chance.randrange(6)
    if kind == 0:
        world.observer.delete(Span(key))
    elif kind == 1:
        world.observer.delete(Span("/f/", is_prefix=True))
    elif kind == 2:
        leases.append(world.observer.grant(2).id)
        world.observer.put(key, b"leased", leases[-1])
    else:
        world.observer.txn((), [Put(key, str(chance.random()).encode()), Put("/elsewhere", b"")])


@simulated
def test_a_feed_tells_every_change_that_fits_the_last(world: World) -> None:
    """Whatever interrupts it, each change fits the one before; and a lost one is made up for with its key's next."""
    chance = random.Random(world.seed)
    client = world.etcd.client()
    lost: list[str] = []

    def loses(event: Event) -> bool:
        if chance.random() < 0.2:
            lost.append(event.kv.key)
            return True
        return False

    client.loses = loses
    feed, told = Feed(client, Span("/f/", is_prefix=True)), dict[str, KeyValue]()

    def catch_up() -> None:
        quiet = 0
        while quiet < 3:
            news = None
            with contextlib.suppress(EtcdError):
                news = feed.next(0.2)
            quiet = quiet + 1 if news is None else 0
            for key, was, now in news.changes if news else ():
                assert told.get(key) == was != now
                told.pop(key, None)
                if now is not None:
                    told[key] = now

    leases: list[int] = []
    for _ in range(15):
        write_at_random(world, chance, leases)
        disturb(world, client, chance)
        catch_up()
    client.reconnect()
    client.loses = lambda _event: False
    world.sleep(5)
    world.observer.put(lost[-1] if lost else "/f/0", b"last")
    catch_up()
    assert told == {kv.key: kv for kv in world.observer.range(Get(Span("/f/", is_prefix=True))).kvs}
    feed.close()


# -- a key that a thread keeps at its wanted value ---------------------------------------------------------------------


def run(world: World, *works: Callable[[], object]) -> None:
    """Do all of these at the same time, each in a process of its own."""
    threads = []
    for number, work in enumerate(works):
        with world.scheduler.process(f"worker {number}"):
            threads.append(concurrency.thread(work, f"work {number}"))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
